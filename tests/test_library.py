"""The shared library: what is in it, how it is found, and its handlers, all without a GPU."""

import collections
import concurrent.futures
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import fake_gpu
import jax
import pytest
from fake_gpu import EXECUTE, INITIALIZE

from pearl_jax import library, tiling

PATH = library._path()
FFI = Path(__file__).parents[1] / "ffi"

built = pytest.mark.skipif(
    not PATH.is_file(), reason="no compiled kernels in this install: the library was not tested"
)


def run(tool, *args):
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    return subprocess.run([tool, *args], check=True, capture_output=True, text=True).stdout


# The file.


@built
def test_manifest_is_what_tiling_says():
    expected = {spec.name for arch in ("sm_90a", "sm_100f") for spec in tiling.kernels(arch)}
    assert library.kernel_names() == expected


@built
def test_exports_the_handlers_and_the_manifest_only():
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", PATH).splitlines()}
    script = (FFI / "exports.map").read_text()
    assert exported == set(re.findall(r"(\w+);", script.partition("local:")[0]))


@built
def test_host_code_runs_on_any_x86_64():
    code = run("objdump", "-d", "--no-show-raw-insn", PATH)
    assert "cuda_init" not in code  # stripped, or this test would read names
    assert len(code) > 10_000
    assert not re.search(r"%[yz]mm|%k[0-7]\b", code)


@built
def test_needs_no_newer_libc_than_debian_12():
    needed = re.findall(r"\b(GLIBC|GLIBCXX)_([\d.]+)", run("objdump", "-T", PATH))
    newest = {
        name: max(tuple(map(int, version.split("."))) for n, version in needed if n == name)
        for name in ("GLIBC", "GLIBCXX")
    }
    assert newest["GLIBC"] <= (2, 36)
    assert newest["GLIBCXX"] <= (3, 4, 30)


@built
def test_is_small():
    assert PATH.stat().st_size < 25e6


# Where it is missing, or cannot run here.


@pytest.fixture
def fresh(monkeypatch):
    """library as if just imported."""
    caches = (library.unavailable, library.kernel_names)
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


def is_one_sentence(text):
    return "\n" not in text and ". " not in text and len(text) < 300


def test_missing_library(fresh, tmp_path):
    fresh.setattr(library, "_path", lambda: tmp_path / "libpearl_jax.so")
    fresh.setattr(library, "_registered", False)
    reason = library.unavailable()
    assert reason
    assert is_one_sentence(reason)
    for cause in ("PEARL_JAX_SKIP_KERNELS", "C++ compiler", "not Linux", "source folder"):
        assert cause in reason
    assert library.kernel_names() == frozenset()
    with pytest.raises(RuntimeError, match="PEARL_JAX_SKIP_KERNELS"):
        library.ensure_registered()


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [
        ("9.0", (12, 0), None),
        ("9.0", (13, 0), None),
        ("9.0", (11, 8), "supports CUDA 11.8, but the kernels need a driver for CUDA 12.0"),
        ("10.3", (12, 9), None),
        ("10.0", (12, 8), "supports CUDA 12.8, but the kernels need a driver for CUDA 12.9"),
        ("8.0", (13, 0), r"has compute capability 8.0, but the kernels are for 9.0 \(Hopper\) and"),
        ("12.0", (13, 0), "has compute capability 12.0, but the kernels are for"),
    ],
)
def test_gpu_and_driver(fresh, capability, driver, expected):
    gpu = SimpleNamespace(id=3, device_kind="Some GPU", compute_capability=capability)
    fresh.setattr(library, "_path", lambda: Path(__file__))
    fresh.setattr(library, "kernel_names", lambda: {"x_sm_90a_y", "x_sm_100f_y"})
    fresh.setattr(library, "_driver_version", lambda: driver)
    fresh.setattr(jax, "devices", lambda platform: [gpu])
    reason = library.unavailable()
    if expected is None:
        assert reason is None
    else:
        assert re.search(expected, reason)
        assert "GPU 3 (Some GPU)" in reason
        assert is_one_sentence(reason)


@built
def test_without_a_gpu_only_the_library_counts(fresh):
    def no_gpu(platform):
        raise RuntimeError("Unknown backend cuda")

    fresh.setattr(jax, "devices", no_gpu)
    assert library.unavailable() is None


@built
def test_registers_once():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: library.ensure_registered(), range(32)))


# The handlers, called as XLA calls them.

SPECS = tiling.kernels("sm_90a")


def kernel(*key):
    """The name of a kernel for (form, dtype, out_dtype)."""
    return next(s.name for s in SPECS if (s.form, s.dtype, s.out_dtype) == key)


KERNEL = kernel("dgrad", "bfloat16", "float32")
OTHER = kernel("fwd", "float16", "float16")
LOADS = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuKernelSetAttribute")


@pytest.fixture
def gpu():
    with fake_gpu.start(PATH) as gpu:
        yield gpu


@built
@pytest.mark.parametrize("handler", ["initialize", "execute"])
def test_api_version_and_traits(gpu, handler):
    # 0.3 is the version of jaxlib 0.10.2; trait 1 lets XLA put the call into a CUDA graph.
    major, minor, traits = gpu.metadata(handler)
    assert (major, traits) == (0, 1)
    assert minor <= 3


@built
def test_initialize_loads_and_execute_only_launches(gpu):
    assert gpu.call(INITIALIZE, KERNEL) is None
    assert set(LOADS) <= {call["name"] for call in gpu.calls()}
    assert gpu.call(INITIALIZE, KERNEL) is None
    assert gpu.call(EXECUTE, KERNEL) is None
    assert {call["name"] for call in gpu.calls()} == {"cuStreamGetCtx", "cuLaunchKernelEx"}


@built
def test_every_kernel_loads_and_launches(gpu):
    for name in sorted(library.kernel_names()):
        assert gpu.call(INITIALIZE, name) is None
        assert gpu.call(EXECUTE, name) is None
    assert len(gpu.calls("cuLaunchKernelEx")) == len(library.kernel_names())


@built
@pytest.mark.parametrize(("arch", "capability"), [("sm_90a", 90), ("sm_100f", 103)])
def test_launch_parameters(arch, capability):
    by_tile = {spec.tile: spec.name for spec in tiling.kernels(arch)}
    with fake_gpu.start(PATH, (capability, capability)) as gpu:
        for tile, name in by_tile.items():
            assert gpu.call(EXECUTE, name, device=1, stream=7, other=name) is None
            (launch,) = gpu.calls("cuLaunchKernelEx")
            assert launch["stream"] == 107
            cluster = tile.cluster * tile.ctas
            assert launch.get("cluster", 1) == cluster
            # One block for each of that device's 101 multiprocessors, as far as clusters allow.
            assert launch["grid0"] == 101 // cluster * cluster
            assert all(launch[key] == 1 for key in ("grid1", "grid2", "block1", "block2"))
            assert launch["block0"] % 32 == 0
            assert 100_000 < launch["shared_memory"] <= 232448


@built
def test_each_device_gets_the_kernel_once():
    with fake_gpu.start(PATH, (90, 90, 90)) as gpu:
        for device in (0, 2, 0, 2):
            assert gpu.call(INITIALIZE, KERNEL, device) is None
        calls = gpu.calls()
    assert len([c for c in calls if c["name"] == "cuLibraryLoadData"]) == 1
    for name in LOADS[1:]:
        assert {c["current"] for c in calls if c["name"] == name} == {0, 2}
    attributes = [c for c in calls if c["name"] == "cuKernelSetAttribute"]
    shared_memory = [c for c in attributes if c["attribute"] == 8]
    assert [(c["device"], c["current"]) for c in shared_memory] == [(0, 0), (2, 2)]
    assert {c["value"] for c in shared_memory} == {232448 - 1024}  # all but the static part


@built
def test_devices_and_threads():
    jobs = [
        (kernel, device, stream)
        for stream in range(16)
        for device in range(4)
        for kernel in (KERNEL, OTHER)
    ]

    def job(kernel, device, stream):
        return [gpu.call(stage, kernel, device, stream) for stage in (INITIALIZE, EXECUTE, EXECUTE)]

    with fake_gpu.start(PATH, (90,) * 4) as gpu, concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(errors == [None] * 3 for errors in pool.map(lambda x: job(*x), jobs))
        calls = gpu.calls()
    assert len([c for c in calls if c["name"] == "cuLibraryLoadData"]) == 2
    assert len([c for c in calls if c["name"] == "cuKernelGetFunction"]) == 2 * 4
    launches = collections.Counter(c["stream"] for c in calls if c["name"] == "cuLaunchKernelEx")
    assert launches == {100 * device + stream: 4 for device in range(4) for stream in range(16)}


@built
def test_family_by_compute_capability():
    # The other family's kernel is none of this library: it is not looked for.
    shapes = fake_gpu.problem(KERNEL)
    with fake_gpu.start(PATH, (90, 100, 103)) as gpu:
        assert gpu.call(INITIALIZE, KERNEL, 0, other="absent", **shapes) is None
        for blackwell in (1, 2):
            assert gpu.call(INITIALIZE, "absent", blackwell, other=KERNEL, **shapes) is None


@built
@pytest.mark.parametrize("capability", [80, 89, 91, 120])
def test_unsupported_gpu(capability):
    with fake_gpu.start(PATH, (90, capability)) as gpu:
        for stage in (INITIALIZE, EXECUTE):
            error = gpu.call(stage, KERNEL, device=1, other=KERNEL)
            assert f"GPU 1 has compute capability {capability // 10}.{capability % 10}" in error
            assert "9.0 (Hopper) and 10.x (Blackwell) only" in error


@built
def test_failing_load_is_reported_and_tried_again(gpu):
    for function in LOADS:
        gpu.fail(function, 2)
        error = gpu.call(INITIALIZE, KERNEL)
        assert f"loading {KERNEL} to GPU 0" in error
        assert "CUDA_ERROR_OUT_OF_MEMORY (out of memory)" in error
    gpu.fail("", 0)
    assert gpu.call(INITIALIZE, KERNEL) is None
    assert gpu.call(EXECUTE, KERNEL) is None


@built
def test_failing_launch(gpu):
    gpu.fail("cuLaunchKernelEx", 701)
    error = gpu.call(EXECUTE, KERNEL)
    for part in (
        "pearl_jax.grouped_matmul: the launch failed with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        KERNEL,
        "lhs BF16[2,64,128], rhs BF16[1,8,256,128], group_sizes S32[2,16], out F32[2,64,256]",
    ):
        assert part in error


@built
def test_unknown_error_and_missing_stream_context(gpu):
    gpu.fail("cuStreamGetCtx", 12345)
    assert "CUDA error 12345" in gpu.call(INITIALIZE, KERNEL)


@built
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lhs": ("float16", (2, 64, 128))}, "operands are not what the kernel takes"),
        ({"rhs": ("bfloat16", (1, 8, 128, 256))}, "operands are not what the kernel takes"),
        ({"out": ("bfloat16", (2, 64, 256))}, "operands are not what the kernel takes"),
        ({"out": ("float32", (2, 65, 256))}, "operands are not what the kernel takes"),
        ({"batch_index": ("int32", (1, 4))}, "operands are not what the kernel takes"),
        ({"batch_index": ("int32", (2, 3))}, "operands are not what the kernel takes"),
        ({"group_sizes": ("float32", (2, 16))}, "Wrong buffer dtype"),
        ({"data": 8}, "operand is not aligned to 16 bytes"),
        ({"data": 16}, "result is not aligned to 32 bytes"),
        ({"kernel": ""}, "no kernel was chosen for GPU 0 of compute capability 9.0"),
        ({"kernel": KERNEL + "x"}, f"there is no kernel {KERNEL}x in this library"),
        (fake_gpu.problem(KERNEL, batch=4, m=1 << 29), r"must be 1 to 2\^31 - 1"),
        (fake_gpu.problem(KERNEL, n=1 << 31), r"must be 1 to 2\^31 - 1"),
        (fake_gpu.problem(KERNEL, g=1 << 31), r"must be 1 to 2\^31 - 1"),
        (fake_gpu.problem(KERNEL, g=0), r"must be 1 to 2\^31 - 1"),
        (fake_gpu.problem(KERNEL, k=0), r"must be 1 to 2\^31 - 1"),
    ],
)
def test_rejected_calls(gpu, change, expected):
    error = gpu.call(EXECUTE, **{"kernel": KERNEL} | fake_gpu.problem(KERNEL) | change)
    assert re.search(expected, error)
    assert not gpu.calls("cuLaunchKernelEx")


OUTER = kernel("wgrad", "bfloat16", "float32")


@built
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rhs": ("bfloat16", (1, 65, 256))}, "operands are not what the kernel takes"),
        ({"out": ("bfloat16", (2, 8, 128, 256))}, "operands are not what the kernel takes"),
        ({"out": ("float32", (2, 8, 128, 128))}, "operands are not what the kernel takes"),
        ({"out": ("float32", (2, 64, 256))}, "operands are not what the kernel takes"),
        ({"batch_index": ("int32", (3, 4))}, "operands are not what the kernel takes"),
        ({"data": 8}, "not aligned to 16 bytes"),
        (fake_gpu.problem(OUTER, m=1 << 30), r"must be 1 to 2\^31 - 1"),
        (fake_gpu.problem(OUTER, m=0), r"must be 1 to 2\^31 - 1"),
    ],
)
def test_rejected_outer_products(gpu, change, expected):
    error = gpu.call(EXECUTE, **{"kernel": OUTER} | fake_gpu.problem(OUTER) | change)
    assert error.partition(" ")[2].startswith("pearl_jax.grouped_outer: ")
    assert re.search(expected, error)
    assert not gpu.calls("cuLaunchKernelEx")


@built
def test_outer_product_sums_over_batches_and_adds(gpu):
    """Six batches make two results; a sixth operand is the memory of the result, or an error."""
    shapes = fake_gpu.problem(OUTER, batch=6)
    shapes["out"] = ("float32", (2, *shapes["out"][1][1:]))
    assert gpu.call(EXECUTE, OUTER, **shapes) is None
    old = {"old": shapes["out"], "out": shapes["out"]}
    assert gpu.call(EXECUTE, OUTER, **shapes | old) is None
    assert len(gpu.calls("cuLaunchKernelEx")) == 2
    assert "not what the kernel takes" in gpu.call(
        EXECUTE, OUTER, other_data=1 << 21, **shapes | old
    )
    matmul = fake_gpu.problem(KERNEL)
    old = {"old": matmul["out"], "out": matmul["out"]}
    assert "not what the kernel takes" in gpu.call(EXECUTE, KERNEL, **matmul | old)
    assert not gpu.calls("cuLaunchKernelEx")


@built
@pytest.mark.parametrize("empty", ["batch", "m", "n"])
def test_empty_result_launches_nothing(gpu, empty):
    shapes = fake_gpu.problem(KERNEL, **{empty: 0})
    assert gpu.call(EXECUTE, KERNEL, **shapes) is None
    assert not gpu.calls()


@built
def test_many_elements(gpu):
    # More than 2^31 elements everywhere, and the most rows there may be.
    shapes = fake_gpu.problem(KERNEL, batch=1, m=(1 << 31) - 1, n=1 << 20, k=1 << 20)
    assert gpu.call(EXECUTE, KERNEL, **shapes) is None


@built
def test_driver_without_what_is_needed():
    with fake_gpu.start(PATH, options=("-DcuLibraryLoadData=absent",)) as gpu:
        error = gpu.call(INITIALIZE, KERNEL)
    assert "the CUDA driver is too old: it has no function cuLibraryLoadData" in error
