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

from pearl_jax import library, reference, tiling, tuned

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


def grouped_matmul(*operands, implementation, transpose_rhs, **params):
    """As reference.grouped_matmul, on a CUDA device."""
    reason = _obstacle(tiling.matmul_form(transpose_rhs), operands, **params)
    if reason is None:
        return _matmul(*operands, transpose_rhs=transpose_rhs, **params)
    _fall_back("grouped_matmul", reason, implementation)
    return reference.grouped_matmul(*operands, transpose_rhs=transpose_rhs, **params)


def grouped_outer(*operands, implementation, **params):
    """As reference.grouped_outer, on a CUDA device."""
    reason = _obstacle("wgrad", operands, **params)
    if reason is None:
        return _outer(*operands, **params)
    _fall_back("grouped_outer", reason, implementation)
    return reference.grouped_outer(*operands, **params)


def _fall_back(op, reason, implementation):
    if implementation == "cuda":
        raise ValueError(f"{op}: implementation='cuda' cannot run, {reason}")
    log_once(op, reason)


@functools.cache
def log_once(op, reason):
    """Says once that plain XLA runs on the GPU, and why."""
    _log.warning("pearl_jax: %s runs in plain XLA on the GPU: %s", op, reason)


def unsupported(lhs_dtype, rhs_dtype, out_dtype, precision):
    """Why no kernel multiplies these dtypes, or None."""
    names = {lhs_dtype.name, rhs_dtype.name}
    split = names == {"bfloat16", "float32"}
    if not (split or (len(names) == 1 and names <= set(_EXACT_PRESETS))) or out_dtype.itemsize > 4:
        return (
            f"its kernels take lhs and rhs both bfloat16 or both float16, or one bfloat16 and the "
            f"other float32, and add up in float32, got {lhs_dtype.name} and {rhs_dtype.name} with "
            f"a result of {out_dtype.name}"
        )
    exact = (lax.Precision, tuple, type(None))
    if isinstance(precision, exact) or (not split and precision in _EXACT_PRESETS[lhs_dtype.name]):
        return None
    return f"its kernels do not compute {lhs_dtype.name} with precision {precision}"


_LAYOUTS = {"fwd": " for rhs (g, k, n)", "dgrad": " for rhs (g, n, k)", "wgrad": ""}


def _obstacle(form, operands, *, precision, out_dtype, tile, **_):
    lhs, rhs, *_ = operands
    if tile is not None:
        tiles = {arch: library.tiles(arch, form) for arch in _ARCHS.values()}
        if not any(tile in some for some in tiles.values()):
            return f"its kernels{_LAYOUTS[form]} have the tiles {tiles}, got {tile!r}"
    if not all(isinstance(d, int) for d in lhs.shape + rhs.shape):
        return f"its kernels need constant shapes, got lhs {lhs.shape} and rhs {rhs.shape}"
    batch = reference.batch_shape(*_with_ranks(operands, 2 if form == "wgrad" else 3))
    if (rows := math.prod(batch) * lhs.shape[-2]) >= 2**31:
        return f"its kernels count fewer than 2**31 rows over all batches, got {rows}"
    return unsupported(lhs.dtype, rhs.dtype, out_dtype, precision) or library.unavailable()


def _with_ranks(operands, rhs_rank):
    """lhs, rhs, group_sizes, group_offset and accumulate, each with its axes but the batch's."""
    return list(zip(operands, (2, rhs_rank, 1, 0, 3)))


def _matmul(lhs, rhs, group_sizes, group_offset, *, transpose_rhs, precision, out_dtype, tile):
    (m, k), g = lhs.shape[-2:], rhs.shape[-3]
    n = rhs.shape[-2] if transpose_rhs else rhs.shape[-1]
    operands = _with_ranks((lhs, rhs, group_sizes, group_offset), 3)
    batch = reference.batch_shape(*operands)
    if 0 in (*batch, m, k, n, g):
        return jnp.zeros((*batch, m, n), out_dtype)

    pad_k, pad_n = _padding("grouped_matmul", k, n)
    lhs = _pad(lhs, 0, pad_k)
    rhs = _pad(rhs, pad_n, pad_k) if transpose_rhs else _pad(rhs, pad_k, pad_n)
    form, num_sizes = tiling.matmul_form(transpose_rhs), group_sizes.shape[-1]
    dtype, kernel_out = _kernel_dtypes(lhs, rhs, out_dtype)
    # Of the groups at hand, in all batches: their share of the rows.
    here = math.prod(batch) * m * g // num_sizes
    choose = lambda arch, has: tuned.choose(arch, form, here, k, n, math.prod(batch) * g, has)
    kernels = _kernels(form, dtype, kernel_out, k + pad_k, n + pad_n, tile, choose)
    shape = (math.prod(batch), m, n + pad_n)
    call = _ffi_call("grouped_matmul", kernels, jax.ShapeDtypeStruct(shape, kernel_out))
    index = _batch_index(batch, operands)
    groups = _flatten(group_sizes, 1), _flatten(group_offset, 0)
    products = [
        call(_flatten(a, 2), _flatten(b, 3), *groups, index)
        for a in _parts(lhs, dtype, precision)
        for b in _parts(rhs, dtype, precision)
    ]
    out = functools.reduce(jnp.add, products)
    return out[..., :n].reshape(*batch, m, n).astype(out_dtype)


def _outer(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    accumulate=None,
    *,
    num_groups,
    reduce_axes,
    precision,
    out_dtype,
    tile,
):
    (m, k), n = lhs.shape[-2:], rhs.shape[-1]
    given = (lhs, rhs, group_sizes, group_offset)
    given += () if accumulate is None else (accumulate,)
    operands = _with_ranks(given, 2)
    batch = reference.batch_shape(*operands)
    out_batch = tuple(1 if i in reduce_axes else d for i, d in enumerate(batch))
    out_shape = (*out_batch, num_groups, k, n)
    if accumulate is not None:
        accumulate = jnp.broadcast_to(accumulate, out_shape)
    if 0 in (*batch, m, k, n, num_groups):
        return jnp.zeros(out_shape, out_dtype) if accumulate is None else accumulate

    pad_k, pad_n = _padding("grouped_outer", k, n)
    lhs, rhs = _pad(lhs, 0, pad_k), _pad(rhs, 0, pad_n)
    dtype, kernel_out = _kernel_dtypes(lhs, rhs, out_dtype)
    products = math.prod(out_batch) * num_groups
    here = math.prod(batch) * m * num_groups // max(group_sizes.shape[-1], 1)
    choose = lambda arch, has: tuned.choose(arch, "wgrad", here, k, n, products, has)
    kernels = _kernels("wgrad", dtype, kernel_out, k + pad_k, n + pad_n, tile, choose)
    shape = (math.prod(out_batch), num_groups, k + pad_k, n + pad_n)
    # One more result, which nobody reads, is the kernel's to keep sums in.
    partial_sums = max(map(tiling.partial_sums, kernels.values()), default=0)
    results = (
        jax.ShapeDtypeStruct(shape, kernel_out),
        jax.ShapeDtypeStruct((partial_sums,), jnp.float32),
    )
    index = _batch_index(batch, operands[:4], reduce_axes)
    groups = _flatten(group_sizes, 1), _flatten(group_offset, 0)
    # What is added to comes as one more operand, whose memory becomes the result's.
    old = []
    if accumulate is not None:
        old = [_flatten(_pad(accumulate, pad_k, pad_n), 3).astype(kernel_out)]
    for a in _parts(lhs, dtype, precision):
        for b in _parts(rhs, dtype, precision):
            aliases = {5: 0} if old else {}
            call = _ffi_call("grouped_outer", kernels, results, input_output_aliases=aliases)
            out, _ = call(_flatten(a, 2), _flatten(b, 2), *groups, index, *old)
            old = [out]
    return old[0][..., :k, :n].reshape(out_shape).astype(out_dtype)


def _kernels(form, dtype, out_dtype, k, n, tile, choose):
    """The kernel for each architecture, where one has the tile."""

    def choice(arch):
        def kernel(tile):
            return tiling.kernel(arch, form, dtype.name, out_dtype.name, k, n, tile)

        if tile is not None:
            return kernel(tile) if tile in library.tiles(arch, form) else None
        return kernel(choose(arch, lambda tile: library.has(kernel(tile))))

    return {member: spec for member, arch in _ARCHS.items() if (spec := choice(arch))}


def _ffi_call(op, kernels, result, **options):
    library.ensure_registered()
    call = jax.ffi.ffi_call(library.TARGETS[op], result, **options)
    names = {member: kernels[member].name if member in kernels else "" for member in _ARCHS}
    return functools.partial(call, kernels=names)


def _kernel_dtypes(lhs, rhs, out_dtype):
    """The 16-bit dtype of the products, and that of a kernel's result."""
    dtype = lhs.dtype if lhs.dtype.itemsize == 2 else rhs.dtype
    same = out_dtype == lhs.dtype == rhs.dtype
    return dtype, out_dtype if same else jnp.dtype(jnp.float32)


def _parts(x, dtype, precision):
    """Arrays of dtype whose sum is x, the smallest first: x itself unless it is float32.

    Of float32, two bfloat16 leave 2**-17 of a value away, far less than the TF32 that
    default precision allows; for the highest precision there are three, which leave nothing.
    """
    if x.dtype == dtype:
        return [x]
    highest = lax.Precision.HIGHEST
    count = 3 if highest in (precision if isinstance(precision, tuple) else (precision,)) else 2
    parts = []
    for _ in range(count):
        # Not finite: all of it is in the first part, or its rest would be NaN.
        part = lax.reduce_precision(x, 8, 7)
        parts.insert(0, part.astype(dtype))
        x = jnp.where(jnp.isfinite(part), x - part, 0)
    return parts


def _padding(op, k, n):
    padding = -k % _ALIGNMENT, -n % _ALIGNMENT
    if any(padding):
        log_padding(op, k, n)
    return padding


@functools.cache
def log_padding(op, k, n):
    _log.warning(
        "pearl_jax: %s copies its operands on the GPU: k and n must be multiples of %d "
        "to be read in place, got k = %d and n = %d",
        op,
        _ALIGNMENT,
        k,
        n,
    )


def _pad(x, rows, columns):
    if rows == columns == 0:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, columns)])


def _flatten(x, core):
    """All batch axes as one."""
    batch = x.shape[: x.ndim - core]
    return x.reshape(math.prod(batch), *x.shape[x.ndim - core :])


def _batch_index(batch, operands, reduce_axes=()):
    """(number of batches, operands) int32: which flat batch of an operand a flat batch takes.

    Batches that are summed are consecutive.
    """
    kept = tuple(i for i in range(len(batch)) if i not in reduce_axes)

    def index(x, core):
        own = x.shape[: x.ndim - core]
        own = (1,) * (len(batch) - len(own)) + own
        flat = jnp.arange(math.prod(own), dtype=jnp.int32).reshape(own)
        return jnp.broadcast_to(flat, batch).transpose(*kept, *reduce_axes).reshape(-1)

    return jnp.stack([index(x, core) for x, core in operands], axis=-1)
