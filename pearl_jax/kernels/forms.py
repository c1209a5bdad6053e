"""How the operands of the grouped matmul look to the copy engine and the tensor core.

Weights are (g, n, k), k contiguous, or (g, k, n), n contiguous; both are seen as one
tensor (n, k, group), and only the contiguous mode differs. Nothing is transposed or
copied. A stage of weights is (tiling.stage_columns, tile.k).

Wide requests: the copy engine moves at most 128 contiguous bytes (one span of the
swizzle) of each row of a box. With the contiguous mode written as (64, extent / 64),
a box of rank 4 takes several spans at once, and one request fetches the whole stage.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from pearl_jax.tiling import K_TILE

_SPAN = 64  # elements of 16 bits in the 128 bytes of one swizzle span


def weights_major(spec):
    return OperandMajorMode.K if spec.form == "dgrad" else OperandMajorMode.MN


def smem_layout(major, dtype, shape):
    """(rows, columns, stages): spans of the contiguous mode, one panel after the other."""
    if major is OperandMajorMode.K:
        kind, order = warpgroup.SmemLayoutAtomKind.K_SW128, (0, 1, 2)
    else:
        kind, order = warpgroup.SmemLayoutAtomKind.MN_SW128, (1, 0, 2)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=order)


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


def weights_map(spec, pointer, shape, columns, stages, load):
    """How the copy engine reads weights: its atom, their tensor, shared memory, and the tiler.

    shape: (n, k, groups); a stage is (columns, tile.k); load: the kind of request.
    """
    tensor, tiler = weights_tensor(spec, pointer, *shape, columns)
    smem = smem_layout(weights_major(spec), pointer.dtype, (columns, spec.tile.k, stages))
    stage = cute.slice_(smem, (None, None, 0))
    atom, tensor = cpasync.make_tiled_tma_atom(load, tensor, stage, tiler)
    return atom, tensor, smem, tiler


# Of all bytes, as createpolicy.fractional.L2::evict_first encodes it; CUTLASS has it as
# TMA::CacheHintSm90::EVICT_FIRST.
_EVICT_FIRST = 0x12F0000000000000


def cache_policy(evict_first):
    """How long the L2 cache keeps what is copied, as an argument of the copy."""
    return {"cache_policy": Int64(_EVICT_FIRST)} if evict_first else {}


def tokens_map(pointer, shape, box_rows, boxes, stages, load):
    """The same for rows of lhs, shape (rows, k), without a tiler.

    A stage is boxes of (box_rows, K_TILE), one after the other, each of one request.
    """
    rows, k = shape
    tensor = cute.make_tensor(pointer, cute.make_layout((rows, k), stride=(Int64(k), 1)))
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, pointer.dtype)
    smem = cute.tile_to_shape(atom, (box_rows, K_TILE, boxes, stages), order=(0, 1, 2, 3))
    box = cute.slice_(smem, (None, None, 0, 0))
    atom, tensor = cpasync.make_tiled_tma_atom(load, tensor, box, (box_rows, K_TILE))
    return atom, tensor, smem


# Rows of a group, and no others, for sums over rows. The copy engine fills what lies past
# the end of a tensor with zeros, so each group needs a tensor that ends with it. One map
# serves them all: its rows have three coordinates (row, end, wrap), and the address of

#   (_ROWS - left + i, first + left, _ROWS)    is that of row first + i,

# since _ROWS of the last stride are 2**64 bytes less _ROWS rows, and addresses wrap around.
# Of the rows from `first` on, the first `left` then lie inside and all others are zeros.
_ROWS = 2**30


def ragged_tensor(pointer, rows, columns, wide, tile):
    """The (column, row) tensor of rows of groups, and the tiler that cuts out a stage.

    rows: of the tensor in memory; tile: (columns, rows) of a stage.
    """
    size = pointer.dtype.width // 8
    stride = Int64(columns)
    shape, strides, tiler = columns, 1, tile[0]
    if wide:
        columns = cute.assume(columns, divby=_SPAN)
        shape, strides, tiler = (_SPAN, columns // _SPAN), (1, _SPAN), (_SPAN, tile[0] // _SPAN)
    layout = cute.make_layout(
        (shape, (_ROWS, rows + 1, _ROWS + 1)),
        stride=(strides, (stride, stride, 2**64 // _ROWS // size - stride)),
    )
    return cute.make_tensor(pointer, layout), (tiler, (tile[1], 1, 1))


def ragged_map(pointer, shape, wide, tile, stages, load):
    """How the copy engine reads rows of groups: as weights_map.

    shape: (rows, columns); a stage is tile, (columns, rows), and its columns are contiguous.
    """
    tensor, tiler = ragged_tensor(pointer, *shape, wide, tile)
    smem = smem_layout(OperandMajorMode.MN, pointer.dtype, (*tile, stages))
    stage = cute.slice_(smem, (None, None, 0))
    atom, tensor = cpasync.make_tiled_tma_atom(load, tensor, stage, tiler)
    return atom, tensor, smem, tiler


def ragged_tile(tensor, tiler, column_tile, first, left):
    """One stage of ragged_tensor: rows first on, of which left are there, at most a tile's."""
    here = cutlass.min(left, tiler[1][0])
    columns = (0, 0) if isinstance(tiler[0], tuple) else 0
    rows = (_ROWS - here, first + here, Int32(_ROWS))
    return cute.local_tile(cute.domain_offset((columns, rows), tensor), tiler, (column_tile, 0))
