"""Compiles GEMM kernels that NVIDIA ships in nvidia-cutlass-operators: `ARCH FOLDER CASES`."""

import importlib
import json
import sys
import types
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

PACKAGE = "nvidia_gemm_implementations"


def implementation(name: str):
    """A module of the package's implementations. The package itself wants a GPU and torch, so
    the folders above are made into bare packages."""
    gemm = "cutlass/operators/providers/cutedsl/gemm/implementations"
    root = next(p for p in (Path(q) / gemm for q in sys.path) if p.is_dir())
    operators = root.parents[3]
    bare = {
        PACKAGE: root,
        "cutlass.operators": operators,
        "cutlass.operators.metadata": operators / "metadata",
        "cutlass.operators.metadata.design": operators / "metadata" / "design",
    }
    for package, path in bare.items():
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(path)]
    return importlib.import_module(f"{PACKAGE}.{name}")


def pointer(dtype):
    return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=16)


def matrix(pointer, rows, columns, batches, rows_contiguous):
    """(batches, rows, columns) with one of the last two modes contiguous."""
    if cutlass.const_expr(rows_contiguous):
        stride = (rows * columns, 1, rows)
    else:
        stride = (rows * columns, columns, 1)
    return cute.make_tensor(pointer, cute.make_layout((batches, rows, columns), stride=stride))


def make_gemm(kernel, tile, cluster=(1, 1), two_cta=False, tma_store=True, dynamic=False):
    """kernel: "dense" or "grouped" for sm_100, "hopper"."""
    tile, cluster = tuple(tile), tuple(cluster)
    if kernel == "hopper":
        module = implementation("sm90_static_persistent_impl")
        return module.Sm90StaticPersistentGemmKernel(cutlass.Float32, tile, cluster)
    if kernel == "grouped":
        module = implementation("sm100_contiguous_offset_2d3d_dense_gemm_impl")
        return module.ContiguousOffset2D3DGemmDenseKernel(cutlass.Float32, two_cta, tile, cluster)
    module = implementation("sm100_persistent_impl")
    schedulers = module.PersistentTileSchedulerType
    return module.PersistentDenseGemmKernel(
        cutlass.Float32,
        two_cta,
        tile,
        cluster,
        tma_store,
        schedulers.CLC if dynamic else schedulers.STATIC_PERSISTENT,
        lambda x: x,
    )


def compile_case(arch, kernel, clusters=2, **case):
    """The keyword arguments of make_gemm and of compile_gemm, but for the gemm."""
    ours = ("tile", "cluster", "two_cta", "tma_store", "dynamic")
    gemm = make_gemm(kernel, **{key: case.pop(key) for key in ours if key in case})
    return compile_gemm(arch, gemm, kernel, clusters, **case)


def compile_gemm(
    arch,
    gemm,
    kernel,
    clusters,
    dtype="BFloat16",
    out_dtype="BFloat16",
    a_mn_major=False,
    b_mn_major=False,
    c_mn_major=False,
):
    """clusters: how many the grid has.

    The launcher takes pointers to a, b, c and the ends of groups, then m, n, k, groups.
    """
    dtype, out_dtype = getattr(cutlass, dtype), getattr(cutlass, out_dtype)

    @cute.jit
    def launch(
        a: cute.Pointer,
        b: cute.Pointer,
        c: cute.Pointer,
        ends: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        groups: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        # 16 bytes of the narrowest type.
        n, k = cute.assume(n, divby=16), cute.assume(k, divby=16)
        if cutlass.const_expr(a_mn_major or c_mn_major):
            m = cute.assume(m, divby=16)
        a = matrix(a, m, k, 1, a_mn_major)
        c = matrix(c, m, n, 1, c_mn_major)
        if cutlass.const_expr(kernel == "grouped"):
            ends = cute.make_tensor(ends, cute.make_layout((groups,)))
            gemm(a, matrix(b, k, n, groups, not b_mn_major), c, ends, clusters, stream)
        elif cutlass.const_expr(kernel == "dense"):
            gemm(a, matrix(b, k, n, 1, not b_mn_major), c, stream, clusters)
        else:
            gemm(a, matrix(b, k, n, 1, not b_mn_major), c, clusters, stream)

    return cute.compile(
        launch,
        pointer(dtype),
        pointer(dtype),
        pointer(out_dtype),
        pointer(cutlass.Int32),
        *(4 * [1]),
        cute.runtime.make_fake_stream(),
        options=f"--gpu-arch {arch}",
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from emulator.kernels import save

    arch, folder, cases = sys.argv[1:]
    for name, case in json.loads(cases).items():
        save(compile_case(arch, **case), folder, name, case)
