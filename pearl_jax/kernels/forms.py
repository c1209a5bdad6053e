"""How the operands of the grouped matmul look to the copy engine and the tensor core.

Weights are (g, n, k), k contiguous, or (g, k, n), n contiguous; both are seen as one
tensor (n, k, group), and only the contiguous mode differs. Nothing is transposed or
copied. A stage of weights is (tile.n, tile.k).

Wide requests: the copy engine moves at most 128 contiguous bytes (one span of the
swizzle) of each row of a box. With the contiguous mode written as (64, extent / 64),
a box of rank 4 takes several spans at once, and one request fetches the whole stage.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from pearl_jax.tiling import K_TILE

_SPAN = 64  # elements of 16 bits in the 128 bytes of one swizzle span


def weights_major(spec):
    return OperandMajorMode.K if spec.form == "dgrad" else OperandMajorMode.MN


def weights_tensor(spec, pointer, n, k, num_groups, tile_n):
    """The (n, k, group) tensor, and the tiler that cuts (tile_n, tile.k) out of (n, k)."""
    tile_k = spec.tile.k
    n64, k64 = Int64(n), Int64(k)
    if spec.form == "dgrad" and spec.wide:
        k = cute.assume(k, divby=_SPAN)
        shape, stride = (n, (_SPAN, k // _SPAN), num_groups), (k64, (1, _SPAN), n64 * k64)
        tiler = (tile_n, (_SPAN, tile_k // _SPAN))
    elif spec.form == "dgrad":
        shape, stride, tiler = (n, k, num_groups), (k64, 1, n64 * k64), (tile_n, tile_k)
    elif spec.wide:
        n = cute.assume(n, divby=_SPAN)
        shape, stride = ((_SPAN, n // _SPAN), k, num_groups), ((1, _SPAN), n64, n64 * k64)
        tiler = ((_SPAN, tile_n // _SPAN), tile_k)
    else:
        shape, stride, tiler = (n, k, num_groups), (1, n64, n64 * k64), (tile_n, tile_k)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride)), tiler


def weights_smem_layout(spec, dtype, tile_n, stages):
    """(tile_n, tile.k, stages): spans of the contiguous mode, one panel after the other."""
    if spec.form == "dgrad":
        kind, order = warpgroup.SmemLayoutAtomKind.K_SW128, (0, 1, 2)
    else:
        kind, order = warpgroup.SmemLayoutAtomKind.MN_SW128, (1, 0, 2)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (tile_n, spec.tile.k, stages), order=order)


def tokens_smem_layout(dtype, box_rows, boxes, stages):
    """(box_rows, K_TILE, boxes, stages): one box of rows after the other."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (box_rows, K_TILE, boxes, stages), order=(0, 1, 2, 3))
