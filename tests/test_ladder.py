"""The guard against slower kernels and the ladder of techniques: their logic; no GPU is needed."""

import subprocess
import sys
from pathlib import Path

import benchmarks_by_path  # noqa: F401
import gpu.test_speed as speed
import pytest

from benchmarks import forms, ladder, protocol, shapes
from pearl_jax import library, tiling, timing

ROOT = Path(__file__).parents[1]
TINY = shapes.Shape(g=3, k=16, n=8)


@pytest.fixture(autouse=True)
def one_copy(monkeypatch):
    monkeypatch.setattr(protocol, "COLD_BYTES", 1)


def test_the_guard_finds_what_is_slower(monkeypatch):
    """Its arithmetic, with a stand-in that takes twice as long as pearl_jax by its clock."""

    def measure(bursts, rounds):
        seconds = {"pearl": 1e-4, "dense": 2e-4}
        return {key: timing.Timing([seconds[key[0]]] * rounds) for key in bursts}

    monkeypatch.setattr(timing, "measure", measure)
    assert speed.ratio("fwd", 2, "gnk", TINY, "dense") == pytest.approx(2)
    assert speed.ratio("wgrad", 2, "same", TINY, "dense") == pytest.approx(2)
    with pytest.raises(pytest.skip.Exception, match="bmm does not run"):
        speed.ratio("fwd", 2, "gnk", TINY, "bmm")
    with pytest.raises(pytest.skip.Exception, match="no ratios are known for cpu"):
        speed.test_no_slower_than_when_it_was_measured("fwd", 16, "gnk")
    monkeypatch.setitem(protocol.GPU_PEAKS, "cpu", protocol.Peaks(1, 1))
    monkeypatch.setattr(forms, "import_peer", lambda name: None)
    ratios = iter([1.0, 1.02, 1.0, 1.0])
    monkeypatch.setattr(speed, "ratio", lambda *args: next(ratios))
    speed.test_no_slower_than_when_it_was_measured("fwd", 16, "gnk")
    with pytest.raises(AssertionError, match=r"\[1\.0, 1\.0\]"):
        speed.test_no_slower_than_when_it_was_measured("fwd", 16, "gnk")


def test_steps_of_the_ladder_differ_in_what_they_say():
    for step in ladder.STEPS:
        for tile in (step.tile, step.without):
            assert tiling.is_valid(ladder.ARCH, tile) == (True, ""), step
        assert step.grouping in shapes.GROUPINGS
        k, n = ladder.SHAPE.k, ladder.SHAPE.n
        name = tiling.kernel(ladder.ARCH, step.form, "bfloat16", "bfloat16", k, n, step.tile).name
        assert f"_{step.layout}_{ladder.ARCH}_" in name
        assert "_wide_" in name  # as extra tiles are
    by_technique = {step.technique: (step.tile, step.without) for step in ladder.STEPS}
    fields = {
        "two K tiles in a stage": {"k"},
        "64 rows, not 128": {"m"},
        "128 rows, not 64": {"m"},
        "256 columns, not 128": {"n"},
        "staged results": {"staged"},
        "rows shared by two": {"cluster"},
        "small stages, and more": {"k"},
        "256 x 128, not 128 x 256": {"m", "n"},
        "evict-first weights": {"evict_first"},
        "dependent launch": {"pdl"},
        "raster along n": {"raster_along_n"},
    }
    for technique, (tile, without) in by_technique.items():
        differing = {f for f in vars(tile) if getattr(tile, f) != getattr(without, f)}
        assert differing == fields[technique]


def test_the_build_takes_the_ladders_extra_tiles(capsys):
    ladder.main(["--extra-tiles"])
    given = capsys.readouterr().out.strip()
    aot = [sys.executable, str(ROOT / "ffi/aot.py"), "--out", "x", "--list"]

    def listed(arch, extra):
        command = [*aot, "--arch", arch, f"--extra-tiles={extra}"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.split(), done.stderr

    plain, _ = listed("sm_90a", "")
    more, _ = listed("sm_90a", given)
    assert more[: len(plain)] == plain
    names = [
        tiling.KernelSpec("sm_90a", form, "bfloat16", "bfloat16", True, tile).name
        for form, tile in ladder.extra_tiles()
    ]
    assert len(names) == 11
    assert more[len(plain) :] == [f"x/{name}.o" for name in names]
    # Those of another architecture, and those that are there.
    assert listed("sm_100f", given) == listed("sm_100f", "")
    assert listed("sm_90a", "sm_90a:dgrad:64x256x128c1")[0] == plain
    assert "m must be 16, 32" in listed("sm_90a", "sm_90a:fwd:48x128x64c1")[1]
    assert "are written arch:form:tile, got '64x64'" in listed("sm_90a", "64x64")[1]


def test_a_ladder_is_timed_step_by_step(capsys, monkeypatch):
    def measure(bursts, rounds):
        return {tile: timing.Timing([us]) for tile, us in zip(bursts, (9e-4, 1e-3))}

    monkeypatch.setattr(timing, "measure", measure)
    ladder.run(ladder.STEPS[:2], shapes.Shape(g=2, k=64, n=64), rounds=1)
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(
        "| gnk | 16 | uniform | 64x256x128c1 | 64x256x64c1 | 900.0 | 1000.0 | 10.0 % |"
    )
    assert "| gnk | 64 | uniform | 128x256x128c1 | 128x256x64c1 |" in second


def test_a_ladder_leaves_out_what_the_library_lacks(monkeypatch):
    shape, step = ladder.SHAPE, ladder.STEPS[0]
    names = {
        tiling.KernelSpec("sm_90a", "dgrad", "bfloat16", "bfloat16", True, tile).name
        for tile in (step.tile, step.without)
    }
    monkeypatch.setattr(library, "kernel_names", lambda: names)
    assert [s for s in ladder.STEPS if ladder.is_compiled(s, shape)] == [step]
