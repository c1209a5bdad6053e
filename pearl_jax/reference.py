"""Both primitives in plain XLA, for every platform: the portable implementation.

The work follows the rows that exist: each group is cut into tiles of rows, and each
tile costs one matmul with that group's weights. Nothing is padded to the number of
groups, so the arithmetic is about the useful 2*m*k*n. Beside the output only a few tiles
are held; with large weights also the first tiles of all groups, about as many rows as lhs.

Operands carry leading batch axes that broadcast against each other as in numpy (an
axis of size 1 is shared, never copied). Group sizes are int32 and may hold anything:
negative ones count as 0, and the sum is cut off at m.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax

from pearl_jax import tiling

# Weights are read in pieces of this size: XLA copies what a loop multiplies, so pieces
# bound the memory held, and one that fits the second-level cache is mostly faster.
_PIECE_BYTES = 2**20

# From so many bytes of weights on, the first tiles of all groups are one batched matmul: it uses
# all cores, and copies no weights.
_BATCHED_BYTES = 2**22

# With so few rows a long contraction is a sum over this many parts of it, which XLA fuses with
# the products on a CPU: faster than its matmul (benchmarks/notes/xla_reference.md).
_PARTS, _LEAST_PART, _FEW_ROWS = 8, 128, 16

# A group is first cut into tiles this many times larger, then into the plain ones, so
# that one hot group does not read its weights once for every few rows.
_LARGE_TILE = 8


def accumulator_dtype(lhs_dtype, rhs_dtype, out_dtype):
    """float32, int32 where both operands are integers; 64 bits where one of the three has them."""
    integers = all(jnp.issubdtype(d, jnp.integer) for d in (lhs_dtype, rhs_dtype))
    if any(d.itemsize == 8 for d in (lhs_dtype, rhs_dtype, out_dtype)):
        return jnp.dtype(jnp.int64 if integers else jnp.float64)
    return jnp.dtype(jnp.int32 if integers else jnp.float32)


def group_bounds(group_sizes, group_offset, num_groups, m):
    """Row bounds of groups [offset, offset + num_groups), each between 0 and m.

    (*batch, G) sizes and (*batch,) offsets -> (*batch, num_groups + 1): group i owns
    rows [bounds[i], bounds[i + 1]). Groups that do not exist own no rows.
    """
    sizes = jnp.clip(group_sizes, 0, m).astype(jnp.uint32)
    # Two sizes up to m < 2**31 fit into uint32, so the saturating sum never wraps.
    ends = lax.associative_scan(
        lambda a, b: jnp.minimum(a + b, jnp.asarray(m, jnp.uint32)), sizes, axis=-1
    ).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends], axis=-1)
    last = ends.shape[-1] - 1
    index = jnp.clip(group_offset, -num_groups, last)[..., None] + jnp.arange(num_groups + 1)
    batch = jnp.broadcast_shapes(ends.shape[:-1], index.shape[:-1])
    ends = jnp.broadcast_to(ends, (*batch, last + 1))
    index = jnp.broadcast_to(jnp.clip(index, 0, last), (*batch, num_groups + 1))
    return jnp.take_along_axis(ends, index, axis=-1)


def grouped_matmul(
    lhs, rhs, group_sizes, group_offset, *, transpose_rhs, precision, out_dtype, tile
):
    """(*b, m, k), (*b, g, k, n), (*b, G), (*b,) -> (*b, m, n), see primitives.py."""
    m, k = lhs.shape[-2:]
    g, rhs_rows, n = rhs.shape[-3:]
    if transpose_rhs:
        n = rhs_rows
    batch = batch_shape((lhs, 2), (rhs, 3), (group_sizes, 1), (group_offset, 0))
    acc_dtype = accumulator_dtype(lhs.dtype, rhs.dtype, out_dtype)
    if _is_empty((*batch, m, k, n, g)):
        return jnp.zeros((*batch, m, n), out_dtype)

    bounds = group_bounds(group_sizes, group_offset, g, m)
    dtype = _multiply_dtype(lhs.dtype, rhs.dtype)
    tile = tile or tiling.choose(m, g)
    row_tiles = _row_tiles(m, tile)
    lhs, rows_held = _pad_symbolic(lhs, m, row_tiles)
    piece = min(rhs_rows, max(_PIECE_BYTES // (rhs.shape[-1] * rhs.dtype.itemsize), 1))

    def multiply(x, b, i):
        """One tile of rows times the weights of group i, piece by piece."""

        def add_piece(start, size, acc):
            w = _slice(rhs, b, (i, start, 0), (1, size, rhs.shape[-1]))[0].astype(dtype)
            if transpose_rhs:
                y = _dot(x, w, ((1,), (1,)), precision, acc_dtype)
                return lax.dynamic_update_slice(acc, y, (0, start))
            x_piece = lax.dynamic_slice(x, (0, start), (x.shape[0], size))
            return acc + _dot(x_piece, w, ((1,), (0,)), precision, acc_dtype)

        if piece == rhs_rows and not transpose_rhs:
            return _dot(
                x,
                _slice(rhs, b, (i, 0, 0), (1, k, n))[0].astype(dtype),
                ((1,), (0,)),
                precision,
                acc_dtype,
            )
        acc = jnp.zeros((x.shape[0], n), acc_dtype)
        whole = rhs_rows // piece
        if rhs_rows % piece:
            acc = add_piece(whole * piece, rhs_rows % piece, acc)
        return lax.fori_loop(0, whole, lambda j, acc: add_piece(j * piece, piece, acc), acc)

    def group(item, out):
        *b, i = _unravel(item, (*batch, g))
        start, end = _slice(bounds, b, (i,), (2,))

        def tile_step(rows):
            def step(carry):
                row, out = carry
                first, owned = _tile_rows(row, end, rows, rows_held)
                x = _slice(lhs, b, (first, 0), (rows, k)).astype(dtype)
                # No row is negative. But what depends on the row stays in this loop: the
                # compiler would read the weights ahead of it, of empty groups too.
                y = multiply(x, b, i + (row < 0)).astype(out_dtype)
                old = _slice(out, b, (first, 0), (rows, n))
                return row + rows, _update(out, jnp.where(owned, y, old), b, (first, 0))

            return step

        return _walk(row_tiles, start + done, end, tile_step, out)

    done, out = 0, jnp.zeros((*batch, rows_held, n), out_dtype)
    known = not batch and all(isinstance(d, int) for d in (m, *rhs.shape))
    same = lhs.dtype == rhs.dtype == acc_dtype == out_dtype
    if known and same and _worth_a_batch(rhs, m, row_tiles[-1]):
        # With many empty groups it costs more to read all weights than that saves.
        busy = 4 * jnp.sum(bounds[1:] > bounds[:-1]) >= 3 * g
        done = jnp.where(busy, row_tiles[-1], 0)
        first = functools.partial(_first_tiles, row_tiles[-1], transpose_rhs, precision)
        out = lax.cond(busy, first, lambda *_: out, lhs, rhs, bounds)
    out = lax.fori_loop(0, math.prod(batch) * g, group, out)
    return out[..., :m, :]


def _worth_a_batch(rhs, m, rows):
    """Whether weights are large, and the first tiles of all groups not many more rows than m."""
    return rhs.size * rhs.dtype.itemsize >= _BATCHED_BYTES and len(rhs) * rows <= 2 * m


def _first_tiles(rows, transpose_rhs, precision, lhs, rhs, bounds):
    """(m, k), (g, k, n), (g + 1,) -> (m, n): the first rows of each group, all others 0."""
    m, k = lhs.shape
    g = len(rhs)
    index = bounds[:-1, None] + jnp.arange(rows)
    x = lhs.at[index].get(mode="clip")
    if transpose_rhs:
        y = _dot(x, rhs, ((2,), (2,)), precision, lhs.dtype, batch=((0,), (0,)))
    else:
        split = rows <= _FEW_ROWS and k % _PARTS == 0 and k >= _PARTS * _LEAST_PART
        parts = _PARTS if split else 1
        x, w = x.reshape(g, rows, parts, k // parts), rhs.reshape(g, parts, k // parts, -1)
        y = _dot(x, w, ((3,), (2,)), precision, lhs.dtype, batch=((0, 2), (0, 1))).sum(1)
    where = jnp.where(index < bounds[1:, None], index, m)
    return jnp.zeros((m, y.shape[2]), lhs.dtype).at[where].set(y, mode="drop")


def grouped_outer(
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
    """(*b, m, k), (*b, m, n), (*b, G), (*b,) -> (*b, num_groups, k, n), see primitives.py."""
    if accumulate is not None:
        out = grouped_outer(
            lhs,
            rhs,
            group_sizes,
            group_offset,
            num_groups=num_groups,
            reduce_axes=reduce_axes,
            precision=precision,
            out_dtype=accumulator_dtype(lhs.dtype, rhs.dtype, out_dtype),
            tile=tile,
        )
        return (out + accumulate.astype(out.dtype)).astype(out_dtype)
    m, k = lhs.shape[-2:]
    n = rhs.shape[-1]
    g = num_groups
    batch = batch_shape((lhs, 2), (rhs, 2), (group_sizes, 1), (group_offset, 0))
    out_batch = tuple(1 if i in reduce_axes else d for i, d in enumerate(batch))
    summed = tuple(d if i in reduce_axes else 1 for i, d in enumerate(batch))
    acc_dtype = accumulator_dtype(lhs.dtype, rhs.dtype, out_dtype)
    out_shape = (*out_batch, g, k, n)
    if _is_empty((*batch, m, k, n, g)):
        return jnp.zeros(out_shape, out_dtype)

    bounds = group_bounds(group_sizes, group_offset, g, m)
    tile = tile or tiling.choose(m, g)
    row_tiles = _row_tiles(m, tile)

    done = 0  # rows at the start of each group that `out` holds already
    if not batch and out_dtype == acc_dtype and tile.m * (k + n) <= k * n:
        # One batched matmul over the first tile of every group writes the output in one
        # pass; without it the loop below would have to write it twice, zeros first.
        done = tile.m
        rows = bounds[:-1, None] + jnp.arange(done)
        owned = (rows < bounds[1:, None])[..., None]
        out = _dot(
            jnp.where(owned, lhs.at[rows].get(mode="clip"), 0).astype(acc_dtype),
            jnp.where(owned, rhs.at[rows].get(mode="clip"), 0).astype(acc_dtype),
            ((1,), (1,)), precision, acc_dtype, batch=((0,), (0,)),
        )  # fmt: skip
    else:
        out = jnp.zeros(out_shape, out_dtype)
    lhs, rows_held = _pad_symbolic(lhs, m, row_tiles)
    rhs, _ = _pad_symbolic(rhs, m, row_tiles)

    def group(item, out):
        *out_b, i = _unravel(item, (*out_batch, g))

        def batch_index(j):
            return [a + b for a, b in zip(out_b, _unravel(j, summed))]

        def add_batch(j, acc):
            b = batch_index(j)
            start, end = _slice(bounds, b, (i,), (2,))

            def tile_step(rows):
                def step(carry):
                    row, acc = carry
                    first, owned = _tile_rows(row, end, rows, rows_held)
                    x = jnp.where(owned, _slice(lhs, b, (first, 0), (rows, k)), 0)
                    y = jnp.where(owned, _slice(rhs, b, (first, 0), (rows, n)), 0)
                    x, y = x.astype(acc_dtype), y.astype(acc_dtype)
                    return row + rows, acc + _dot(x, y, ((0,), (0,)), precision, acc_dtype)

                return step

            return _walk(row_tiles, start + done, end, tile_step, acc)

        def rewrite(carry):
            _, out = carry
            acc = _slice(out, out_b, (i, 0, 0), (1, k, n))[0].astype(acc_dtype)
            acc = lax.fori_loop(0, math.prod(summed), add_batch, acc)
            return False, _update(out, acc.astype(out_dtype)[None], out_b, (i, 0, 0))

        # A loop of no or one step, where a conditional would copy `out`: groups that
        # have no rows left are not touched again.
        left = jnp.asarray(math.prod(summed) > 1)
        if math.prod(summed) == 1:
            start, end = _slice(bounds, batch_index(0), (i,), (2,))
            left = start + done < end
        return lax.while_loop(lambda carry: carry[0], rewrite, (left, out))[1]

    return lax.fori_loop(0, math.prod(out_batch) * g, group, out)


def batch_shape(*operands_and_ranks):
    """The common batch axes of arrays or avals, each given with the rank of one entry."""
    return jnp.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in operands_and_ranks))


def _is_empty(shape):
    return any(isinstance(d, int) and d == 0 for d in shape)


def _multiply_dtype(lhs_dtype, rhs_dtype):
    """The narrowest dtype that holds both operands exactly."""
    if lhs_dtype == rhs_dtype:
        return lhs_dtype
    # Every float8 value is a bfloat16 value; jax.numpy promotes no float8 by itself.
    widened = (jnp.bfloat16 if jnp.dtype(d).name.startswith("float8") else d
               for d in (lhs_dtype, rhs_dtype))  # fmt: skip
    return jnp.promote_types(*widened)


def _dot(x, y, contract, precision, dtype, batch=((), ())):
    return lax.dot_general(
        x, y, (contract, batch), precision=precision, preferred_element_type=dtype
    )


def _row_tiles(m, tile):
    """Rows of a large and of a plain tile; neither is larger than the matrix."""
    tiles = (_LARGE_TILE * tile.m, tile.m)
    if not isinstance(m, int):
        return tiles
    return tuple(rows for rows in tiles[:1] if rows <= m) + (min(tile.m, m),)


def _pad_symbolic(x, m, row_tiles):
    """Makes room for one tile where m, being symbolic, might be smaller than it."""
    if isinstance(m, int):
        return x, m
    rows = max(row_tiles)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, 0)]), m + rows


def _walk(row_tiles, start, end, tile_step, state):
    """Runs over rows [start, end): whole large tiles first, then plain ones."""
    carry = (start, state)
    *large, plain = row_tiles
    if large:
        carry = lax.while_loop(lambda c: c[0] + large[0] <= end, tile_step(large[0]), carry)
    return lax.while_loop(lambda c: c[0] < end, tile_step(plain), carry)[1]


def _tile_rows(row, end, rows, rows_held):
    """First row of the tile, moved up where it would leave the matrix, and which rows count."""
    first = jnp.minimum(row, rows_held - rows)
    index = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return first, (index >= row) & (index < end)


def _unravel(item, shape):
    """Like numpy's unravel_index for a traced item; axes of size 1 cost nothing."""
    index = []
    for d in reversed(shape):
        index.append(0 if isinstance(d, int) and d == 1 else item % d)
        item = item // d
    return index[::-1]


def _starts(x, batch_index, starts):
    """Where a block of one batch entry starts; an axis of size 1 serves the whole batch."""
    batch_index = [0 if d == 1 else b for d, b in zip(x.shape, batch_index)]
    return [jnp.asarray(i, jnp.int32) for i in (*batch_index, *starts)]


def _slice(x, batch_index, starts, sizes):
    block_shape = (1,) * len(batch_index) + tuple(sizes)
    return lax.dynamic_slice(x, _starts(x, batch_index, starts), block_shape).reshape(sizes)


def _update(x, block, batch_index, starts):
    block = block.reshape((1,) * len(batch_index) + block.shape)
    return lax.dynamic_update_slice(x, block, _starts(x, batch_index, starts))
