"""How the launcher of a kernel is compiled: the host code that ffi calls."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.runtime import make_ptr

from pearl_jax.tiling import KernelSpec

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


def compile_launcher(launcher, spec: KernelSpec, out_align=16):
    """The compiled launcher, to be exported: pointers, integers and the stream.

    The pointers: lhs, rhs, group_sizes, group_offset, batch_index, out, and of an outer product
    those sums that one CTA has for another.
    """
    outer = spec.form == "wgrad"

    def pointer(dtype, align):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        launcher,
        pointer(DTYPES[spec.dtype], 16),
        pointer(DTYPES[spec.dtype], 16),
        *(pointer(cutlass.Int32, 4) for _ in range(3)),
        pointer(DTYPES[spec.out_dtype], out_align),
        *([pointer(Float32, 16)] if outer else []),
        *(cutlass.Int32(1) for _ in range(11 if outer else 9)),
        cuda.CUstream(0),
        options=f"--gpu-arch {spec.arch}",
    )
