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

SPECS = {spec.name: spec for spec in tiling.kernels("sm_90a")}

THREADS = 384  # of a block, which share 65536 registers


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
    with fake_gpu.start(library._path()) as gpu:
        return {name: gpu.binary(name) for name in SPECS}


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
    # A K tile of 64 takes four steps at each extent, and nothing else is computed.
    dtype = {"bfloat16": ".BF16", "float16": ""}[spec.dtype]
    products = all_that("HGMMA")
    assert set(products) == {
        f"HGMMA.64x{n}x16.F32{dtype}" for n in tiling.EXTENTS if n <= spec.tile.m
    }
    assert all(n % 4 == 0 for n in products.values())
    # A stage of weights is one 4-D request if wide, and a 3-D request for each K tile if not.
    # (There are several of a kind, as the loop around them is unrolled.) Rows are 2-D.
    requests = all_that("UTMALDG")
    dimensions = {name.split(".")[1] for name in requests}
    assert dimensions == {"2D", "4D" if spec.wide else "3D"}
    assert any("MULTICAST" in name for name in requests) == (spec.tile.cluster > 1)
    # Results leave in 16 bytes a thread.
    assert set(all_that("STG")) == {"STG.E.128"}
    # The producers give registers to the consumers.
    assert len(all_that("USETMAXREG.DEALLOC")) == len(all_that("USETMAXREG.TRY_ALLOC")) == 1


def test_resources(kernel):
    _, path = kernel
    text = run(tool("cuobjdump"), "-res-usage", path)
    (usage,) = (
        {key: int(value) for key, value in re.findall(r"\b(\w+):(\d+)", line)}
        for line in text.splitlines()
        if "REG:" in line
    )
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] * THREADS <= 65536
