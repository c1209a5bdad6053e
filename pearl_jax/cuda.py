"""The grouped matmul as a call of a compiled kernel, where there is one for it.

What no kernel takes runs in plain XLA instead, and the log says so once, with the
reason; asked for by implementation="cuda" it is an error.
"""

from __future__ import annotations

import functools
import logging
import math

import jax
import jax.numpy as jnp
from jax import lax

from pearl_jax import library, reference, tiling

_log = logging.getLogger(__name__)

# The compilation target for each member of the attribute "kernels".
_ARCHS = {"sm_90": "sm_90a", "sm_100": "sm_100f"}

_ALIGNMENT = 8  # elements: the copy engine wants rows of a multiple of 16 bytes

# What is asked for by these is exactly what the kernels do: 16-bit products, which
# float32 holds without rounding, added up in float32.
_EXACT_PRESETS = {
    "bfloat16": (lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.BF16_BF16_F32),
    "float16": (lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.F16_F16_F32),
}


def grouped_matmul(lhs, rhs, group_sizes, group_offset, *, implementation, **params):
    """As reference.grouped_matmul, on a CUDA device."""
    reason = _obstacle(lhs, rhs, group_sizes, group_offset, **params)
    if reason is None:
        return _call(lhs, rhs, group_sizes, group_offset, **params)
    if implementation == "cuda":
        raise ValueError(f"grouped_matmul: implementation='cuda' cannot run, {reason}")
    log_once("grouped_matmul", reason)
    return reference.grouped_matmul(lhs, rhs, group_sizes, group_offset, **params)


def grouped_outer(*operands, implementation, **params):
    """As reference.grouped_outer, on a CUDA device: it has no kernels."""
    log_once("grouped_outer", "it has no kernels yet")
    return reference.grouped_outer(*operands, **params)


@functools.cache
def log_once(op, reason):
    """Says once that plain XLA runs on the GPU, and why."""
    _log.warning("pearl_jax: %s runs in plain XLA on the GPU: %s", op, reason)


def unsupported(lhs_dtype, rhs_dtype, out_dtype, precision):
    """Why no kernel multiplies these dtypes, or None."""
    name = lhs_dtype.name
    if lhs_dtype != rhs_dtype or name not in _EXACT_PRESETS or out_dtype.itemsize > 4:
        return (
            f"its kernels take lhs and rhs both bfloat16 or both float16 and add up in float32, "
            f"got {name} and {rhs_dtype.name} with a result of {out_dtype.name}"
        )
    exact = (lax.Precision, tuple, type(None))
    if not isinstance(precision, exact) and precision not in _EXACT_PRESETS[name]:
        return f"its kernels do not compute {name} with precision {precision}"
    return None


def _obstacle(lhs, rhs, group_sizes, group_offset, *, transpose_rhs, precision, out_dtype, tile):
    form = tiling.matmul_form(transpose_rhs)
    tiles = {arch: tiling.tiles(arch, form) for arch in _ARCHS.values()}
    if tile is not None and not any(tile in some for some in tiles.values()):
        layout = "(g, n, k)" if transpose_rhs else "(g, k, n)"
        return f"its kernels for rhs {layout} have the tiles {tiles}, got {tile!r}"
    if not all(isinstance(d, int) for d in lhs.shape + rhs.shape):
        return f"its kernels need constant shapes, got lhs {lhs.shape} and rhs {rhs.shape}"
    batch = reference.batch_shape((lhs, 2), (rhs, 3), (group_sizes, 1), (group_offset, 0))
    if (rows := math.prod(batch) * lhs.shape[-2]) >= 2**31:
        return f"its kernels count fewer than 2**31 rows over all batches, got {rows}"
    return unsupported(lhs.dtype, rhs.dtype, out_dtype, precision) or library.unavailable()


def _call(lhs, rhs, group_sizes, group_offset, *, transpose_rhs, precision, out_dtype, tile):
    (m, k), g = lhs.shape[-2:], rhs.shape[-3]
    n = rhs.shape[-2] if transpose_rhs else rhs.shape[-1]
    batch = reference.batch_shape((lhs, 2), (rhs, 3), (group_sizes, 1), (group_offset, 0))
    if 0 in (*batch, m, k, n, g):
        return jnp.zeros((*batch, m, n), out_dtype)

    pad_k, pad_n = -k % _ALIGNMENT, -n % _ALIGNMENT
    if pad_k or pad_n:
        log_padding(k, n)
        lhs = _pad(lhs, 0, pad_k)
        rhs = _pad(rhs, pad_n, pad_k) if transpose_rhs else _pad(rhs, pad_k, pad_n)

    kernel_dtype = out_dtype if out_dtype == lhs.dtype else jnp.dtype(jnp.float32)
    form, num_sizes = tiling.matmul_form(transpose_rhs), group_sizes.shape[-1]

    def kernel_name(arch):
        """The kernel for GPUs of arch; none if the tile is one for others."""
        chosen = tile or tiling.choose_kernel_tile(arch, form, m, n, num_sizes)
        if chosen not in tiling.tiles(arch, form):
            return ""
        dtypes = lhs.dtype.name, kernel_dtype.name
        return tiling.kernel(arch, form, *dtypes, k + pad_k, n + pad_n, chosen).name

    operands = (lhs, 2), (rhs, 3), (group_sizes, 1), (group_offset, 0)
    library.ensure_registered()
    out = jax.ffi.ffi_call(
        library.TARGET,
        jax.ShapeDtypeStruct((math.prod(batch), m, n + pad_n), kernel_dtype),
    )(
        *(_flatten(x, core) for x, core in operands),
        _batch_index(batch, *operands),
        kernels={member: kernel_name(arch) for member, arch in _ARCHS.items()},
    )
    return out[..., :n].reshape(*batch, m, n).astype(out_dtype)


@functools.cache
def log_padding(k, n):
    _log.warning(
        "pearl_jax: grouped_matmul copies its operands on the GPU: k and n must be multiples of %d "
        "to be read in place, got k = %d and n = %d",
        _ALIGNMENT,
        k,
        n,
    )


def _pad(x, rows, columns):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, columns)])


def _flatten(x, core):
    """All batch axes as one."""
    batch = x.shape[: x.ndim - core]
    return x.reshape(math.prod(batch), *x.shape[x.ndim - core :])


def _batch_index(batch, *operands):
    """(number of batches, operands) int32: which flat batch of an operand a flat batch takes."""

    def index(x, core):
        own = x.shape[: x.ndim - core]
        own = (1,) * (len(batch) - len(own)) + own
        flat = jnp.arange(math.prod(own), dtype=jnp.int32).reshape(own)
        return jnp.broadcast_to(flat, batch).reshape(-1)

    return jnp.stack([index(x, core) for x, core in operands], axis=-1)
