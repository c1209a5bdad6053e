"""The benchmarks' own arithmetic, tables and handling of peers; no GPU is needed."""

import dataclasses
import functools
import importlib
import json
import math
import re
import sys
import time
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import pearl_jax
from pearl_jax import library, tiling

# By its path: with the root on sys.path, the source folder would hide the installed pearl_jax.
package = types.ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).parents[1] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)
blackwell, cpu, gpu, grouped_matmul, peers, protocol, report, scaling, shapes, tune = (
    importlib.import_module(f"benchmarks.{name}")
    for name in (
        "blackwell",
        "cpu",
        "gpu",
        "grouped_matmul",
        "peers",
        "protocol",
        "report",
        "scaling",
        "shapes",
        "tune",
    )
)


def record(rows=16, grouping="uniform", gnk=100.0, gkn=110.0, **changes):
    values = {
        "case": "GLM-5.3 gate_up",
        "g": 2,
        "k": 8,
        "n": 8,
        "rows": rows,
        "grouping": grouping,
        "group_sizes": [rows, rows],
        "floor_us": {"gnk": 80.0, "gkn": 80.0},
        "bound": "bytes",
        "pearl_us": {"gnk": gnk, "gkn": gkn},
        "peer_us": {"torch": 150.0},
        "ratios": {"torch": 150.0 / gnk},
        "host_bound": [],
        "samples": {"torch": [150.0]},
    }
    return report.Record(**{**values, **changes})


def test_slope_leaves_out_the_fixed_cost():
    fixed, call = 1e-3, 2e-5
    bursts = [fixed + count * 5 * call for count in (7, 21)]
    assert protocol.slope(*bursts, count=7, calls=5) == pytest.approx(call)


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

        return protocol.Burst(begin, wait, calls)


def test_bursts_are_timed_in_turn_and_their_fixed_cost_taken_out(monkeypatch):
    fake = FakeGpu(monkeypatch, fixed=5e-4)
    bursts = {"a": fake.burst("a", 1e-4, 4), "b": fake.burst("b", 3e-3, 2)}
    found = protocol.measure_bursts(bursts, rounds=3)
    assert found["a"].seconds == pytest.approx(1e-4)
    assert found["b"].samples == pytest.approx([3e-3] * 3)
    assert not found["a"].host_bound
    a, b = round(0.004 / 9e-4), 1
    one_round = [("a", a), ("a", 3 * a), ("b", b), ("b", 3 * b)]
    assert fake.order[-12:] == one_round + one_round[2:] + one_round[:2] + one_round


def test_a_burst_that_the_host_holds_up_is_marked(monkeypatch):
    fake = FakeGpu(monkeypatch, fixed=0)
    bursts = {"slow": fake.burst("slow", 1e-5, 1, start=2e-5), "fast": fake.burst("fast", 1e-4, 1)}
    found = protocol.measure_bursts(bursts, rounds=1)
    assert found["slow"].host_bound
    assert not found["fast"].host_bound


def test_floor_counts_groups_with_rows_only():
    peaks = protocol.Peaks(bandwidth=1e12, flops=1e15)
    floor = protocol.grouped_matmul_floor(64, 32, np.array([3, 0, 5]), 2, peaks)
    assert floor.num_bytes == 2 * (8 * (64 + 32) + 2 * 64 * 32)
    assert floor.flops == 2 * 8 * 64 * 32
    assert (floor.seconds, floor.bound) == (floor.num_bytes / 1e12, "bytes")


def test_floor_of_an_outer_product_writes_empty_groups_too():
    peaks, sizes = protocol.Peaks(bandwidth=1e12, flops=1e15), np.array([3, 0, 5])
    shape, wgrad = shapes.Shape(g=3, k=64, n=32), peers.FORMS["wgrad"]
    found = {column: wgrad.floor(shape, sizes, column, peaks) for column in wgrad.columns}
    for column, out_itemsize in (("bf16", 2), ("f32", 4)):
        assert found[column].num_bytes == 2 * 8 * (64 + 32) + out_itemsize * 3 * 64 * 32
        assert found[column].flops == 2 * 8 * 64 * 32
        assert found[column].seconds == found[column].num_bytes / 1e12
    slow = protocol.Peaks(bandwidth=1e12, flops=1e12)
    busy = protocol.grouped_outer_floor(64, 32, np.array([10**4]), 2, slow)
    assert (busy.seconds, busy.bound) == (2 * 10**4 * 64 * 32 / 1e12, "flops")


def test_floor_of_an_h200():
    peaks, shape = protocol.GPU_PEAKS["NVIDIA H200"], shapes.MODELS["GLM-5.3"].gate_up
    found = [
        protocol.grouped_matmul_floor(shape.k, shape.n, np.full(shape.g, rows), 2, peaks)
        for rows in (1, 1024)
    ]
    assert [round(1e6 * f.seconds) for f in found] == [366, 2088]
    assert [f.bound for f in found] == ["bytes", "flops"]


def test_shapes_are_those_of_one_device():
    assert {name: (s.g, s.k, s.n) for name, s in shapes.cases(shapes.MODELS).items()} == {
        "GLM-5.3 gate_up": (32, 6144, 4096),
        "GLM-5.3 down": (32, 2048, 6144),
        "DeepSeek-V4-Pro gate_up": (48, 7168, 6144),
        "DeepSeek-V4-Pro down": (48, 3072, 7168),
        "Kimi-K3 gate_up": (112, 3584, 6144),
        "Kimi-K3 down": (112, 3072, 3584),
        "Qwen3-235B gate_up": (16, 4096, 3072),
        "Qwen3-235B down": (16, 1536, 4096),
        "Mixtral-8x7B gate_up": (8, 4096, 28672),
        "Mixtral-8x7B down": (8, 14336, 4096),
        "gpt-oss-120b gate_up": (16, 2880, 5760),
        "gpt-oss-120b down": (16, 2880, 2880),
    }


@pytest.mark.parametrize("sizes", [[3, 0, 5], [8, 0, 0], [1, 3, 4]])
def test_error_on_the_device_is_the_one_on_the_host(rng, sizes):
    want = rng.standard_normal((8, 6)).astype(np.float32)
    got = want + 0.1 * rng.standard_normal((8, 6)).astype(np.float32)
    on_device = protocol.worst_group_error_on_device(got, want, jnp.array(sizes))
    assert float(on_device) == pytest.approx(protocol.worst_group_error(got, want, sizes), 1e-5)
    got[0, 0] = np.nan
    assert math.isnan(protocol.worst_group_error_on_device(got, want, jnp.array(sizes)))
    # Without sizes, groups are the entries of the first axis.
    got[0, 0] = 2 * want[0, 0]
    entries = got.reshape(4, 2, 6), want.reshape(4, 2, 6)
    on_device = protocol.worst_group_error_on_device(*entries)
    assert float(on_device) == pytest.approx(protocol.worst_group_error(*entries), 1e-5)
    zero = np.zeros_like(want)
    assert float(protocol.worst_group_error_on_device(zero, zero, jnp.array(sizes))) == 0
    assert protocol.worst_group_error_on_device(want, zero, jnp.array(sizes)) == math.inf


def test_lines_have_the_columns_of_the_header():
    names = ["lax", "torch"]
    header = report.header(["gnk", "gkn"], names)
    line = report.line(record(host_bound=["torch", "pearl gkn"]), names)
    columns = "GLM-5.3 gate_up 16 uniform 80.0 bytes 100.0 1.250 110.0* 1.375 - 1.50*"
    assert " ".join(line.split()) == columns
    # Numbers end where their titles end; a mark may follow.
    for title, value in (("floor us", "80.0"), ("rows", "16"), ("torch x", "1.50")):
        assert abs(header.index(title) + len(title) - line.index(value) - len(value)) <= 1


def test_each_column_is_held_against_its_own_floor():
    found = record(
        floor_us={"bf16": 80.0, "f32": 160.0}, pearl_us={"bf16": 100.0, "f32": 200.0}, ratios={}
    )
    columns = "GLM-5.3 gate_up 16 uniform 80.0 bytes 100.0 1.250 200.0 1.250 -"
    assert " ".join(report.line(found, ["torch"]).split()) == columns
    assert "f32 us floor x" in " ".join(report.header(["bf16", "f32"], []).split())
    assert "pearl f32 over its floor: worst 1.250" in report.summary([found], [])
    curves = report.curves([found], ["torch"], "GLM-5.3 gate_up")
    assert curves == {"pearl bf16": [(16, 1.25)], "pearl f32": [(16, 1.25)], "torch": [(16, 1.875)]}


def test_summary_names_the_worst_point():
    records = [record(), record(rows=64, gnk=160.0), record(rows=256, ratios={})]
    assert report.summary(records, ["torch", "quack"]).splitlines() == [
        "torch over pearl: worst 0.938 (GLM-5.3 gate_up, 64 rows, uniform), median 1.219 of 2",
        "quack: -",
        "pearl gnk over its floor: worst 2.000 (GLM-5.3 gate_up, 64 rows, uniform), "
        "median 1.250 of 3",
        "pearl gkn over its floor: worst 1.375 (GLM-5.3 gate_up, 16 rows, uniform), "
        "median 1.375 of 3",
    ]


def test_curves_are_uniform_points_by_rows():
    records = [record(rows=64), record(rows=16), record(grouping="zipf")]
    assert report.curves(records, ["lax", "torch"], "GLM-5.3 gate_up") == {
        "pearl gnk": [(16, 1.25), (64, 1.25)],
        "pearl gkn": [(16, 1.375), (64, 1.375)],
        "torch": [(16, 1.875), (64, 1.875)],
    }


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'pearl-jax\[bench\]'"):
        report.plotting()


def test_uneven_groupings_are_for_some_rows_only_unless_asked_for():
    fwd = peers.FORMS["fwd"]
    assert fwd.groupings(4) == ("uniform",)
    assert fwd.groupings(16) == tuple(shapes.GROUPINGS)


TINY = shapes.Shape(g=3, k=16, n=8)


def problem(rows, form="fwd"):
    return peers.FORMS[form].problem(TINY, TINY.g * rows)


def test_both_layouts_hold_the_same_weights():
    operands = problem(2).operands
    (lhs, gnk), (same, gkn) = operands["gnk"], operands["gkn"]
    assert lhs is same
    np.testing.assert_array_equal(gnk, jnp.swapaxes(gkn, 1, 2))
    assert gnk.shape == (3, 8, 16)


def test_a_program_has_few_calls_where_one_takes_long_or_writes_much(monkeypatch):
    p, outer = problem(2), problem(2, "wgrad")
    assert p.calls("gnk") == outer.calls("f32") == peers.MAX_CALLS
    with monkeypatch.context() as patch:
        patch.setattr(peers, "MAX_OUTPUT_BYTES", 2 * (2 * p.m * p.shape.n))
        assert p.calls("gnk") == 2
        patch.setattr(peers, "MAX_OUTPUT_BYTES", 2 * (2 * 3 * 16 * 8))
        assert (outer.calls("bf16"), outer.calls("f32")) == (2, 1)
    monkeypatch.setattr(peers, "ASSUMED", protocol.Peaks(bandwidth=1.0, flops=1.0))
    assert p.calls("gnk") == 1


@pytest.mark.parametrize(("form", "masked"), [("fwd", 16), ("wgrad", 16 + 8)])
def test_lax_is_left_out_where_it_would_take_too_long(monkeypatch, form, masked):
    lax, p = peers.FORMS[form].peers["lax"], problem(2, form)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "LAX_MAX_SECONDS", 1e-12)
        with pytest.raises(peers.Absent, match="skipped, 3 times the arithmetic would take"):
            lax.make(p)
    monkeypatch.setattr(peers, "LAX_MAX_BYTES", 2 * 3 * 6 * masked)
    lax.make(p)
    monkeypatch.setattr(peers, "LAX_MAX_BYTES", 2 * 3 * 6 * masked - 1)
    with pytest.raises(peers.Absent, match="skipped, would need"):
        lax.make(p)


def test_peers_of_an_outer_product_on_torch():
    """What is asked of torch, by an interpreter of it in NumPy."""
    torch = types.SimpleNamespace(
        int32=np.int32,
        tensor=lambda values, dtype, device: np.array(values, dtype),
        bmm=np.matmul,
        _grouped_mm=lambda a, b, offs: np.stack(
            [x @ y for x, y in zip(np.split(a, offs[:-1], 1), np.split(b, offs[:-1]))]
        ),
    )

    class Tensor(np.ndarray):  # as torch's: transpose swaps two axes
        def t(self):
            return self.T

        def transpose(self, *axes):
            return self.swapaxes(*axes)

    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal((6, n)).view(Tensor) for n in (4, 5))
    for make_call, sizes in (
        (peers._torch_grouped_outer, [1, 0, 5]),
        (peers._torch_bmm_outer, [2, 2, 2]),
    ):
        got = make_call(torch, lhs, rhs, np.array(sizes))()
        ends = np.cumsum(sizes)
        want = [np.einsum("mk,mn->kn", lhs[e - s : e], rhs[e - s : e]) for s, e in zip(sizes, ends)]
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.fixture
def without_kernels(monkeypatch):
    """pearl_jax in plain XLA, short bursts, and peaks for this machine."""
    for name, form in peers.FORMS.items():
        pearl = functools.partial(form.pearl, implementation="xla")
        changed = dataclasses.replace(form, pearl=pearl, peers=dict(form.peers))
        monkeypatch.setitem(peers.FORMS, name, changed)
    monkeypatch.setattr(peers, "MAX_CALLS", 2)
    monkeypatch.setattr(protocol, "BURST_SECONDS", 1e-4)
    monkeypatch.setattr(protocol, "PAUSE_SECONDS", 0)
    monkeypatch.setitem(protocol.GPU_PEAKS, "cpu", protocol.Peaks(1e10, 1e11))


def run(names, path=None, rows=(2,), form="fwd"):
    gpu.run(
        {"tiny": TINY},
        form,
        rows=rows,
        groupings=["uniform", "one_hot"],
        names=names,
        rounds=1,
        measure_peaks=False,
        json_path=path,
        plot_path=None,
    )


def test_a_run_has_a_line_for_each_point_and_writes_them(without_kernels, capsys, tmp_path):
    run(["lax"], tmp_path / "found.json", rows=(2, 4))
    out = capsys.readouterr().out
    assert [line.split()[1:3] for line in out.splitlines() if line.startswith("tiny")] == [
        [rows, grouping] for rows in ("2", "4") for grouping in ("uniform", "one_hot")
    ]
    assert "lax over pearl: worst" in out
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rounds"] == 1
    assert written["records"][0]["group_sizes"] == [2, 2, 2]
    assert set(written["records"][0]["samples"]) == {"pearl gnk", "pearl gkn", "lax"}


def test_a_run_of_the_weight_gradient(without_kernels, capsys, tmp_path):
    run(None, tmp_path / "found.json", form="wgrad")
    out = capsys.readouterr().out
    header, *lines = [s for s in out.splitlines() if s.startswith(("case", "tiny"))]
    columns = "bound bf16 us floor x f32 us floor x lax x mosaic x torch x bmm x tokamax x"
    assert " ".join(header.split()).endswith(columns)
    assert [line.split()[1:3] for line in lines] == [["2", "uniform"], ["2", "one_hot"]]
    assert "pearl f32 over its floor: worst" in out
    assert "differs" not in out
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["form"] == "wgrad"
    uniform, one_hot = written["records"]
    assert {"pearl bf16", "pearl f32", "lax"} <= set(uniform["samples"])
    assert set(uniform["floor_us"]) == {"bf16", "f32"}
    # All groups are written, with rows or without.
    assert uniform["floor_us"] == one_hot["floor_us"]


def test_a_wrong_weight_gradient_is_found_in_its_group(without_kernels, monkeypatch, capsys):
    def wrong(lhs, rhs, group_sizes):
        return pearl_jax.grouped_outer(lhs, rhs, group_sizes).at[1].mul(1.1)

    monkeypatch.setitem(peers.FORMS["wgrad"].peers, "wrong", jax_peer(wrong, "bf16"))
    run(["wrong", "lax"], form="wgrad")
    out = capsys.readouterr().out
    assert re.search(r"# wrong: differs from pearl_jax by (9\.\de-02|1\.0e-01) in a group", out)
    assert "lax over pearl: worst" in out


def test_kernels_of_other_projects_get_the_operands_of_an_outer_product(
    without_kernels, monkeypatch, capsys
):
    def mosaic(lhs, rhs, *, group_sizes, block_m, block_n, **options):
        assert options == {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
        return pearl_jax.grouped_outer(lhs, rhs, group_sizes)

    def tokamax(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, *, implementation):
        assert implementation == "mosaic"
        return pearl_jax.ragged_dot_general(lhs, rhs, group_sizes, ragged_dot_dimension_numbers)

    modules = {
        "jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu": types.SimpleNamespace(
            transposed_ragged_dot=mosaic
        ),
        "tokamax": types.SimpleNamespace(ragged_dot_general=tokamax),
    }
    monkeypatch.setattr(peers, "import_peer", modules.__getitem__)
    run(["mosaic", "tokamax"], form="wgrad")
    out = capsys.readouterr().out
    assert "#" not in out
    for name in "mosaic", "tokamax":
        assert f"{name} over pearl: worst" in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--form", "wgrad", "--peers", "quack"], "wgrad has no peer quack"),
        (["--form", "dgrad"], "invalid choice: 'dgrad'"),
    ],
)
def test_forms_and_peers_that_there_are_not(monkeypatch, capsys, given, message):
    monkeypatch.setattr(sys, "argv", ["grouped_matmul", *given])
    with pytest.raises(SystemExit):
        grouped_matmul.main()
    assert message in capsys.readouterr().err


def test_absent_and_failing_peers_are_said_once(without_kernels, monkeypatch, capsys):
    def fails(lhs, rhs, group_sizes):
        raise ValueError("no\nsuch   tile")

    monkeypatch.setitem(peers.FORMS["fwd"].peers, "failing", jax_peer(fails))
    monkeypatch.setitem(sys.modules, "tokamax", None)
    run(["tokamax", "failing"], rows=(2, 4))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert len(notes) == 2
    assert notes[0].startswith("# tokamax: tokamax cannot be imported: ModuleNotFoundError")
    assert notes[1] == "# failing: ValueError: no such tile (from tiny with 2 rows on)"


def test_a_peer_that_is_wrong_is_not_timed(without_kernels, monkeypatch, capsys):
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


def jax_peer(function, column="gkn"):
    return peers.Peer(column, lambda p, column: {"": peers.jax_candidate(function, p, column)})


def test_the_fastest_variant_counts():
    timings = {
        name: protocol.BurstTiming(seconds, [seconds], False)
        for name, seconds in {
            "pearl gnk": 1e-4,
            "pearl gkn": 2e-4,
            "mosaic 64x256": 3e-4,
            "mosaic 128x128": 4e-4,
        }.items()
    }
    sizes = np.array([2, 2, 2])
    peaks = protocol.Peaks(1e12, 1e15)
    found = gpu.make_record("x", problem(2), "uniform", sizes, timings, peaks)
    assert found.rows == 2
    assert found.peer_us == {"mosaic": pytest.approx(300)}
    assert found.ratios == {"mosaic": pytest.approx(1.5)}
    assert set(found.samples) == set(timings)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_every_tile_is_tuned(without_kernels, capsys, arch):
    shape = shapes.Shape(g=2, k=64, n=64)
    losses = tune.run_case(arch, "tiny", shape, "gnk", rows=[2], groupings=["uniform"], rounds=1)
    header, line = capsys.readouterr().out.splitlines()
    assert len(losses) == 1
    for tile in tiling.tiles(arch, "dgrad"):
        assert str(tile) in header
    assert line.split()[:2] == ["2", "uniform"]


def test_on_a_cpu_all_but_the_headline_are_scaled_down(monkeypatch, capsys):
    monkeypatch.setattr(protocol, "measure_peaks", lambda dtype: protocol.Peaks(1e10, 1e11))
    seen = []
    monkeypatch.setattr(cpu, "run_shape", lambda *args: seen.append(args[:4]))
    monkeypatch.setattr(cpu.jax.config, "update", lambda *args: None)
    cases = {cpu.HEADLINE: cpu.HEADLINE_SHAPE} | shapes.cases(["Qwen3-235B"], ["down"])
    cpu.run(cases, "float32", 1)
    assert seen == [
        ("headline", shapes.Shape(32, 1024, 1024), 512, ("uniform",)),
        ("Qwen3-235B down", shapes.Shape(16, 192, 512), 512, ("uniform", "zipf")),
    ]


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
    for tokens, want in ((1000, 2 * 4000 * weights / 1e6), (1, 2 * weights * 2 / 1e4)):
        peaks = protocol.Peaks(bandwidth=1e4, flops=1e6)
        assert scaling.compute_seconds(model, tokens, 16, peaks) == pytest.approx(want)
    e = scaling.estimate(model, 32, 16, 1000, 2, peaks, links)
    assert e.alone == pytest.approx(32000 / (e.compute_seconds + e.exchange_seconds))
    assert e.overlapped == pytest.approx(32000 / max(e.compute_seconds, e.exchange_seconds))
