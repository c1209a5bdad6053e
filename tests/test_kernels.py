"""The kernels on a CPU: compiled here and run by the PTX emulator, in every schedule.

`python tests/kernel_matrix.py` does it for all kernels; here is a choice that covers the code.
"""

import bisect
import dataclasses
import functools
import re

import numpy as np
import oracle
import pytest
from emulator import HazardError, Hold, emulate
from emulator.kernels import compile_cases, missing
from emulator.mutations import displaced, edit_ptx
from emulator.problems import ENCODE, POISON, from_bf16

from pearl_jax import TileConfig, tiling

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"the kernels were not compiled and not tested: {missing()}"
)

FORMS = ("fwd", "dgrad")
NAMES = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}
SMS = 4
MODES = ("in order", "random", "adversarial")


def hopper():
    """Every tile of each layout at bfloat16, and each other property with some tile."""
    arch = "sm_90a"
    specs = [
        tiling.KernelSpec(arch, form, "bfloat16", "bfloat16", True, tile)
        for form in FORMS
        for tile in tiling.tiles(arch, form)
    ]
    specs += [
        tiling.KernelSpec(
            arch,
            form,
            dtype,
            out_dtype,
            False,
            dataclasses.replace(tiling.tiles(arch, form)[i], **flag),
        )
        for form, dtype, out_dtype, i, flag in (
            ("fwd", "float16", "float16", 1, {"evict_first": True}),
            ("dgrad", "float16", "float16", 1, {"pdl": False}),
            ("dgrad", "bfloat16", "float32", 0, {"raster_along_n": True}),
        )
    ]
    return specs


def blackwell():
    """Every tile in the library once, and what the others have that those do not; each flag."""
    arch = "sm_100f"
    few, rows64, rows128, pair, wide_pair, square_pair = tiling.tiles(arch, "fwd")
    return [
        tiling.KernelSpec(arch, form, dtype, out_dtype, wide, tile)
        for form, dtype, out_dtype, wide, tile in (
            ("fwd", "bfloat16", "bfloat16", True, few),
            ("dgrad", "float16", "float32", False, few),
            ("dgrad", "bfloat16", "bfloat16", True, rows64),
            ("fwd", "bfloat16", "float32", True, rows128),
            ("fwd", "float16", "float16", False, pair),
            ("dgrad", "bfloat16", "bfloat16", True, wide_pair),
            ("fwd", "bfloat16", "bfloat16", True, square_pair),
            # Half of the lanes for each half of the columns; a cluster of pairs.
            ("fwd", "bfloat16", "bfloat16", True, TileConfig(128, 128, 128, 2, 2, True, pdl=False)),
            # Weights on M, over a pair, with 96 rows of each CTA; a cluster of single CTAs.
            (
                "dgrad",
                "bfloat16",
                "bfloat16",
                True,
                TileConfig(192, 256, 64, 1, 2, evict_first=True),
            ),
            ("fwd", "bfloat16", "bfloat16", True, TileConfig(32, 128, 64, 2, raster_along_n=True)),
            # In a cluster of pairs some CTAs have no part in some K tiles.
            ("dgrad", "float16", "float16", False, TileConfig(64, 256, 128, 2, 2)),
        )
    ]


SPECS = {s.name: s for s in (*hopper(), *blackwell())}
every_kernel = pytest.mark.parametrize("name", SPECS)


class Compiled(dict):
    """Compiles kernels when they are asked for, all of one architecture at once."""

    def __init__(self, specs):
        super().__init__()
        self.specs = specs

    def __missing__(self, name):
        arch = self.specs[name].arch
        self |= compile_specs(arch, [s for s in self.specs.values() if s.arch == arch])
        return self[name]


def compile_specs(arch, specs):
    fields = ("form", "dtype", "out_dtype", "wide")
    cases = {
        s.name: {f: getattr(s, f) for f in fields} | {"tile": list(dataclasses.astuple(s.tile))}
        for s in specs
    }
    return compile_cases(arch, "pearl_jax", cases)


@pytest.fixture(scope="module")
def compiled():
    return Compiled(SPECS)


def shape(spec, k, n):
    """(k, n) that the kernel takes, no larger than the given ones."""
    k_unit = 64 if spec.wide and spec.form == "dgrad" else 8
    n_unit = 64 if spec.wide and spec.form == "fwd" else 8
    if spec.wide and spec.arch == "sm_100f":
        n_unit = max(n_unit, 16)
    return k // k_unit * k_unit, n // n_unit * n_unit


@functools.lru_cache(64)
def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-2, 3, shape)


def decoded(bits):
    return from_bf16(bits) if bits.dtype == np.uint16 else bits.astype(np.float32)


def run(kernel, spec, sizes, *, mode="random", seed=0, hold=None, **shape):
    """Runs a problem in the emulator and compares the result with the oracle, bit by bit."""
    values, want = problem(spec, sizes, **shape)
    outputs, report = emulate(
        kernel, values, mode=mode, seed=seed, hold=hold, sm_count=multiprocessors(spec)
    )
    got = decoded(outputs[5])
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{len(wrong)} elements are wrong, the first at {wrong[0]}"
    assert report.launches[0].pdl == spec.tile.pdl
    return report


def multiprocessors(spec):
    return max(SMS, spec.tile.cluster * spec.tile.ctas)


def problem(spec, sizes, *, m, k, n, offset=(0,), held=None, index=None):
    """The launcher's arguments, and the result that they should have.

    sizes: (batches, groups); offset: (batches,); index: which batch of lhs, rhs, sizes and
    offset each batch of the result takes, by default one batch of each.
    """
    sizes, offset = np.atleast_2d(np.array(sizes, np.int64)), np.array(offset)
    held = sizes.shape[1] if held is None else held
    index = np.array([[0] * 4] if index is None else index, np.int32)
    batches = index.max(0) + 1
    lhs = integers(1, batches[0], m, k)
    rhs = integers(2, batches[1], held, k, n)

    want = np.zeros((len(index), m, n))
    owned = np.zeros((batches[0], m), bool)
    for i, (a, b, c, d) in enumerate(index):
        want[i] = oracle.grouped_matmul(lhs[a], rhs[b], sizes[c], offset=int(offset[d]))
        bounds = oracle.bounds(sizes[c], m)
        first, last = (min(max(int(offset[d]) + j, 0), sizes.shape[1]) for j in (0, held))
        owned[a, bounds[first] : bounds[last]] = True

    encode, out_dtype = ENCODE[NAMES[spec.dtype]], NAMES[spec.out_dtype]
    encoded = encode(lhs.astype(np.float32))
    encoded[~owned] = POISON[NAMES[spec.dtype]]  # rows that nobody may use
    stored = rhs.swapaxes(2, 3) if spec.form == "dgrad" else rhs
    values = [
        encoded,
        encode(np.ascontiguousarray(stored, np.float32)),
        np.clip(sizes, -(2**31), 2**31 - 1).astype(np.int32),
        offset.astype(np.int32),
        index,
        np.full(want.shape, POISON[out_dtype]),
        m, n, k, held, sizes.shape[1], len(index), batches[0], batches[1],
        multiprocessors(spec),
    ]  # fmt: skip
    return values, decoded(ENCODE[out_dtype](want))


# Rows of six groups, for 90 rows.
SIZES = {
    "uniform": [15] * 6,
    "empty first": [0, 20, 33, 1, 16, 17],
    "empty middle": [31, 0, 0, 40, 0, 9],
    "empty last": [7, 30, 48, 0, 0, 0],
    "all empty": [0] * 6,
    "size one": [1] * 6,
    "one hot": [0, 0, 90, 0, 0, 0],
    "sum above m": [40, 0, 45, 30, 2**31 - 1, 2**31 - 1],
    "negative": [-5, 20, -(2**31), 50, -1, 3],
}


# Cases take the modes in turn. With the other shifts, which kernel_matrix.py adds, each takes all.
in_turn = pytest.mark.parametrize("shift", [0])


def mode_of(case, shift):
    return MODES[(case + shift) % len(MODES)]


@every_kernel
@in_turn
def test_group_sizes(compiled, name, shift):
    spec = SPECS[name]
    k, n = shape(spec, 136, 264)
    for i, sizes in enumerate(SIZES.values()):
        run(compiled[name], spec, sizes, m=90, k=k, n=n, mode=mode_of(i, shift), seed=i)


@every_kernel
def test_rows_of_a_tile(compiled, name):
    """Groups of one row less and more than each number of rows that a tile may hold."""
    spec = SPECS[name]
    k, n = shape(spec, 64, 72)
    for i, extent in enumerate((16, 48, 64, 128, 144, 192, 256)):
        if extent <= spec.tile.m:
            sizes = [extent - 1, extent, extent + 1]
            run(compiled[name], spec, sizes, m=sum(sizes) + 3, k=k, n=n, mode=MODES[i % 3], seed=i)


@every_kernel
def test_k_tiles(compiled, name):
    """Around once and twice as many as the larger ring of stages holds, odd and even.

    In two work tiles, which are narrow, or in four.
    """
    spec = SPECS[name]
    weights, rows = tiling.stages(spec.arch, spec.tile)
    stages = max(weights * spec.tile.k // tiling.K_TILE, rows)
    around = (2, stages, 2 * stages)
    for k_tiles in sorted({c + d for c in around for d in (-1, 0, 1)}):
        k, n = shape(spec, 64 * k_tiles - 8 * (k_tiles % 3), 64)
        k = k or 64
        mode = MODES[k_tiles % 3]
        for sizes in ([5, 0, 18], [5, 1, 17, 1]):
            run(compiled[name], spec, sizes, m=25, k=k, n=n, mode=mode, seed=k_tiles)


NARROW = [n for n, s in SPECS.items() if tiling.narrow_columns(s.arch, s.tile) < s.tile.n]


@pytest.mark.parametrize("name", NARROW)
def test_narrow_tiles(compiled, name):
    """One or two groups with rows: two CTAs have half of a tile's columns each."""
    spec = SPECS[name]
    for i, rows in enumerate({1, *(r + d for r in range(16, spec.tile.m, 16) for d in (0, 1))}):
        k, n = shape(spec, 136, (256, 200, 512, 128)[i % 4])
        more = {"k": k, "n": n, "mode": MODES[i % 3], "seed": i}
        run(compiled[name], spec, [0, rows, 0], m=rows + 2, **more)
        run(compiled[name], spec, [rows, 0, 5], m=rows + 5, **more)
    k, n = shape(spec, 640, 256)
    report = run(compiled[name], spec, [0, 9, 0], m=9, k=k, n=n, mode="in order")
    assert report.busiest < 0.6 * report.instructions


@every_kernel
def test_columns(compiled, name):
    """n from one vector to a few tiles: with the last tile empty, partly empty and full."""
    spec = SPECS[name]
    for i, n in enumerate((8, 64, 120, 128, 136, 256, 264, 384, 512, 520)):
        k, n = shape(spec, 64, n)
        if n:
            sizes = [20, 0, 3]
            run(compiled[name], spec, sizes, m=25, k=k, n=n, mode=MODES[i % 3], seed=i)


# Which batch of lhs, rhs, sizes and offset each of three batches takes.
BATCHES = {
    "nothing shared": [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]],
    "weights shared": [[0, 0, 0, 0], [1, 0, 1, 0], [2, 0, 2, 0]],
    "rows shared": [[0, 0, 0, 0], [0, 1, 0, 1]],
    "all shared": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "grid": [[0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 2, 1], [1, 1, 0, 1]],
}


@every_kernel
@pytest.mark.parametrize("case", BATCHES)
def test_batches(compiled, name, case):
    spec, index = SPECS[name], BATCHES[case]
    k, n = shape(spec, 72, 136)
    sizes = [[9, 0, 20], [0, 0, 0], [40, 1, 2]]
    mode = MODES[len(case) % 3]
    held = {"offset": (1, 0, -1), "held": 2}
    run(compiled[name], spec, sizes, m=40, k=k, n=n, index=index, mode=mode, **held)


@every_kernel
@in_turn
def test_more_groups_than_lanes(compiled, name, shift):
    """70 groups, of which rhs holds 40 from an offset on, or none, or some beyond the end."""
    spec = SPECS[name]
    rng = np.random.default_rng(len(name))
    sizes = rng.integers(0, 4, 70) * (rng.random(70) < 0.7)
    k, n = shape(spec, 64, 64)
    m = int(sizes.sum()) + 2
    for i, offset in enumerate((0, 17, 30, 50, -20, 70, -40, 2**31 - 1, -(2**31))):
        more = {"offset": (offset,), "held": 40, "mode": mode_of(i, shift)}
        run(compiled[name], spec, sizes, m=m, k=k, n=n, **more)


@pytest.mark.parametrize("name", [n for n, s in SPECS.items() if s.arch == "sm_100f"])
def test_tensor_memory(compiled, name):
    """What is freed, which the emulator compares with what is allocated, is what tiling says."""
    (function,) = compiled[name].module.kernels.values()
    freed = [s.operands[1] for s in function.statements if s.opcode.startswith("tcgen05.dealloc")]
    assert freed == [str(tiling.tensor_memory_columns(SPECS[name].tile))]


def opcodes(kernel, start=""):
    (function,) = kernel.module.kernels.values()
    return [s.opcode for s in function.statements if s.opcode.startswith(start)]


def check_dependent_launch(kernel, tile):
    """Waits for the kernel before only if it may start before that ends (run checks that)."""
    pdl = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    assert opcodes(kernel, "griddepcontrol") == (pdl if tile.pdl else [])


@every_kernel
def test_dependent_launch(compiled, name):
    check_dependent_launch(compiled[name], SPECS[name].tile)


def cache_policies(kernel):
    """{dimensions of a request of the copy engine: policies that it has}."""
    (function,) = kernel.module.kernels.values()
    known, found = {}, {}
    for s in function.statements:
        if s.opcode == "mov.b64":
            known[s.operands[0]] = s.operands[1]
        elif re.match(r"cp\.async\.bulk\.tensor.*complete_tx.*cache_hint", s.opcode):
            dimensions = int(re.search(r"\.(\d)d\.", s.opcode)[1])
            found.setdefault(dimensions, set()).add(int(known[s.operands[-1]]))
    return found


@every_kernel
def test_cache_policy(compiled, name):
    """Only weights have one, and only where they are to be evicted first."""
    spec = SPECS[name]
    evict_first = 0x12F0 << 48 if spec.tile.evict_first else 0
    assert cache_policies(compiled[name]) == {2: {0}, 4 if spec.wide else 3: {evict_first}}


SMALL = [n for n, s in SPECS.items() if s.tile.m <= 64 and s.tile.ctas == 1]


@pytest.mark.parametrize("name", SMALL)
def test_raster_order(compiled, name):
    """Of two by two tiles of a group the first two are neighbours along the raster order's axis.

    Runs are cut short, after the fewest instructions with which two tiles are complete.
    """
    spec = SPECS[name]
    m, n = spec.tile.m, spec.tile.n * spec.tile.cluster
    values, _ = problem(spec, [2 * m], m=2 * m, k=64, n=2 * n)
    values[-1] = spec.tile.cluster  # multiprocessors: all tiles are one cluster's

    def complete(instructions):
        options = {"mode": "random", "max_instructions": instructions, "check": False}
        outputs, _ = emulate(compiled[name], values, **options)
        stored = ~np.isnan(decoded(outputs[5]).reshape(2, m, 2, n)).any((1, 3))
        return set(zip(*np.nonzero(stored)))

    fewest = bisect.bisect_left(range(10**6), 2, key=lambda count: len(complete(count)))
    assert complete(fewest) == {(0, 0), (0, 1) if spec.tile.raster_along_n else (1, 0)}
    assert {SPECS[name].tile.raster_along_n for name in SMALL} == {False, True}


WIDE_PAIRS = [name for name, spec in SPECS.items() if spec.tile.n == 512]


@pytest.mark.parametrize("name", WIDE_PAIRS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k_tiles", [1, 2, 5])
def test_halves_overlap(compiled, name, mode, k_tiles):
    """The right half of a tile is stored only after the next tile's left half was begun."""
    run_held(compiled[name], SPECS[name], k_tiles, mode)


@pytest.mark.parametrize("name", WIDE_PAIRS)
def test_halves_that_share_a_barrier_do_not_overlap(compiled, name):
    """So that the test above can fail: the left half, too, waits for the right one's room."""
    before = opcodes(compiled[name])
    before = before[: before.index(next(x for x in before if x.startswith("tcgen05.mma")))]
    # The last wait before the products is for their operands, the one before for the accumulator.
    nth = sum(x.startswith("mbarrier.try_wait") for x in before) - 2
    shared = edit_ptx(compiled[name], "mbarrier.try_wait", nth, displaced(1, 8))
    run_held(shared, SPECS[name], 2, "random", times=0)  # right, but for the overlap
    with pytest.raises(HazardError, match="as it is told to") as error:
        run_held(shared, SPECS[name], 2, "random")
    assert error.value.kinds == ["deadlock"]


def run_held(kernel, spec, k_tiles, mode, times=2):
    """Three tiles of each pair; of the first ones the epilogue is held before the right half."""
    tensor_core = [(i, x) for i, x in enumerate(opcodes(kernel)) if x.startswith("tcgen05")]
    # Of an epilogue's half, the fence after its wait: once a tile.
    _, right = (
        i for (i, x), (_, after) in zip(tensor_core, tensor_core[1:])
        if x == "tcgen05.fence::after_thread_sync" and after.startswith("tcgen05.ld")
    )  # fmt: skip
    left = next(i for i, x in tensor_core if x.startswith("tcgen05.mma"))
    begun = min(k_tiles, tiling.stages(spec.arch, spec.tile)[1] // 2)  # K tiles, each tile
    hold = Hold(held=right, awaited=left, ratio=begun, times=times)
    sizes = [200, 0, 300]
    run(kernel, spec, sizes, m=500, k=64 * k_tiles, n=1024, mode=mode, seed=k_tiles, hold=hold)


def test_wrong_answers_are_noticed(compiled, monkeypatch):
    """So that the tests above can fail: the oracle is told other weights."""
    name, spec = next(iter(SPECS.items()))
    real = oracle.grouped_matmul
    monkeypatch.setattr(oracle, "grouped_matmul", lambda x, w, *a, **k: real(x, w[::-1], *a, **k))
    with pytest.raises(AssertionError, match="elements are wrong"):
        run(compiled[name], spec, [5, 6], m=12, k=128, n=128)
