"""The benchmark of experts over devices: what it refuses, what it keeps, and that it runs."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import benchmarks_by_path  # noqa: F401
import jax
import jax.numpy as jnp
import pytest
from interpreter import ROOT
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import expert_parallel, moe_layer, results, shapes
from pearl_jax.expert_parallel import ExpertParallel

TOKENS = 16
MODEL = shapes.Model(16, 8, num_experts=8, top_k=2, expert_parallel=4)


class Wrong(ExpertParallel):
    """Its first 32 tokens are half as long again."""

    def __call__(self, *args, **options):
        out, counts, dropped = super().__call__(*args, **options)
        return jnp.where(jnp.arange(len(out))[:, None] < 32, 1.5, 1) * out, counts, dropped


def run_point(*strategies, model=MODEL):
    mesh = jax.make_mesh((4,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:4])
    alone = moe_layer.random_layer(dataclasses.replace(model, expert_parallel=1)).experts
    experts = alone, jax.device_put(alone, NamedSharding(mesh, P("expert")))
    blank = moe_layer.describe("tiny", model, TOKENS)._replace(form="ep_forward")
    return expert_parallel.run_point(blank, model, mesh, experts, strategies, rounds=1)


def test_every_strategy_is_timed_and_what_it_leaves_out_is_said(capsys):
    rows = run_point("replicate", "all_to_all,capacity=0.5", "ragged")
    assert {(r.form, r.candidate) for r in rows if r.timed} == {
        ("ep_forward", "alone"),
        ("ep_exchanges", "dense"),
        *((f"ep_{x}", "replicate") for x in ("forward", "step", "exchanges")),
        *((f"ep_{x}", "all_to_all capacity=0.5") for x in ("forward", "step")),
    }
    assert all(r.us > 0 and r.gib > 0 for r in rows if r.timed)
    assert {(r.ep, r.g, r.k, r.n, r.rows) for r in rows} == {(4, 2, 16, 8, TOKENS)}
    notes = {r.candidate: r.note for r in rows if r.note}
    left_out = re.fullmatch(r"(\d+) of 128 choices left out", notes.pop("all_to_all capacity=0.5"))
    assert 128 * 0.4 < int(left_out[1]) < 128  # room for half of them
    assert [*notes] == ["ragged"]  # a CPU does not have it
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["alone", "replicate", "all_to_all"]
    assert lines[0].split()[-1] == "1.00x"
    assert f"# all_to_all capacity=0.5, {TOKENS} tokens: {left_out[0]}" in lines


def test_operands_results_and_scratch_count():
    model = dataclasses.replace(MODEL, num_experts=64)
    rows = {(r.form, r.candidate): r for r in run_point("gather", model=model)}
    weights = 3 * 64 * 16 * 8 * 2 / 2**30
    assert rows["ep_forward", "alone"].gib > weights
    assert weights / 4 < rows["ep_forward", "gather"].gib < rows["ep_forward", "alone"].gib
    # The step also has gradients of a quarter of them.
    assert rows["ep_step", "gather"].gib > rows["ep_forward", "gather"].gib + 0.9 * weights / 4


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (None, "16 of 16 tokens differ from one device, not timed"),
        (1.2, r"16 of 16 tokens differ from one device, not timed, \d of 128 choices left out"),
    ],
)
def test_a_wrong_strategy_is_not_timed(capacity, message, monkeypatch):
    def parse(strategy, mesh):
        return Wrong(mesh, strategy="all_to_all", capacity=capacity)

    monkeypatch.setattr(expert_parallel, "parse", parse)
    rows = [r for r in run_point("gather") if r.candidate == "gather" and r.form != "ep_exchanges"]
    assert [(r.form, r.timed) for r in rows] == [("ep_forward", False), ("ep_step", False)]
    assert all(re.fullmatch(message, r.note) for r in rows)


def test_wrong_tokens_are_counted():
    want = jnp.ones((5, 4)).at[4].set(0)
    got = want.at[0].mul(1.01).at[1].mul(1.1).at[2, 0].set(math.nan).at[4].set(1e-9)
    assert int(expert_parallel.num_wrong(got, want)) == 3
    assert int(expert_parallel.num_wrong(want, want)) == 0


def test_a_run_on_a_cpu_keeps_every_time_and_makes_it_once(tmp_path):
    times, path = (
        tmp_path / "times.csv",
        os.pathsep.join([str(ROOT), str(Path(__file__).parents[1])]),
    )
    argv = ["--cpu", "--rounds=1", f"--csv={times}", "--strategies", "gather"]
    argv += ["all_to_all,capacity=1.25,micro_batches=2"]

    def run():
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.expert_parallel", *argv],
            env=os.environ
            | {"PYTHONPATH": path, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.splitlines()

    first, rows, second = run(), results.read(times), run()
    assert {r.candidate for r in rows if r.form == "ep_forward" and r.timed} == {
        "alone",
        "gather",
        "all_to_all capacity=1.25 micro_batches=2",
    }
    assert len(first) == len(second) + 3
    assert results.read(times) == rows


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "--rounds and --tokens must be at least 1"),
        (["--strategies", "ring"], "--strategies ring: ExpertParallel: strategy is one of"),
        (["--strategies", "gather,room=2"], "--strategies gather,room=2: .*unexpected keyword"),
        (["--strategies", "gather,capacity"], "--strategies gather,capacity: not enough values"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit):
        expert_parallel.main(argv)
    assert re.search(message, capsys.readouterr().err)
