"""What the benchmarks time and how, their arithmetic and their runs; no GPU is needed."""

import dataclasses
import importlib
import math
import re
import sys
import time
from pathlib import Path

import benchmarks_by_path  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import pearl_jax
from benchmarks import (
    blackwell,
    forms,
    grouped_matmul,
    peers,
    protocol,
    results,
    scaling,
    shapes,
)
from pearl_jax import library, tiling, timing


def test_slope_leaves_out_the_fixed_cost():
    fixed, call = 1e-3, 2e-5
    bursts = [fixed + count * 5 * call for count in (7, 21)]
    assert timing.slope(*bursts, count=7, calls=5) == pytest.approx(call)


class FakeGpu:
    """Bursts that take a fixed time, and as long again for each call as it is told to."""

    def __init__(self, monkeypatch, fixed):
        self.now, self.fixed, self.order = 0.0, fixed, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def burst(self, name, call, calls, start=0.0):
        def begin(count):
            self.now += count * start
            return count

        def wait(count):
            self.order.append((name, count))
            self.now += max(count * (calls * call - start), 0) + self.fixed

        return timing.Burst(begin, wait, calls)


def test_bursts_are_timed_in_turn_and_their_fixed_cost_taken_out(monkeypatch):
    fake = FakeGpu(monkeypatch, fixed=5e-4)
    bursts = {"a": fake.burst("a", 1e-4, 4), "b": fake.burst("b", 3e-3, 2)}
    found = timing.measure_bursts(bursts, rounds=3)
    assert found["a"].seconds == pytest.approx(1e-4)
    assert found["b"].samples == pytest.approx([3e-3] * 3)
    assert not found["a"].host_bound
    a, b = round(0.004 / 9e-4), 1
    one_round = [("a", a), ("a", 3 * a), ("b", b), ("b", 3 * b)]
    assert fake.order[-12:] == one_round + one_round[2:] + one_round[:2] + one_round


def test_a_burst_that_the_host_holds_up_is_marked(monkeypatch):
    fake = FakeGpu(monkeypatch, fixed=0)
    bursts = {"slow": fake.burst("slow", 1e-5, 1, start=2e-5), "fast": fake.burst("fast", 1e-4, 1)}
    found = timing.measure_bursts(bursts, rounds=1)
    assert found["slow"].host_bound
    assert not found["fast"].host_bound


def test_floor_counts_groups_with_rows_only():
    peaks = protocol.Peaks(bandwidth=1e12, flops=1e15)
    floor = protocol.grouped_matmul_floor(64, 32, np.array([3, 0, 5]), peaks)
    assert floor.num_bytes == 2 * (8 * (64 + 32) + 2 * 64 * 32)
    assert floor.flops == 2 * 8 * 64 * 32
    assert (floor.seconds, floor.bound) == (floor.num_bytes / 1e12, "bytes")


def test_floor_of_an_outer_product_writes_empty_groups_too():
    peaks, sizes = protocol.Peaks(bandwidth=1e12, flops=1e15), np.array([3, 0, 5])
    shape = shapes.Shape(g=3, k=64, n=32)
    problem = peers.FORMS["wgrad"].problem(shape, 8)
    found = {column: problem.floor(sizes, column, peaks) for column in problem.columns}
    for column, out_itemsize in (("same", 2), ("f32", 4)):
        assert found[column].num_bytes == 2 * 8 * (64 + 32) + out_itemsize * 3 * 64 * 32
        assert found[column].flops == 2 * 8 * 64 * 32
        assert found[column].seconds == found[column].num_bytes / 1e12
    slow = protocol.Peaks(bandwidth=1e12, flops=1e12)
    busy = protocol.grouped_outer_floor(64, 32, np.array([10**4]), slow)
    assert (busy.seconds, busy.bound) == (2 * 10**4 * 64 * 32 / 1e12, "flops")


def test_floor_of_an_h200():
    peaks, shape = protocol.GPU_PEAKS["NVIDIA H200"], shapes.MODELS["GLM-5.3"].gate_up
    found = [
        protocol.grouped_matmul_floor(shape.k, shape.n, np.full(shape.g, rows), peaks)
        for rows in (1, 1024)
    ]
    assert [round(1e6 * f.seconds) for f in found] == [366, 2088]
    assert [f.bound for f in found] == ["bytes", "flops"]


def test_shapes_are_those_of_one_device():
    found = shapes.select(shapes.MODELS)
    assert {(c.name, c.expert_parallel): dataclasses.astuple(c.shape) for c in found} == {
        ("GLM-5.3 gate_up", 8): (32, 6144, 4096),
        ("GLM-5.3 down", 8): (32, 2048, 6144),
        ("DeepSeek-V4-Pro gate_up", 8): (48, 7168, 6144),
        ("DeepSeek-V4-Pro down", 8): (48, 3072, 7168),
        ("Kimi-K3 gate_up", 8): (112, 3584, 6144),
        ("Kimi-K3 down", 8): (112, 3072, 3584),
        ("Qwen3-235B gate_up", 8): (16, 4096, 3072),
        ("Qwen3-235B down", 8): (16, 1536, 4096),
        ("Qwen3-30B-A3B gate_up", 1): (128, 2048, 1536),
        ("Qwen3-30B-A3B down", 1): (128, 768, 2048),
        ("Mixtral-8x7B gate_up", 1): (8, 4096, 28672),
        ("Mixtral-8x7B down", 1): (8, 14336, 4096),
        ("gpt-oss-120b gate_up", 8): (16, 2880, 5760),
        ("gpt-oss-120b down", 8): (16, 2880, 2880),
        ("Llama-4-Maverick gate_up", 8): (16, 5120, 16384),
        ("Llama-4-Maverick down", 8): (16, 8192, 5120),
        ("Llama-4-Scout gate_up", 1): (16, 5120, 16384),
        ("Llama-4-Scout down", 1): (16, 8192, 5120),
    }
    found = shapes.select(["Mixtral-8x7B", "GLM-5.3"], ["down"], [1, 8, 16])
    assert [(c.name, c.expert_parallel, c.shape.g) for c in found] == [
        ("Mixtral-8x7B down", 1, 8),
        ("Mixtral-8x7B down", 8, 1),
        ("GLM-5.3 down", 1, 256),
        ("GLM-5.3 down", 8, 32),
        ("GLM-5.3 down", 16, 16),
    ]


@pytest.mark.parametrize("name", shapes.GROUPINGS)
def test_group_sizes_sum_to_the_rows(name):
    for m, g in ((0, 3), (7, 1), (1, 4), (1000, 32)):
        sizes = shapes.GROUPINGS[name](m, g, seed=3)
        assert sizes.dtype == np.int32
        assert sizes.shape == (g,)
        assert sizes.sum() == m
        assert sizes.min() >= 0
        np.testing.assert_array_equal(sizes, shapes.GROUPINGS[name](m, g, seed=3))


def test_one_of_hot_groups_has_half_of_the_rows_and_the_others_share_the_rest():
    sizes = np.sort(shapes.hot(2001, 11))
    assert sizes[-1] == 1001
    # 100 each of 10 on average, with a standard deviation of less than 10.
    assert 50 < sizes[0] < sizes[-2] < 150


@pytest.mark.parametrize("sizes", [[3, 0, 5], [8, 0, 0], [1, 3, 4]])
def test_errors_of_groups_are_those_of_the_oracle(rng, sizes):
    want = rng.standard_normal((8, 6)).astype(np.float32)
    got = want + 0.1 * rng.standard_normal((8, 6)).astype(np.float32)
    found = float(protocol.worst_group_error(got, want, jnp.array(sizes)))
    assert found == pytest.approx(oracle.worst_group_error(got, want, sizes), 1e-5)
    # Without sizes, groups are the entries of the first axis.
    entries = got.reshape(4, 2, 6), want.reshape(4, 2, 6)
    found = float(protocol.worst_group_error(*entries))
    assert found == pytest.approx(oracle.worst_group_error(*entries, None), 1e-5)
    zero = np.zeros_like(want)
    assert float(protocol.worst_group_error(zero, zero, jnp.array(sizes))) == 0
    assert protocol.worst_group_error(want, zero, jnp.array(sizes)) == math.inf
    got[0, 0] = np.nan
    assert math.isnan(protocol.worst_group_error(got, want, jnp.array(sizes)))
    with pytest.raises(ValueError, match=r"shapes \(4, 2, 6\) and \(8, 6\) differ"):
        protocol.worst_group_error(entries[0], want)


def test_uneven_groupings_are_for_some_rows_only_unless_asked_for():
    fwd = peers.FORMS["fwd"]
    assert fwd.groupings(4) == ("uniform",)
    assert fwd.groupings(16) == tuple(shapes.GROUPINGS)


TINY = shapes.Case("tiny", 1, shapes.Shape(g=3, k=16, n=8))


def problem(rows, form="fwd", dtype="bfloat16"):
    return peers.FORMS[form].problem(TINY.shape, TINY.shape.g * rows, dtype)


def test_both_layouts_hold_the_same_weights():
    operands = problem(2).operands
    (lhs, gnk), (same, gkn) = operands["gnk"][0], operands["gkn"][0]
    assert lhs is same
    np.testing.assert_array_equal(gnk, jnp.swapaxes(gkn, 1, 2))
    assert gnk.shape == (3, 8, 16)


def test_the_gradient_of_rows_contracts_their_columns():
    dgrad = peers.FORMS["dgrad"]
    assert dgrad.product(shapes.Shape(g=3, k=16, n=8)) == shapes.Shape(g=3, k=8, n=16)
    assert dgrad.peers == peers.FORMS["fwd"].peers


def test_each_dtype_of_a_weight_gradient_is_timed_once():
    assert list(problem(2, "wgrad").columns) == ["same", "f32"]
    assert list(problem(2, "wgrad", "float32").operands) == ["same"]
    assert [d.name for d in problem(2).columns.values()] == ["bfloat16", "bfloat16"]


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Programs of several calls."""
    monkeypatch.setattr(forms, "on_gpu", lambda: True)


def test_a_program_has_few_calls_where_one_takes_long_or_writes_much(as_on_gpu, monkeypatch):
    p, outer = problem(2), problem(2, "wgrad")
    assert p.calls("gnk") == outer.calls("f32") == forms.MAX_CALLS
    with monkeypatch.context() as patch:
        patch.setattr(forms, "MAX_OUTPUT_BYTES", 2 * (2 * p.m * p.shape.n))
        assert p.calls("gnk") == 2
        patch.setattr(forms, "MAX_OUTPUT_BYTES", 2 * (2 * 3 * 16 * 8))
        assert (outer.calls("same"), outer.calls("f32")) == (2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(forms, "ASSUMED", protocol.Peaks(bandwidth=1.0, flops=1.0))
        assert p.calls("gnk") == 1
    monkeypatch.setattr(forms, "on_gpu", lambda: False)
    assert p.calls("gnk") == 1


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_calls_go_through_all_copies_of_the_operands(monkeypatch, calls):
    """Each copy has other values here; results of one round of programs are those of all."""
    monkeypatch.setattr(protocol, "COLD_BYTES", 2000)  # of 960 in one copy
    p = problem(2)
    copies = p.operands["gnk"]
    assert len(copies) == 3
    copies[:] = [(lhs, (i + 1) * rhs) for i, (lhs, rhs) in enumerate(copies)]
    seen = []

    def function(lhs, rhs, group_sizes):
        return pearl_jax.grouped_matmul(lhs, rhs, group_sizes, transpose_rhs=True)

    ready = forms.jax_candidate(function, p, "gnk", calls=calls)(np.int32([2, 2, 2]))
    for _ in range(-(-len(copies) // calls)):
        seen += [float(jnp.abs(out).sum()) for out in ready.burst.start(1)]
    want = [float(jnp.abs(function(*arrays, jnp.int32([2, 2, 2]))).sum()) for arrays in copies]
    assert seen[:3] == pytest.approx(want, rel=2e-2)
    assert ready.burst.calls == calls
    assert float(jnp.abs(ready.result()).sum()) == pytest.approx(want[0], rel=2e-2)


def test_memory_is_that_of_operands_results_and_programs():
    wgrad, shape = peers.FORMS["wgrad"], shapes.MODELS["Kimi-K3"].gate_up
    m, result = shape.g * 64, 4 * shape.g * shape.k * shape.n
    operands = 2 * 2 * m * (shape.k + shape.n)
    got = wgrad.num_bytes(shape, m, "bfloat16") - 2 * protocol.COLD_BYTES
    assert got == operands + 4 * result
    fwd, (g, k, n) = peers.FORMS["fwd"], (3, 16, 8)
    got = fwd.num_bytes(TINY.shape, 6, "bfloat16") - 2 * protocol.COLD_BYTES
    assert got == 2 * 2 * (6 * k + g * k * n) + 2 * (1 + forms.MAX_CALLS) * 2 * 6 * n


@pytest.fixture
def quick(monkeypatch):
    """Short samples of few copies."""
    monkeypatch.setattr(timing, "MIN_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "BURST_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(protocol, "COLD_BYTES", 1)


def run(names, path=None, rows=(2,), form="fwd", dtype="bfloat16", case=TINY):
    grouped_matmul.run(
        form,
        [(case, mean, ["uniform", "one_hot"]) for mean in rows],
        dtype=dtype,
        names=names,
        rounds=2,
        peaks=protocol.Peaks(1e10, 1e11),
        path=path,
    )
    return results.read(path) if path else None


def test_a_run_has_a_line_for_each_point_and_keeps_them(quick, capsys, tmp_path):
    rows = run(["lax", "dense"], tmp_path / "found.csv", rows=(2, 4))
    out = capsys.readouterr().out
    assert [line.split()[2:4] for line in out.splitlines() if line.startswith("tiny")] == [
        [rows, grouping] for rows in ("2", "4") for grouping in ("uniform", "one_hot")
    ]
    assert "lax over pearl: worst" in out
    assert "#" not in out  # that dense takes even groups only goes without saying
    first = {(r.candidate, r.layout): r for r in rows if r.cell == rows[0].cell}
    both = [("pearl", x) for x in ("gnk", "gkn")], [("dense", x) for x in ("gnk", "gkn")]
    assert set(first) == {*both[0], *both[1], ("lax", "gkn")}
    assert len(rows) == 4 * len(first)
    for row in first.values():
        assert (row.g, row.k, row.n, row.rows, row.grouping) == (3, 16, 8, 2, "uniform")
        assert row.min_us <= row.us <= row.max_us
        floor = protocol.grouped_matmul_floor(
            16, 8, np.array([2, 2, 2]), protocol.Peaks(1e10, 1e11)
        )
        assert row.floor_us == pytest.approx(1e6 * floor.seconds, abs=1e-3)
    uneven = [r for r in rows if r.grouping == "one_hot" and r.candidate == "dense"]
    assert {(r.timed, r.note) for r in uneven} == {(False, grouped_matmul.UNEVEN)}


@pytest.mark.parametrize("form", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_that_a_cpu_runs_agrees(quick, capsys, tmp_path, form, dtype):
    names = [name for name, peer in peers.FORMS[form].peers.items() if peer.on_cpu]
    rows = run(names, tmp_path / "found.csv", form=form, dtype=dtype)
    assert names == ["lax", "dense"]
    assert "differs" not in capsys.readouterr().out
    timed = {(r.peer, r.layout) for r in rows if r.timed and r.grouping == "uniform"}
    if form == "wgrad":
        f32 = {("pearl", "f32")} if dtype != "float32" else set()
        assert timed == {("pearl", "same"), ("lax", "same"), ("dense", "same")} | f32
        # All groups are written, with rows or without.
        assert len({r.floor_us for r in rows if r.layout == "same"}) == 1
    else:
        assert len(timed) == 5


def test_what_a_file_has_is_not_timed_again(quick, capsys, monkeypatch, tmp_path):
    path = tmp_path / "found.csv"
    before = run(["lax"], path)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(timing, "measure", None)
        assert run(["lax"], path) == before
        patch.setattr(forms.Form, "problem", None)
        assert run(["lax"], path) == before
    assert "tiny" not in capsys.readouterr().out
    # An interrupted run: the second cell is not there.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(x for x in lines if "one_hot" not in x))
    after = run(["lax"], path)
    assert [r.cell for r in after] == [r.cell for r in before]
    # Another peer is timed, in turn with pearl_jax.
    more = run(["lax", "dense"], path)
    assert {r.peer for r in more[len(after) :]} == {"pearl", "lax", "dense"}


def test_a_case_that_does_not_fit_is_said_and_kept(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(grouped_matmul, "memory", lambda: 2**30)
    monkeypatch.setattr(forms.Form, "problem", None)
    case = shapes.Case("large", 1, shapes.Shape(16, 2**12, 2**13))
    rows = run(["lax"], tmp_path / "found.csv", case=case)
    note = "needs 2.0 GiB, there are 1.0"
    assert [(r.candidate, r.note, r.timed) for r in rows] == [("pearl", note, False)] * 2
    assert f"# over 1 devices: {note} (from large with 2 rows on)" in capsys.readouterr().out
    assert run(["lax"], tmp_path / "found.csv", case=case) == rows


def test_a_case_that_runs_out_of_memory_is_said_and_kept(quick, capsys, monkeypatch, tmp_path):
    prepare, groupings = grouped_matmul.prepare, []

    def fails(problem, candidates, sizes):
        groupings.append(sizes.tolist())
        if len(groupings) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        return prepare(problem, candidates, sizes)

    monkeypatch.setattr(grouped_matmul, "prepare", fails)
    rows = run(["lax"], tmp_path / "found.csv")
    assert len(groupings) == 2
    assert [r.timed for r in rows] == [True] * 3 + [False]
    assert (rows[-1].grouping, rows[-1].candidate) == ("one_hot", "pearl")
    assert rows[-1].note.startswith("JaxRuntimeError: RESOURCE_EXHAUSTED")
    assert "# over 1 devices: JaxRuntimeError: RESOURCE_EX" in capsys.readouterr().out
    monkeypatch.setattr(grouped_matmul, "prepare", lambda *args: {}["other errors"])
    with pytest.raises(KeyError):
        run(["lax"])


def test_a_run_as_on_a_gpu(quick, as_on_gpu, monkeypatch, tmp_path):
    """Programs of several calls, by the difference of two bursts."""
    calls, measure_bursts = {}, timing.measure_bursts

    def measure(bursts, rounds):
        calls.update({key: burst.calls for key, burst in bursts.items()})
        return measure_bursts(bursts, rounds)

    monkeypatch.setattr(forms, "_implementation", lambda: None)
    monkeypatch.setattr(timing, "measure", measure)
    rows = run(["lax", "dense"], tmp_path / "found.csv")
    assert calls["pearl", "gnk"] == calls["dense", "gkn"] == forms.MAX_CALLS
    assert calls["lax", "gkn"] == 1
    assert {r.candidate for r in rows if r.timed} >= {"pearl", "lax", "lax rollout", "dense"}


def jax_peer(function, column="gkn"):
    def variants(p, column):
        return {"": forms.jax_candidate(function, p, column)}

    return forms.Peer((column,), variants, "jax")


def test_a_wrong_weight_gradient_is_found_in_its_group(quick, monkeypatch, capsys):
    def wrong(lhs, rhs, group_sizes):
        return pearl_jax.grouped_outer(lhs, rhs, group_sizes).at[1].mul(1.1)

    monkeypatch.setitem(peers.FORMS["wgrad"].peers, "wrong", jax_peer(wrong, "same"))
    run(["wrong", "lax"], form="wgrad")
    out = capsys.readouterr().out
    assert re.search(r"# wrong: differs from pearl_jax by (9\.\de-02|1\.0e-01) in a group", out)


def test_absent_and_failing_peers_are_said_once_and_kept(quick, monkeypatch, capsys, tmp_path):
    def fails(lhs, rhs, group_sizes):
        raise ValueError("no\nsuch   tile")

    monkeypatch.setitem(peers.FORMS["fwd"].peers, "failing", jax_peer(fails))
    monkeypatch.setitem(sys.modules, "tokamax", None)
    rows = run(["tokamax", "failing"], tmp_path / "found.csv", rows=(2, 4))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert len(notes) == 2
    assert notes[0].startswith("# tokamax: tokamax cannot be imported: ModuleNotFoundError")
    assert notes[1] == "# failing: ValueError: no such tile (from tiny with 2 rows on)"
    assert [r.note for r in rows if r.candidate == "failing"] == ["ValueError: no such tile"] * 4


def test_a_peer_that_is_wrong_is_not_timed(quick, monkeypatch, capsys):
    def wrong(lhs, rhs, group_sizes):
        return 1.1 * pearl_jax.grouped_matmul(lhs, rhs, group_sizes)

    monkeypatch.setitem(peers.FORMS["fwd"].peers, "wrong", jax_peer(wrong))
    run(["wrong", "lax"])
    out = capsys.readouterr().out
    assert "# wrong: differs from pearl_jax by 1.0e-01 in a group, not timed" in out
    assert "wrong: -\n" in out
    monkeypatch.setitem(peers.FORMS["fwd"].peers, "too", jax_peer(wrong))
    with pytest.raises(RuntimeError, match="pearl_jax differs from all of too, wrong"):
        run(["wrong", "too"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--form", "fwd", "wgrad", "--peers", "triton"], "wgrad has no peer triton"),
        (["--form", "bwd"], "invalid choice: 'bwd'"),
        (["--expert-parallel", "0"], "must be at least 1"),
        (["--rows", "4", "0"], "must be at least 1"),
    ],
)
def test_bad_arguments(capsys, given, message):
    with pytest.raises(SystemExit):
        grouped_matmul.main(given)
    assert message in capsys.readouterr().err


def test_a_cpu_gets_shapes_scaled_down(monkeypatch):
    given = {}
    monkeypatch.setattr(protocol, "measure_peaks", lambda dtype: protocol.Peaks(1e10, 1e11))
    monkeypatch.setattr(grouped_matmul.jax.config, "update", lambda *args: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(
        grouped_matmul, "run", lambda form, points, **options: given.update({form: points})
    )
    argv = ["--cpu", "--case", "headline", "Qwen3-235B", "--projection", "down"]
    grouped_matmul.main([*argv, "--expert-parallel", "1", "8", "--form", "fwd", "wgrad"])
    want = [
        (shapes.Case(name, devices, shapes.Shape(*shape)), rows, ("uniform", "zipf"))
        for name, devices, shape in (
            ("headline", 1, (32, 1024, 1024)),
            ("Qwen3-235B down", 1, (32, 192, 512)),
            ("Qwen3-235B down", 8, (16, 192, 512)),
        )
        for rows in (16, 64)
    ]
    assert given == {"fwd": want, "wgrad": want}


def test_loops_of_a_disassembly():
    """From the label that a branch goes back to; a branch ahead makes no loop."""
    inner = ["SYNCS.ARRIVE", "@P1 BRA `(.L_x_3)", "UTMALDG.2D [UR1]", "@P0 BRA `(.L_x_2)"]
    code = [".L_x_1:", "LDTM.x32 R4", ".L_x_2:", *inner, ".L_x_3:", "BRA.U UP0, `(.L_x_1)"]
    outer = [x for x in code if not x.endswith(":")]
    assert blackwell.loops(code) == [inner, outer]
    assert blackwell.innermost([inner, outer], "UTMALDG", "SYNCS.ARRIVE") == inner
    assert blackwell.innermost([inner, outer], "LDTM") == outer
    assert blackwell.innermost([inner, outer], "UTCHMMA") == ()
    assert blackwell.count(outer, "BRA", "LDTM") == 4


@pytest.mark.parametrize("arch", [None, "sm_90a"])
def test_without_a_blackwell_gpu_nothing_is_run_and_it_says_so(monkeypatch, arch):
    monkeypatch.setattr(library, "present_arch", lambda: arch)
    monkeypatch.setattr(blackwell.subprocess, "run", None)
    with pytest.raises(SystemExit, match="there is no Blackwell GPU here"):
        blackwell.run_on_gpu()


def test_on_a_blackwell_gpu_everything_is_checked_tuned_and_compared(monkeypatch):
    """The commands are those of programs that take them; none is run here."""
    commands = []
    monkeypatch.setattr(library, "present_arch", lambda: blackwell.ARCH)
    monkeypatch.setattr(blackwell.subprocess, "run", lambda command, **_: commands.append(command))
    blackwell.run_on_gpu()
    tests, tuning, comparison, tables = (command[3:] for command in commands)
    assert [command[2] for command in commands] == [
        "pytest",
        "pearl_jax.autotune",
        "benchmarks.grouped_matmul",
        "benchmarks.report",
    ]
    assert (blackwell.ROOT / tests[-1] / "test_values.py").exists()
    tuned = []
    tune = importlib.import_module("pearl_jax.autotune.__main__")
    monkeypatch.setattr(tune, "tune", lambda problems, **_: tuned.extend(problems))
    tune.main(tuning)
    assert {problem.form for problem in tuned} == set(tiling.FORMS)
    options = grouped_matmul._parser().parse_args(comparison)
    assert options.form == list(tiling.FORMS)
    assert options.measure_peaks
    assert [options.csv] == tables


@pytest.mark.parametrize("tokens", [64, 512, 4096, 32768])
def test_scaling_meets_what_was_measured(tokens):
    """On one and two H200s, all_to_all in worst-case slots, GLM-5.3."""
    file = Path(scaling.__file__).parent / "results/h200-x2.csv"
    measured = {(r.form, r.candidate): r.us for r in results.read(file) if r.rows == tokens}
    model = shapes.MODELS["GLM-5.3"]

    def us(devices):
        e = scaling.estimate(model, devices, devices, tokens, 2, scaling.LAYER)
        return 1e6 * e.exchange_seconds, 1e6 * (e.exchange_seconds + e.compute_seconds)

    one, two = measured["ep_forward", "alone"], measured["ep_forward", "all_to_all"]
    exchanges = measured["ep_exchanges", "all_to_all"]
    assert us(1) == (0, pytest.approx(one, rel=0.19))
    assert us(2) == (pytest.approx(exchanges, rel=0.15), pytest.approx(two, rel=0.19))


def test_scaling_adds_up():
    """1000 tokens of width 10 on each of 16 GPUs, 2 nodes of 8; each goes to 4 of 32 experts."""
    model = shapes.Model(10, 5, 32, 4, expert_parallel=16)
    links = scaling.Links(8, node_bandwidth=1e6, network_bandwidth=1e5, start_seconds=0.1)
    assert scaling.slots(1000, 4, 16, capacity=2) == 500
    assert scaling.slots(1000, 4, 2, capacity=2) == 1000  # a token goes there once
    # Out and back in 2 bytes a value, 4 + 4 bytes for each choice; 7 GPUs near, 8 far.
    num_bytes = 500 * (2 * 10 * 2 + 4 * 8)
    got = scaling.exchange_seconds(model, 1000, 16, 2, links)
    assert got == pytest.approx(3 * 0.1 + 8 * num_bytes / 1e5)
    near_only = scaling.exchange_seconds(model, 1000, 8, 1, links)
    assert near_only == pytest.approx(3 * 0.1 + 7 * num_bytes / 1e6)
    assert scaling.exchange_seconds(model, 1000, 1, 2, links) == 0
    weights = 3 * 10 * 5  # gate, up and down of an expert
    peaks = protocol.Peaks(bandwidth=1e6, flops=1e6)
    row = (4 * 10 + 5 * 5) * 2  # bytes that one with a slot moves
    # One token of each of 16 GPUs chooses 4 of 32 experts: 64 choices, not all different.
    peaks_of_memory = protocol.Peaks(bandwidth=1e4, flops=1e9)
    read = 2 * (1 - (31 / 32) ** 64) * weights * 2 / 1e4
    for tokens, want, of in ((1000, 2 * 4000 * weights / 1e6, peaks), (1, read, peaks_of_memory)):
        rest = 2 * tokens * 4 * row / of.bandwidth  # twice the even share has slots
        got = scaling.compute_seconds(model, tokens, 16, 2, of)
        assert got == pytest.approx(want + rest)
    e = scaling.estimate(model, 32, 16, 1000, 2, peaks, links)
    assert e.alone == pytest.approx(32000 / (e.compute_seconds + e.exchange_seconds))
    assert e.overlapped == pytest.approx(32000 / max(e.compute_seconds, e.exchange_seconds))
