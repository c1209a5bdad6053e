"""Tiles by measurement: what is measured, the table that keeps it, and who reads that."""

import concurrent.futures
import itertools
import logging
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import python

import pearl_jax
from pearl_jax import TileConfig, cost, library, shipped, tiling, timing, tuned
from pearl_jax.autotune.__main__ import main
from pearl_jax.tuned import Measured, Problem

autotune = sys.modules["pearl_jax.autotune"]
ARCH = "sm_90a"
PROBLEM = Problem("dgrad", 8, 256, 512, 32)


def measured(tile, **microseconds):
    return Measured(tile, "2026-11-30", microseconds or {str(tile): 12.5})


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As on a GPU whose table is the file returned. Later tiles of a form are faster."""
    file = tmp_path / "some folder" / "tiles.txt"
    monkeypatch.setattr(library, "present_arch", lambda: ARCH)
    monkeypatch.setattr(library, "unavailable", lambda: None)
    monkeypatch.setattr(library, "ensure_registered", lambda: None)
    monkeypatch.setattr(tuned, "path", lambda: file)
    monkeypatch.setattr(autotune, "_measure", fake_times)
    return file


def fake_times(problem, tiles, rounds):
    return {tile: 1e-5 / (1 + i) for i, tile in enumerate(tiles)}


@pytest.mark.parametrize("form", tiling.FORMS)
def test_times_of_all_spreads_count_alike(form, monkeypatch):
    """Each tile's programs run, here in plain XLA; 1, 2 and 4 us of one are 2 us."""
    monkeypatch.setattr(autotune, "_IMPLEMENTATION", "xla")
    samples = {TileConfig(8): iter((1, 2, 4)), TileConfig(16): iter((3, 9, 1))}

    def measure(bursts, rounds):
        assert rounds == 5
        for burst in bursts.values():
            assert all(np.all(np.isfinite(out)) for out in burst.start(1))
        return {tile: timing.Timing([1e-6 * next(samples[tile])]) for tile in bursts}

    monkeypatch.setattr(timing, "measure", measure)
    times = autotune._measure(Problem(form, 2, 64, 128, 8), list(samples), rounds=5)
    assert times == pytest.approx({TileConfig(8): 2e-6, TileConfig(16): 3e-6})


def layer(x, up, down, sizes):
    hidden = pearl_jax.grouped_matmul(x, up, sizes)
    return pearl_jax.grouped_matmul(hidden, down, sizes, transpose_rhs=True)


def arguments(m=64, g=4, d=16, f=24):
    x = jax.ShapeDtypeStruct((m, d), jnp.bfloat16)
    up, down = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((g, d, f), (g, d, f)))
    return x, up, down, jax.ShapeDtypeStruct((g,), jnp.int32)


def test_measures_what_a_function_calls(gpu, capsys):
    """Its matmuls, in both layouts, and with a gradient the outer products too."""
    found = pearl_jax.autotune(layer, *arguments())
    assert set(found) == {Problem("fwd", 4, 16, 24, 16), Problem("dgrad", 4, 24, 16, 16)}

    def loss(x, up, down, sizes):
        return layer(x, up, down, sizes).sum(dtype=jnp.float32)

    everything = pearl_jax.autotune(jax.jit(jax.grad(loss, (0, 1, 2))), *arguments())
    assert {p.form for p in everything} == set(tiling.FORMS)
    assert set(found) < set(everything)
    assert tuned.read(gpu) == everything
    for problem, choice in everything.items():
        times = choice.microseconds
        assert str(choice.tile) == min(times, key=times.get)
        assert {str(t) for t in tiling.tiles(ARCH, problem.form)} >= set(times)
        assert all(us > 0 for us in times.values())
    out = capsys.readouterr().out
    assert all(tuned.format_line(*line) in out for line in everything.items())


def test_rows_of_batches_and_of_groups_elsewhere(gpu):
    """A batch has as many more groups; groups that other devices hold keep their rows."""
    x, up, _, sizes = arguments()
    batched = jax.vmap(pearl_jax.grouped_matmul, (0, None, None))
    x3 = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    assert set(pearl_jax.autotune(batched, x3, up, sizes)) == {Problem("fwd", 12, 16, 24, 16)}

    def here(x, up, sizes, offset):
        return pearl_jax.grouped_matmul(x, up, sizes, group_offset=offset)

    more = jax.ShapeDtypeStruct((16,), jnp.int32)
    offset = jax.ShapeDtypeStruct((), jnp.int32)
    assert set(pearl_jax.autotune(here, x, up, more, offset)) == {Problem("fwd", 4, 16, 24, 4)}


def test_what_is_known_is_not_measured_again(gpu, monkeypatch):
    """So a broken run goes on where it was."""
    first = autotune.tune([PROBLEM])
    done = []

    def measure(problem, tiles, rounds):
        done.append(problem)
        if len(done) > 1:
            raise KeyboardInterrupt
        return dict.fromkeys(tiles, 2e-5)

    monkeypatch.setattr(autotune, "_measure", measure)
    others = [PROBLEM._replace(g=g) for g in (9, 10)]
    with pytest.raises(KeyboardInterrupt):
        autotune.tune([PROBLEM, *others])
    assert done == others
    assert set(tuned.read(gpu)) == {PROBLEM, others[0]}
    assert tuned.read(gpu)[PROBLEM] == first[PROBLEM]
    done.clear()
    autotune.tune([PROBLEM], again=True)
    assert tuned.read(gpu)[PROBLEM].microseconds != first[PROBLEM].microseconds


def test_problems_that_do_not_fit_are_passed_over(gpu, monkeypatch, capsys):
    def measure(problem, tiles, rounds):
        if problem.g > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return dict.fromkeys(tiles, 1e-5)

    monkeypatch.setattr(autotune, "_measure", measure)
    assert set(autotune.tune([PROBLEM._replace(g=9), PROBLEM])) == {PROBLEM}
    assert "RESOURCE_EXHAUSTED: out of memory\n" in capsys.readouterr().out


def test_table_goes_before_the_model(gpu):
    """The user's line, then the package's; neither without tuned_tiles, nor for other rows."""
    model = cost.choose(ARCH, "dgrad", 8 * 32, 256, 512, 8)
    others = [t for t in tiling.tiles(ARCH, "dgrad") if t != model]

    def choose(rows=32, arch=ARCH):
        return tuned.choose(arch, "dgrad", 8 * rows, 256, 512, 8)

    assert choose() == model
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shipped.TILES, ARCH, {PROBLEM: (str(others[0]), "2026-11-30")})
        assert choose() == others[0]
        tuned.add(gpu, {PROBLEM: measured(others[1])})
        assert choose() == choose(17) == others[1]
        assert choose(33) == cost.choose(ARCH, "dgrad", 8 * 33, 256, 512, 8)
        assert choose(arch="sm_100f") == cost.choose("sm_100f", "dgrad", 8 * 32, 256, 512, 8)
        with pearl_jax.tuned_tiles(False):
            assert choose() == model
        assert choose() == others[1]


def test_tiles_that_only_this_library_has(gpu, monkeypatch, caplog):
    """They are measured where they have a kernel, and chosen for dtypes that have one."""
    tile = TileConfig(64, 256, evict_first=True)
    extra = tiling.KernelSpec(ARCH, "dgrad", "bfloat16", "bfloat16", True, tile)
    names = frozenset({extra.name, *(spec.name for spec in tiling.kernels(ARCH))})
    monkeypatch.setattr(library, "kernel_names", lambda: names)
    plain = PROBLEM._replace(k=264)
    found = autotune.tune([PROBLEM, plain])
    assert found[PROBLEM].tile == tile  # the last one, and so the fastest
    assert str(tile) not in found[plain].microseconds

    def kernel(dtype):
        shapes = (256, 256), (8, 512, 256)
        args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        f = lambda *args: pearl_jax.grouped_matmul(*args, transpose_rhs=True)
        sizes = jax.ShapeDtypeStruct((8,), "int32")
        text = jax.jit(f).trace(*args, sizes).lower(lowering_platforms=("cuda",)).as_text()
        return re.search(r'sm_90 = "([^"]*)"', text)[1]

    model = cost.choose(ARCH, "dgrad", 256, 256, 512, 8)
    assert kernel("bfloat16") == extra.name
    assert kernel("float16").endswith(f"_{model}")
    # Another library, with the same table.
    monkeypatch.setattr(library, "kernel_names", frozenset)
    assert library.tiles(ARCH, "dgrad") == tiling.tiles(ARCH, "dgrad")
    tuned._read.cache_clear()
    assert tuned.choose(ARCH, "dgrad", 256, 256, 512, 8) == model
    assert f"no kernel of 'dgrad' has the tile '{tile}'" in caplog.text


@pytest.mark.parametrize("arch", shipped.TILES)
def test_shipped_tiles_are_chosen(arch):
    """Every one is compiled, and its problem and no other gets it."""
    assert len(shipped.TILES[arch]) > 100
    for problem, (name, _) in shipped.TILES[arch].items():
        form, g, k, n, rows = problem
        assert Problem.of(form, g * rows, k, n, g) == problem
        assert str(tuned.choose(arch, form, g * rows, k, n, g)) == name


def test_without_a_gpu_the_user_has_no_table(monkeypatch):
    """Compiling for another machine, say."""
    monkeypatch.setattr(library, "present_arch", lambda: None)
    monkeypatch.setattr(tuned, "read", None)
    assert tuned.choose(ARCH, "fwd", 64, 128, 128, 4) in tiling.tiles(ARCH, "fwd")


def test_choices_are_logged_once(gpu, caplog):
    caplog.set_level(logging.DEBUG, logger="pearl_jax.tuned")
    for _ in range(2):
        tuned.choose(ARCH, "dgrad", 8 * 32, 264, 512, 8)
    (record,) = caplog.records
    assert "by the cost model" in record.getMessage()
    assert str(cost.choose(ARCH, "dgrad", 8 * 32, 264, 512, 8)) in record.getMessage()


def test_damaged_lines(gpu, caplog):
    """They are named and left out; the next measurement writes a table without them."""
    tiles = tiling.tiles(ARCH, "dgrad")
    tuned.add(gpu, {PROBLEM: measured(tiles[0])})
    good = gpu.read_text()
    bad = {
        "dgrad 8 256 512": "not enough values",
        "dgrad 8 256 x 32 64x256x128c1 2026-11-30 a=1": "invalid literal for int",
        "dgrad 8 256 512 32 9x9x9c9 2026-11-30 a=1": "no kernel of 'dgrad' has the tile '9x9x9c9'",
        "dgrad 8 256 512 32 64x256x128c1 2026-11-30 a=b=c": "too many values",
        "what 8 256 512 32 64x256x128c1 2026-11-30 a=1": "no kernel of 'what'",
        "\x00\xff": "not enough values",
    }
    gpu.write_bytes(("\n".join(bad) + "\n").encode("latin-1") + good.encode())
    assert set(tuned.read(gpu)) == {PROBLEM}
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == len(bad)
    for number, (message, reason) in enumerate(zip(messages, bad.values()), 1):
        assert f"line {number} of {gpu}" in message
        assert reason in message
    tuned.add(gpu, {PROBLEM._replace(rows=64): measured(tiles[1])})
    assert len(gpu.read_text().splitlines()) == 3
    assert len(tuned.read(gpu)) == 2


def test_several_processes_add_to_one_table(tmp_path):
    add_20 = """
        import os
        from pearl_jax import TileConfig, tuned

        first = int(os.environ["FIRST"])
        measured = tuned.Measured(TileConfig(64, 256), "2026-11-30", {})
        for n in range(first, first + 20):
            tuned.add(os.environ["TABLE"], {tuned.Problem("dgrad", 1, 1, n, 1): measured})
    """
    table = str(tmp_path / "tiles.txt")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for process in [pool.submit(python, add_20, TABLE=table, FIRST=f) for f in ("100", "200")]:
            process.result()
    assert {p.n for p in tuned.read(table)} == {
        first + i for first in (100, 200) for i in range(20)
    }


def test_another_process_is_noticed(gpu):
    tuned.add(gpu, {PROBLEM: measured(TileConfig(64, 256))})
    assert len(tuned.read(gpu)) == 1
    copy = gpu.with_name("other.txt")
    tuned.add(copy, tuned.read(gpu) | {PROBLEM._replace(g=99): measured(TileConfig(64, 256))})
    copy.replace(gpu)
    assert len(tuned.read(gpu)) == 2


def test_where_the_table_is(monkeypatch, tmp_path):
    class Device:
        device_kind = "NVIDIA H200/x"

    monkeypatch.setattr(jax, "devices", lambda _: [Device])
    name = f"tiles-NVIDIA_H200_x-{pearl_jax.__version__}.txt"
    monkeypatch.setenv("PEARL_JAX_CACHE_DIR", str(tmp_path))
    assert tuned.path() == tmp_path / name
    monkeypatch.delenv("PEARL_JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.path() == tmp_path / "pearl_jax" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.path() == tmp_path / ".cache" / "pearl_jax" / name


def test_environment_switches_tables_off():
    assert pearl_jax.tuned_tiles.value
    code = "import pearl_jax; print(pearl_jax.tuned_tiles.value)"
    assert python(code, PEARL_JAX_TUNED="0") == "False\n"


def test_errors(gpu, monkeypatch):
    with pytest.raises(ValueError, match=r"^autotune: the function has no grouped_matmul"):
        pearl_jax.autotune(jnp.sin, jnp.ones(3))
    monkeypatch.setattr(library, "present_arch", lambda: None)
    with pytest.raises(RuntimeError, match=r"^autotune: there is no GPU with kernels here$"):
        pearl_jax.autotune(layer, *arguments())
    with pytest.raises(SystemExit, match="no GPU with kernels"):
        main(["--shapes", "4x64x64"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4x64"], "'4x64' is neither g x k x n nor one of GLM-5.3, DeepSeek"),
        (["--shapes", "0x64x64"], "'0x64x64' is neither"),
        (["--shapes", "4x64x64", "--rows", "0"], "--rows and --rounds must be at least 1"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_command(gpu, capsys):
    main(["--shapes", "4x64x128", "--rows", "3", "4", "9", "--rounds", "1"])
    rows = {(p.form, p.rows) for p in tuned.read(gpu)}
    assert rows == set(itertools.product(tiling.FORMS, (4, 16)))
    assert capsys.readouterr().out.count("\n") == 1 + 6


def test_names_of_models(capsys):
    """Both projections, for the experts of one device; however the name is written."""
    main(["--shapes", "glm5.3", "GLM-5.3", "--forms", "fwd", "--rows", "16", "--arch", ARCH])
    out = capsys.readouterr().out
    for k, n in ((6144, 4096), (2048, 6144)):
        assert out.count(str(Problem("fwd", 32, k, n, 16))) == 1


def test_explanation(capsys):
    """Needs no GPU; what the model says is in the order of its choice."""
    main(["--shapes", "16x4096x3072", "--forms", "dgrad", "--rows", "64", "--arch", ARCH])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == str(Problem("dgrad", 16, 4096, 3072, 64))
    chosen = cost.choose(ARCH, "dgrad", 16 * 64, 4096, 3072, 16)
    assert lines[0].startswith(f"  {chosen}: ")
    assert any("192 work tiles in 1.45 rounds of 132" in line for line in lines)
    assert np.all([" us, " in line for line in lines])
