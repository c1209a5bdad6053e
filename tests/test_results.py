"""The file of results, and what is made of it: lines, tables, pictures and the README's section."""

import importlib
import math
import re
import sys
from pathlib import Path

import benchmarks_by_path  # noqa: F401
import pytest

from benchmarks import forms, peers, report, results

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data/times.csv"


def row(candidate="pearl", layout="gnk", us=100.0, **changes):
    values = {
        "date": "2026-11-30T12:00:00+00:00",
        "device": "NVIDIA H200",
        "driver": "580.1",
        "jax": "0.11.2",
        "version": "1.0",
        "dtype": "bfloat16",
        "form": "fwd",
        "case": "GLM-5.3 gate_up",
        "ep": 8,
        "g": 32,
        "k": 6144,
        "n": 4096,
        "rows": 16,
        "grouping": "uniform",
        "floor_us": 80.0,
        "bound": "bytes",
        "min_us": us - 1,
        "max_us": us + 1,
    }
    known = values | {"candidate": candidate, "layout": layout, "us": us}
    return results.Row(**known | changes)


def absent(candidate, note, layout="gnk", **changes):
    return row(candidate, layout, math.nan, min_us=math.nan, max_us=math.nan, note=note, **changes)


# pearl, and peers in two layouts, one of which is slower and one faster.
CELL = [row(), row(layout="gkn", us=110.0), row("torch", us=150.0), row("lax", "gkn", us=99.0)]


def test_a_file_gives_back_what_was_added(tmp_path):
    path = tmp_path / "times.csv"
    first = [row(host_bound=True, gib=1.5), absent("lax", 'says "no", twice')]
    results.append(path, first)
    results.append(path, CELL)
    assert results.read(path) == first + CELL
    assert path.read_text().splitlines()[0].split(",") == list(results.COLUMNS)
    assert results.so_far(path) == first + CELL
    assert results.so_far(tmp_path / "none.csv") == results.so_far(None) == []


def test_a_file_with_other_columns_is_left_as_it_is(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("date,us\n2026-11-30,1\n")
    with pytest.raises(ValueError, match=r"the columns are \['date', 'us'\], not \['date', 'dev"):
        results.append(path, CELL)
    assert path.read_text() == "date,us\n2026-11-30,1\n"


def test_every_column_is_documented():
    for name in results.COLUMNS:
        assert re.search(rf"\b{name}\b", results.Row.__doc__), name


def test_a_line_says_what_it_was_measured_with():
    start = results.start(
        dtype="float32", form="fwd", case="x", ep=1, g=1, k=2, n=3, rows=4, candidate="lax"
    )
    assert start.jax == results.version("jax") != ""
    assert results.version("no-such-package") == ""
    assert start.device.startswith("CPU, ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", start.date)
    assert not start.timed


def test_a_cell_is_there_with_all_peers_or_with_a_reason_for_all():
    assert results.holds(CELL, CELL[0], ["torch", "lax"])
    assert not results.holds(CELL, CELL[0], ["torch", "bmm"])
    assert results.holds([*CELL, absent("bmm", "no torch")], CELL[0], ["torch", "bmm"])
    assert results.holds([*CELL, row("quack 64x64")], CELL[0], ["quack"])
    for name, value in (("rows", 64), ("ep", 1), ("form", "wgrad"), ("device", "cpu"), ("n", 1)):
        assert not results.holds(CELL, row(**{name: value}), ["torch"])
    assert results.holds([absent("pearl", "needs 90 GiB")], CELL[0], ["torch"])


def test_peers_are_compared_in_the_same_layout_and_at_the_same_time():
    (cell,) = report.cells(CELL)
    assert {name: ratio for name, (_, ratio) in cell.peers.items()} == {"torch": 1.5, "lax": 0.9}
    # Of variants the fastest; of layouts the one in which the peer compares best.
    (cell,) = report.cells([*CELL, row("torch fast", us=120.0), row("torch", "gkn", us=121.0)])
    assert cell.peers["torch"][0].us == 121.0
    assert cell.peers["torch"][1] == pytest.approx(1.1)
    # pearl_jax twice as slow and another peer, later; torch keeps its comparison of before.
    later = {"date": "2026-12-01T12:00:00+00:00"}
    (cell,) = report.cells([*CELL, row(us=200.0, **later), row("bmm", us=300.0, **later)])
    assert cell.pearl["gnk"].us == 200
    assert {name: ratio for name, (_, ratio) in cell.peers.items()} == {
        "torch": 1.5,
        "lax": 0.9,
        "bmm": 1.5,
    }
    (cell,) = report.cells([*CELL, row(us=200.0, **later), row("torch", us=100.0, **later)])
    assert cell.peers["torch"][1] == 0.5


def test_lines_have_the_columns_of_the_header():
    names = ["lax", "torch", "deep_gemm"]
    header = report.header(["gnk", "gkn"], names)
    marked = [r._replace(host_bound=r.us > 105) for r in CELL]
    line = report.line(report.Cell(marked), names)
    columns = "GLM-5.3 gate_up 8 16 uniform 80.0 bytes 100.0 1.250 110.0* 1.375 0.90 1.50* -"
    assert " ".join(line.split()) == columns
    # Numbers end where their titles end; a mark may follow.
    for title, value in (("floor us", "80.0"), ("rows", "16"), ("torch x", "1.50")):
        assert abs(header.index(title) + len(title) - line.index(value) - len(value)) <= 1


def test_each_column_is_held_against_its_own_floor():
    wgrad = {"form": "wgrad"}
    rows = [row(layout="same", **wgrad), row(layout="f32", us=200.0, floor_us=160.0, **wgrad)]
    line = report.line(report.Cell(rows), ["torch"])
    columns = "GLM-5.3 gate_up 8 16 uniform 80.0 bytes 100.0 1.250 200.0 1.250 -"
    assert " ".join(line.split()) == columns
    assert "pearl f32 over its floor: worst 1.250" in report.summary(report.cells(rows), [])


def test_summary_names_the_worst_point():
    slow = [row(us=160.0, rows=64), row("torch", us=150.0, rows=64)]
    found = report.cells([*CELL, *slow, row(rows=256)])
    assert report.summary(found, ["torch", "quack"]).splitlines() == [
        "torch over pearl: worst 0.938 (GLM-5.3 gate_up, 64 rows, uniform), median 1.219 of 2",
        "quack: -",
        "pearl gnk over its floor: worst 2.000 (GLM-5.3 gate_up, 64 rows, uniform), "
        "median 1.250 of 3",
        "pearl gkn over its floor: worst 1.375 (GLM-5.3 gate_up, 16 rows, uniform), "
        "median 1.375 of 1",
    ]


def test_curves_are_uniform_points_by_rows():
    found = report.cells(
        [row(rows=64), row("torch", us=150.0, rows=64), *CELL, row(grouping="zipf")]
    )
    assert report.curves(found, "time") == {
        "floor": [(16, 80.0), (64, 80.0)],
        "pearl gnk": [(16, 100.0), (64, 100.0)],
        "pearl gkn": [(16, 110.0)],
        "lax": [(16, 99.0)],
        "torch": [(16, 150.0), (64, 150.0)],
    }
    assert report.curves(found, "speedup") == {"lax": [(16, 0.9)], "torch": [(16, 1.5), (64, 1.5)]}
    assert report.curves(found, "roofline")["pearl gnk"] == [(16, 0.8), (64, 0.8)]


def lines_with(text, *cells):
    return [
        x for x in text.splitlines() if x.startswith("|") and all(f"| {c} " in x for c in cells)
    ]


def test_the_section_has_times_and_says_where_peers_are_faster():
    more = {"case": "GLM-5.3 down", "rows": 64}
    rows = [
        *CELL,
        absent("bmm", "torch cannot be imported"),
        *(row(us=us, ep=1, **more) for us in (50.0,)),
        row("torch", us=40.0, ep=1, **more),
        row(form="forward", case="GLM-5.3", rows=512, grouping="routed", gib=2.26),
        row(
            "lax", form="forward", case="GLM-5.3", rows=512, grouping="routed", us=1430.0, gib=3.83
        ),
    ]
    text = report.section(rows, "pictures")
    assert (
        "**NVIDIA H200**, bfloat16, 2026-11-30; jax 0.11.2, lax 1.0, torch 1.0, driver 580.1."
        in text
    )
    assert "GLM-5.3 gate_up over 8 devices: g=32, k=6144, n=4096." in text
    assert lines_with(text, "16", "uniform") == [
        "| 16 | uniform | 80 | 100 | 110 | 0.90x | 1.50x |"
    ]
    assert lines_with(text, "GLM-5.3", "0.94 (1.25)") == [
        "| GLM-5.3 | 2 | 0.94 (1.25) | 1.38 (1.38) | 0.90 (0.90) | 1.15 (0.80) |"
    ]
    assert lines_with(text, "fwd", "torch") == [
        "| fwd | torch | 2 | 1 | 25.0 % | GLM-5.3 down, 64 rows, uniform, ep 1 |"
    ]
    assert lines_with(text, "fwd", "lax") == [
        "| fwd | lax | 1 | 1 | 11.1 % | GLM-5.3 gate_up, 16 rows, uniform, ep 8 |"
    ]
    assert lines_with(text, "512") == ["| GLM-5.3 | 512 | forward | 100 | 2.26 | 14.30x, 3.83 |"]
    assert lines_with(text, "forward", "lax") == ["| forward | lax | 1 | 0 |  |  |"]
    assert "Not timed: bmm (torch cannot be imported), in fwd." in text
    assert "![microseconds](pictures/nvidia-h200-fwd-time.png)" in text
    assert report.section([], "pictures") == ""


def test_the_section_of_experts_over_devices():
    """Each strategy beside one device and the dense exchanges of its own time."""
    base = {"case": "GLM-5.3", "ep": 2, "g": 128, "grouping": "routed", "layout": "gkn"}

    def rows_at(date, one, dense, *more):
        own = base | {"date": date, "rows": 64, "gib": 1.5}
        rows = [row("alone", us=one, form="ep_forward", **own)]
        rows += [row("dense", us=dense, form="ep_exchanges", **own)]
        return rows + [
            row(name, us=us, form=f"ep_{x}", **own | dict(y)) for name, x, us, *y in more
        ]

    first = rows_at(
        "2026-11-30T12:00:00+00:00",
        100.0,
        20.0,
        ("gather", "forward", 300.0),
        ("all_to_all", "forward", 150.0),
        ("all_to_all", "step", 400.0),
        ("all_to_all", "exchanges", 30.0),
    )
    later = rows_at(
        "2026-11-30T13:00:00+00:00",
        200.0,
        40.0,
        ("gather", "forward", 100.0),
        ("all_to_all capacity=1.0", "forward", 140.0, ("note", "3 of 64 choices left out")),
    )
    more = absent("ragged", "not supported", form="ep_forward", **base | {"rows": 64})
    text = report.section([*first, *later, more], "pictures")
    assert "the experts of GLM-5.3 over 2 devices." in text
    assert [line for line in text.splitlines() if line.startswith("| 64")] == [
        "| 64 | alone | 200 | 1.50 | 1.00x |  |  |  |  |",
        "| 64 | gather | 100 | 1.50 | 0.50x |  |  |  |  |",
        "| 64 | all_to_all | 150 | 1.50 | 1.50x | 400 | 1.50 | 30 | 1.50x |",
        "| 64 | all_to_all capacity=1.0 | 140 | 1.50 | 0.70x |  |  |  |  |",
    ]
    assert "all_to_all capacity=1.0, 64 tokens: 3 of 64 choices left out." in text
    assert "gather 1.0" not in text  # no packages
    assert "Expert parallelism" not in report.section(CELL, "pictures")


def test_the_section_of_a_run_on_a_cpu():
    rows = results.read(DATA)
    text = report.section(rows, "pictures")
    for form, title in report.KERNELS.items():
        assert f"{title} (`--form {form}`), headline over 1 device: g=32, k=1024, n=1024." in text
        own = [r for r in rows if r.form == form and r.case == "headline"]
        times = {(r.rows, r.grouping, r.candidate, r.layout): r.us for r in own if r.timed}
        part = text.split(f"`--form {form}`")[1].split("`--form")[0]
        (shown,) = lines_with(part, "16", "zipf")
        _, _, _, _, us, *_, lax, _ = (x.strip() for x in shown.split("|"))
        first, column = ("same", "same") if form == "wgrad" else ("gnk", "gkn")
        pearl = times[16, "zipf", "pearl", column]
        assert us == f"{times[16, 'zipf', 'pearl', first]:.0f}"
        assert lax == f"{times[16, 'zipf', 'lax', column] / pearl:.2f}x"
    assert lines_with(text, "Qwen3-30B-A3B", "16", "step")


def test_the_readme_says_what_the_committed_files_say():
    """After a run: python -m benchmarks.report benchmarks/results/*.csv --readme README.md"""
    content = (ROOT / "README.md").read_text()
    written = content.split(report.BEGIN)[1].split(report.END)[0]
    rows = report.read(ROOT.glob("benchmarks/results/*.csv"))
    assert written == report.section(rows, "benchmarks/results")
    for picture in re.findall(r"\]\((benchmarks/results/[^)]*)\)", written):
        assert (ROOT / picture).exists(), picture


def test_the_readme_is_written_between_its_marks(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.BEGIN}old\n{report.END}after\n")
    report.write_readme(path, "new\n")
    assert path.read_text() == f"before\n{report.BEGIN}new\n{report.END}after\n"
    path.write_text("no marks")
    with pytest.raises(ValueError, match="must hold one line <!-- begin: python -m benchmarks"):
        report.write_readme(path, "new\n")


def test_pictures_of_every_form(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    copy = tmp_path / "times.csv"
    copy.write_text(DATA.read_text())
    report.main([str(copy)])
    out = capsys.readouterr().out
    assert out.startswith(report.section(results.read(copy), tmp_path.as_posix()))
    linked = set(re.findall(r"\]\(([^)]*)\)", out))
    assert linked == {str(x) for x in tmp_path.glob("*.png")}
    assert len(linked) == 3 * 3


def test_pictures_without_matplotlib_say_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'pearl-jax\[bench\]'"):
        report.draw(CELL, tmp_path)


def test_forms_and_columns_of_tables_are_those_that_are_timed():
    assert list(report.KERNELS) == list(peers.FORMS)
    columns = {column for form in peers.FORMS.values() for column in form.columns}
    assert set(report.COLUMNS) == columns
    assert importlib.import_module("benchmarks.moe_layer").PASSES == report.LAYERS
    assert not {"pearl"} & {name for form in peers.FORMS.values() for name in form.peers}
    assert forms.ASSUMED.bandwidth > 0
