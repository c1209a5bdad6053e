"""What the compiler made of each kernel: the instructions that its speed rests on."""

import collections
import importlib.metadata
import re
import shutil
import subprocess

import fake_gpu
import pytest

from pearl_jax import library, tiling

pytestmark = pytest.mark.skipif(
    not library._path().is_file(),
    reason="no compiled kernels in this install: their instructions were not checked",
)

SPECS = {spec.name: spec for arch in ("sm_90a", "sm_100f") for spec in tiling.kernels(arch)}
CAPABILITY = {"sm_90a": 90, "sm_100f": 100}
THREADS = {"sm_90a": 384, "sm_100f": 256}  # of a block at most, which share 65536 registers


def tool(name):
    """A program of the CUDA toolkit, from its package or from the PATH."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or ()
        return next(str(f.locate()) for f in files if f.stem == name and f.parent.name == "bin")
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        return shutil.which(name) or pytest.skip(f"no {name} here: instructions were not checked")


def run(*args):
    return subprocess.run(args, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def binaries():
    found, compiled = {}, library.kernel_names()  # a part of them where not all were built
    for arch, capability in CAPABILITY.items():
        with fake_gpu.start(library._path(), (capability,)) as gpu:
            names = [name for name, s in SPECS.items() if s.arch == arch and name in compiled]
            found |= {name: gpu.binary(name) for name in names}
    return found


@pytest.fixture(params=SPECS)
def kernel(request, binaries, tmp_path):
    """(spec, path of its GPU binary)"""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binaries[request.param])
    return SPECS[request.param], path


def test_instructions(kernel):
    spec, path = kernel
    code = run(tool("nvdisasm"), "-c", path)
    count = collections.Counter(re.findall(r"\*/ +(?:@!?\w+ +)?([A-Z][\w.]+)", code))

    def all_that(start):
        return {name: n for name, n in count.items() if name.startswith(start)}

    # Nothing spills.
    assert not all_that("STL")
    assert not all_that("LDL")
    {"sm_90a": check_hopper, "sm_100f": check_blackwell}[spec.arch](spec, all_that)


def check_hopper(spec, all_that):
    # A K tile of 64 takes four steps at each extent, and nothing else is computed.
    dtype = {"bfloat16": ".BF16", "float16": ""}[spec.dtype]
    products = all_that("HGMMA")
    outer = spec.form == "wgrad"
    extents = [spec.tile.m] if outer else [n for n in tiling.EXTENTS if n <= spec.tile.m]
    assert set(products) == {f"HGMMA.64x{n}x16.F32{dtype}" for n in extents}
    assert all(n % 4 == 0 for n in products.values())
    # A stage of weights is one 4-D request if wide, and a 3-D request for each K tile if not.
    # (There are several of a kind, as the loop around them is unrolled.) Rows are 2-D. Of an
    # outer product both operands have two dimensions more, for the end of the group.
    requests = all_that("UTMALDG")
    dimensions = {name.split(".")[1] for name in requests}
    if outer:
        assert dimensions == {"5D" if spec.wide else "4D"}
    else:
        assert dimensions == {"2D", "4D" if spec.wide else "3D"}
    multicast = any("MULTICAST" in name for name in requests)
    assert multicast == (spec.tile.cluster > 1 and not outer)
    if outer:
        # Results leave by the copy engine, which also adds float32. What 16-bit results are
        # added to comes in 16 bytes a thread, and so do sums that go to another CTA and come back.
        blocks = spec.tile.m // 8 * spec.tile.n // 128
        adds = spec.out_dtype == "float32"
        assert all_that("UTMASTG")
        sums = blocks if spec.tile.cluster > 1 else 0
        assert all_that("STG") == ({"STG.E.128": sums} if sums else {})
        assert bool(all_that("UTMAREDG")) == adds
        assert sum(all_that("STS").values()) == (4 * blocks if adds else blocks)
        assert bool(all_that("STSM")) != adds
        loads = sums + (0 if adds else blocks // 2)
        assert all_that("LDG.E.128") == ({"LDG.E.128": loads} if loads else {})
    else:  # Results leave in 16 bytes a thread.
        assert set(all_that("STG")) == {"STG.E.128"}
    # All other loads are of single numbers.
    assert set(all_that("LDG")) - {"LDG.E.128"} == {"LDG.E"}
    # The producers give registers to the consumers.
    assert len(all_that("USETMAXREG.DEALLOC")) == len(all_that("USETMAXREG.TRY_ALLOC")) == 1


def check_blackwell(spec, all_that):
    tile, outer = spec.tile, spec.form == "wgrad"
    halves = 2 if tile.n == 512 else 1  # of the columns, each with an accumulator
    pair = ".2CTA" * (tile.ctas == 2)
    # Each ring has two barriers for each stage, so this counts the stages.
    stages = sum(tiling.stages(spec.arch, tile)) + tiling.ACCUMULATORS
    assert all_that("SYNCS.EXCH") == {"SYNCS.EXCH.64": 2 * stages}
    # A K tile of 64 takes four products. Halves are multiplied each by itself and together.
    loops = {1: [1], 2: [1, 1, 2]}[halves]
    assert all_that("UTCHMMA") == {"UTCHMMA" + pair: 4 * sum(loops)}
    # Of the barriers, each half of the columns signals one when it is complete, and a K tile
    # one for its rows and one for its weights, but where the other half still needs them.
    signals = sum(loops) + 2 * (len(loops) - (halves - 1))
    assert sum(all_that("UTCBAR").values()) == signals
    # Rows are one request, and so is a stage of weights (of each half) if wide, else a span.
    # Of an outer product both operands are like weights, and have two dimensions more.
    columns = tile.n // tile.ctas // halves
    contiguous = tile.k if spec.form == "dgrad" else columns
    spans = 1 if spec.wide else contiguous // 64
    if outer:
        rows_spans = 1 if spec.wide else tile.m // tile.ctas // 64
        expected = {5 if spec.wide else 4: spans + rows_spans}
    else:
        expected = {2: 1, 4 if spec.wide else 3: halves * spans}
    requests = collections.Counter()
    for name, number in all_that("UTMALDG").items():
        assert (".2CTA" in name) == (tile.ctas == 2)
        requests[int(re.search(r"\.(\d)D", name)[1])] += number
    assert requests == expected
    # Results leave from registers in the longest vectors, and only they and zeros do: of 16
    # lanes of tensor memory, one or two vectors a round, for each 8 rows if rows are lanes.
    # An outer product has no zeros, but a second loop that adds to what is there, which it
    # reads as it is stored, before the loop and a round ahead.
    lanes = 1 if tile.rows_on_m and tile.m == 64 else 2  # by 16
    vectors = lanes * 2 if tile.rows_on_m else 1
    vectors *= halves * (2 if spec.out_dtype == "float32" else 1) * (1 if spec.wide else 2)
    width = ".E.ENL2.256" if spec.wide else ".E.128"
    assert all_that("STG") == {"STG" + width: 2 * vectors if outer else vectors + 1}
    loads = all_that("LDG")
    assert loads.pop("LDG" + width, 0) == (2 * vectors if outer else 0)
    assert set(loads) == {"LDG.E"}  # single numbers
    blocks = 8 if tile.rows_on_m else 2
    assert all_that("LDTM") == {f"LDTM.16dp256bit.x{blocks}": lanes * halves * (1 + outer)}
    for staging in ("STSM", "UTMASTG", "UBLKCP"):
        assert not all_that(staging)
    assert sum(all_that("STS").values()) <= 4  # the allocation of tensor memory writes these


def test_resources(kernel):
    spec, path = kernel
    text = run(tool("cuobjdump"), "-res-usage", path)
    (usage,) = (
        {key: int(value) for key, value in re.findall(r"\b(\w+):(\d+)", line)}
        for line in text.splitlines()
        if "REG:" in line
    )
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] * THREADS[spec.arch] <= 65536
