"""The benchmark of a whole layer: its arithmetic, and what it does with peers; no GPU is needed."""

import functools
import math

import benchmarks_by_path  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pearl_jax
from benchmarks import forms, moe_layer, results, shapes

MODEL = shapes.Model(16, 8, num_experts=8, top_k=2, expert_parallel=2)


@pytest.fixture(scope="module")
def operands():
    normal = lambda seed: jax.random.normal(jax.random.key(seed), (12, 16), jnp.bfloat16)
    return moe_layer.random_layer(MODEL), normal(2), normal(3)


def forward_in_float64(layer, tokens, top_k):
    router, gate_up, down = (
        np.asarray(x, np.float64) for x in (layer.router, layer.experts.gate_up, layer.experts.down)
    )
    tokens = np.asarray(tokens, np.float64)
    out = np.zeros_like(tokens)
    for t, token in enumerate(tokens):
        scores = np.exp(token @ router)
        chosen = np.argsort(-scores)[:top_k]
        for e in chosen:
            gate, up = np.einsum("d,djf->jf", token, gate_up[e])
            out[t] += scores[e] / scores[chosen].sum() * (gate / (1 + np.exp(-gate)) * up) @ down[e]
    return out


def test_the_layer_has_the_experts_of_one_device(operands):
    layer, tokens, target = operands
    assert layer.router.shape == (16, 4)
    assert layer.experts.gate_up.shape == (4, 16, 2, 8)
    got = moe_layer.forward(layer, tokens, target, top_k=2, contraction=pearl_jax.grouped_matmul)
    want = forward_in_float64(layer, tokens, 2)
    error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=1) / np.linalg.norm(
        want, axis=1
    )
    assert error.max() < 2e-2


def test_parts_make_up_the_whole(operands):
    layer, tokens, target = operands
    parts = moe_layer.parts_of(layer, tokens, top_k=2)
    assert [*parts] == ["router", "sort", "gather", "up", "activation", "down", "combine"]
    function, last = parts["combine"]
    want = jax.jit(
        functools.partial(moe_layer.forward, top_k=2, contraction=pearl_jax.grouped_matmul)
    )(layer, tokens, target)
    assert float(moe_layer.worst_error(function(*last), want)) < 1e-2


def test_the_step_has_the_gradients_of_tokens_router_and_experts(operands):
    layer, tokens, target = operands
    options = {"top_k": 2, "contraction": pearl_jax.grouped_matmul}
    loss, (d_layer, d_tokens) = moe_layer.step(layer, tokens, target, **options)
    out = moe_layer.forward(layer, tokens, target, **options)
    want = np.vdot(np.asarray(out, np.float64), np.asarray(target, np.float64))
    assert float(loss) == pytest.approx(want, 1e-3)
    assert d_tokens.shape == tokens.shape
    assert jax.tree.map(jnp.shape, d_layer) == jax.tree.map(jnp.shape, layer)
    assert all(bool(jnp.any(x != 0)) for x in jax.tree.leaves((d_layer, d_tokens)))


def test_no_token_has_its_experts_by_rounding_alone():
    layer, top_k = moe_layer.random_layer(MODEL), 2
    tokens = moe_layer.random_tokens(layer, 30000, top_k)
    raw = jax.random.normal(jax.random.key(2), tokens.shape, tokens.dtype)

    def least_distance(tokens):
        logits = np.sort(np.asarray(tokens, np.float64) @ np.asarray(layer.router, np.float64))
        return (logits[:, -top_k] - logits[:, -top_k - 1]).min()

    assert least_distance(raw) < 1e-5 < least_distance(tokens)
    assert 0 < (tokens != raw).any(1).sum() < 30


def test_the_worst_entry_counts():
    want = [jnp.ones((3, 4)), jnp.zeros((2, 2)), jnp.float32(2)]
    got = [want[0].at[1].mul(1.5), want[1], want[2]]
    assert float(moe_layer.worst_error(got, want)) == pytest.approx(0.5)
    assert float(moe_layer.worst_error([want[0], want[1] + 1, want[2]], want)) == math.inf
    assert math.isnan(moe_layer.worst_error([want[0].at[0, 0].set(jnp.nan), *want[1:]], want))


def run_point(capsys, monkeypatch, **contractions):
    monkeypatch.setattr(
        moe_layer, "CONTRACTIONS", {"pearl": moe_layer.CONTRACTIONS["pearl"], **contractions}
    )
    monkeypatch.setattr(moe_layer, "PACKAGES", dict.fromkeys(moe_layer.CONTRACTIONS, "jax"))
    layer = moe_layer.random_layer(MODEL)
    names = list(moe_layer.CONTRACTIONS)
    blank = moe_layer.describe("tiny", MODEL, 12)
    rows = moe_layer.run_point(blank, MODEL, layer, names, rounds=1)
    return rows, capsys.readouterr().out.splitlines()


def test_peers_that_fail_or_are_wrong_are_said_and_not_timed(capsys, monkeypatch):
    def fails(lhs, rhs, group_sizes):
        raise ValueError("no\nsuch   tile")

    def wrong(lhs, rhs, group_sizes):
        return 1.1 * pearl_jax.grouped_matmul(lhs, rhs, group_sizes)

    monkeypatch.setattr(moe_layer, "PASSES", ("forward",))
    rows, lines = run_point(
        capsys,
        monkeypatch,
        failing=lambda *args: fails,
        wrong=lambda *args: wrong,
        lax=moe_layer._lax,
        absent=lambda *args: forms.import_peer("no_such_module"),
    )
    assert {r.candidate for r in rows if r.form == "forward" and r.timed} == {"pearl", "lax"}
    notes = {r.candidate: r.note for r in rows if r.note}
    assert list(notes) == ["failing", "wrong", "absent"]
    assert notes["failing"] == "ValueError: no such tile"
    assert lines[0].split()[:3] == ["tiny", "12", "forward"]
    assert lines[1].startswith("  parts, us: router ")
    assert lines[2] == "# failing, forward: ValueError: no such tile"
    assert lines[3].startswith("# wrong, forward: differs from pearl by ")
    assert lines[4].startswith("# absent, forward: no_such_module cannot be imported")


def test_lax_and_mosaic_are_left_out_where_they_cannot_do_it(monkeypatch):
    glm = moe_layer.LAYERS["GLM-5.3"]
    assert moe_layer._lax(glm, 512, 3) is jax.lax.ragged_dot
    with pytest.raises(forms.Absent, match=r"skipped, 32 times the arithmetic would take 1\.8 s"):
        moe_layer._lax(glm, 24576, 3)
    monkeypatch.setattr(moe_layer, "LAX_MAX_SECONDS", math.inf)
    with pytest.raises(forms.Absent, match="skipped, would need 72 GiB"):
        moe_layer._lax(glm, 24576, 1)
    with pytest.raises(forms.Absent, match="it has no gradient"):
        moe_layer._mosaic(glm, 64, 3)


def test_lines_have_the_columns_of_the_header():
    blank = moe_layer.describe("GLM-5.3", moe_layer.LAYERS["GLM-5.3"], 64)
    row = functools.partial(blank._replace, form="step")
    rows = [
        row(candidate="pearl", us=812.4, gib=5.2),
        row(candidate="lax", us=1624.8, gib=9.0, host_bound=True),
    ]
    names = ["pearl", "lax", "mosaic"]
    header, line = moe_layer.header(names), moe_layer.line(rows, names)
    assert line.split() == ["GLM-5.3", "64", "step", "812", "2.00*", "-", "5.20", "9.00", "-"]
    for title, value in (("pearl us", "812"), ("lax x", "2.00*"), ("lax GiB", "9.00")):
        assert header.index(title) + len(title) == line.index(value) + len(value)
    assert (blank.g, blank.k, blank.n, blank.ep) == (32, 6144, 2048, 8)


def test_a_run_on_a_cpu_keeps_every_time_and_makes_it_once(capsys, tmp_path, monkeypatch):
    path = tmp_path / "times.csv"
    argv = ["--cpu", "--layer", "Qwen3-30B-A3B", "--peers", "lax", "--rounds", "1", "--csv"]
    moe_layer.main([*argv, str(path)])
    rows = results.read(path)
    assert [(r.form, r.candidate) for r in rows[:4]] == [
        (name, candidate) for name in moe_layer.PASSES for candidate in ("pearl", "lax")
    ]
    assert len(rows) == 4 + 7
    assert all(r.us > 0 and r.gib > 0 for r in rows)
    assert "Qwen3-30B-A3B" in capsys.readouterr().out
    monkeypatch.setattr(moe_layer, "random_layer", None)
    moe_layer.main([*argv, str(path)])
    assert results.read(path) == rows


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "--rounds and --tokens must be at least 1"),
        ([], "there is no GPU; --cpu runs it scaled down"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit):
        moe_layer.main(argv)
    assert message in capsys.readouterr().err
