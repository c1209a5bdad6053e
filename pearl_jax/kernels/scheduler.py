"""Which work tile comes next: a walk over groups whose sizes only the device knows.

Work tiles are numbered by batch, group, column tile and, fastest, row tile, so that the
row tiles of one group read the same weights at about the same time. Cluster c takes the
tiles c, c + clusters, c + 2 clusters and so on; each of its CTAs one column tile of it.
The last round has fewer tiles than clusters: their rows are dealt out to all of them. Every warp that needs the tiles walks by itself:
its 32 lanes hold 32 groups at a time, and one ballot finds the group of a tile.

Negative sizes count as 0, and the sum is cut off at m.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.base_dsl.native_struct import native_struct

from pearl_jax.tiling import TileConfig

_LANES = 32

# All tiles of a group but the last have a multiple of this many rows.
ROW_ALIGN = 16

# What remains after the last round in which every cluster gets a tile is split by rows
# into this many parts a tile, for tiles of so many rows that splitting pays.
_PARTS = 16
_SPLIT_ROWS = 128


@native_struct
class WorkTile:
    """Rows [row, row + rows) of one batch times columns [column, ...) of one group."""

    valid: Boolean
    lhs_batch: Int32
    out_batch: Int32
    group: Int32  # of rhs, counted over all its batches
    row: Int32
    rows: Int32
    column: Int32


@native_struct
class Chunk:
    """32 groups of one batch, the lane's own in the fields that begin with "lane"."""

    index: Int32  # of the chunk, over all batches
    first_tile: Int32  # tiles before this chunk
    num_tiles: Int32  # tiles of this chunk
    end_row: Int32  # rows of the batch up to the end of this chunk
    lhs_batch: Int32
    out_batch: Int32
    lane_group: Int32  # of rhs
    lane_row: Int32
    lane_rows: Int32
    lane_end_tile: Int32  # tiles of the chunk up to the end of the lane's group


@native_struct
class Bounds:
    """Rows [first, last) of a batch belong to groups that rhs holds."""

    first: Int32
    last: Int32


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The work tiles of a problem, as one warp walks over them.

    group_sizes (.., num_sizes), group_offset (..), and batch_index (num_batches, 4): which
    batch of lhs, rhs, group_sizes and group_offset a batch of the result uses.
    """

    group_sizes: cute.Pointer
    group_offset: cute.Pointer
    batch_index: cute.Pointer
    m: Int32
    n: Int32
    num_groups: Int32  # of rhs
    num_sizes: Int32
    num_batches: Int32
    tile: TileConfig

    def _column_tiles(self):
        return cute.ceil_div(self.n, self.tile.n * self.tile.cluster)

    def rank(self):
        return cute.arch.block_idx_in_cluster() if self.tile.cluster > 1 else 0

    def _cluster(self):
        return cute.arch.block_idx()[0] // self.tile.cluster

    def _clusters(self):
        return cute.arch.grid_dim()[0] // self.tile.cluster

    def _chunks_per_batch(self):
        return cute.ceil_div(self.num_sizes, _LANES)

    @cute.jit
    def _batch(self, batch: Int32, operand: cutlass.Constexpr[int]) -> Int32:
        index = Int32(0)
        if self.num_batches > 1:
            index = self.batch_index[batch * 4 + operand]
        return index

    @cute.jit
    def _offset(self, batch: Int32) -> Int32:
        # Clamped, so that no difference with a group's index can wrap around.
        offset = cutlass.max(self.group_offset[self._batch(batch, 3)], -self.num_groups)
        return cutlass.min(offset, self.num_sizes)

    @cute.jit
    def _end_row(self, batch: Int32, group: Int32, row: Int32) -> Int32:
        """Rows of the batch up to the end of the lane's group, row of them before lane 0."""
        size = Int32(0)
        if group < self.num_sizes:
            size = self.group_sizes[self._batch(batch, 2) * self.num_sizes + group]
        end = cutlass.min(cutlass.max(size, 0), self.m)
        lane = cute.arch.lane_idx()
        # Two values up to m < 2**31 fit into 32 unsigned bits: a saturating sum never wraps.
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(end, 1 << step)
            if lane >= (1 << step):
                end = self._saturating_add(end, before)
        return self._saturating_add(end, row)

    @cute.jit
    def _saturating_add(self, a: Int32, b: Int32) -> Int32:
        return Int32(cutlass.min(Uint32(a) + Uint32(b), Uint32(self.m)))

    @cute.jit
    def bounds(self, batch: Int32) -> Bounds:
        """The rows whose groups rhs holds: the result is 0 in all others."""
        first, last, row = Int32(0), Int32(0), Int32(0)
        offset = self._offset(batch)
        lane = cute.arch.lane_idx()
        for c in range(self._chunks_per_batch()):
            group = c * _LANES + lane
            end = self._end_row(batch, group, row)
            before = end if group < offset else Int32(0)
            upto = end if group < offset + self.num_groups else Int32(0)
            first = cutlass.max(first, cute.arch.warp_redux_sync(before, "max"))
            last = cutlass.max(last, cute.arch.warp_redux_sync(upto, "max"))
            row = cute.arch.shuffle_sync(end, _LANES - 1)
        return Bounds(first=first, last=last)

    @cute.jit
    def _load(self, index: Int32, first_tile: Int32, row: Int32) -> Chunk:
        """Chunk number index, with first_tile tiles before it, its batch's rows from row on."""
        batch = index // self._chunks_per_batch()
        in_batch = index % self._chunks_per_batch()
        if in_batch == 0:
            row = Int32(0)
        lane = cute.arch.lane_idx()
        group = in_batch * _LANES + lane
        end = self._end_row(batch, group, row)
        start = cute.arch.shuffle_sync_up(end, 1)
        if lane == 0:
            start = row
        owned = group - self._offset(batch)
        tiles = Int32(0)
        if owned >= 0 and owned < self.num_groups:
            tiles = cute.ceil_div(end - start, self.tile.m) * self._column_tiles()
        end_tile = tiles
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(end_tile, 1 << step)
            if lane >= (1 << step):
                end_tile += before
        return Chunk(
            index=index,
            first_tile=first_tile,
            num_tiles=cute.arch.shuffle_sync(end_tile, _LANES - 1),
            end_row=cute.arch.shuffle_sync(end, _LANES - 1),
            lhs_batch=self._batch(batch, 0),
            out_batch=batch,
            lane_group=self._batch(batch, 1) * self.num_groups + owned,
            lane_row=start,
            lane_rows=end - start,
            lane_end_tile=end_tile,
        )

    @cute.jit
    def start(self):
        """The chunk from which a walk starts, and the number of tiles if it matters."""
        num_tiles, index, row = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(self._splits()):
            while index <= self._last_chunk():
                chunk = self._load(index, num_tiles, row)
                num_tiles += chunk.num_tiles
                row = chunk.end_row
                index += 1
        return self._load(Int32(0), Int32(0), Int32(0)), num_tiles

    def _last_chunk(self):
        return self._chunks_per_batch() * self.num_batches - 1

    @cute.jit
    def _next(self, chunk: Chunk) -> Chunk:
        return self._load(chunk.index + 1, chunk.first_tile + chunk.num_tiles, chunk.end_row)

    def _splits(self):
        return self.tile.m >= _SPLIT_ROWS

    @cute.jit
    def _share(self, i: Int32, num_tiles: Int32):
        """Share i of this cluster: a tile, and which of its parts, [begin, end)."""
        tile, begin, end = self._cluster() + i * self._clusters(), Int32(0), Int32(_PARTS)
        if cutlass.const_expr(self._splits()):
            left = num_tiles % self._clusters()
            whole = num_tiles - left
            if tile >= whole:
                # All parts of the tiles that are left, in order, are dealt out evenly. Those
                # of a cluster lie in one tile, its first share, or run on into the next.
                begin = self._cluster() * left * _PARTS // self._clusters()
                end = (self._cluster() + 1) * left * _PARTS // self._clusters()
                tile = whole + begin // _PARTS
                border = (begin // _PARTS + 1) * _PARTS
                if i * self._clusters() == whole:
                    end = cutlass.min(end, border)
                elif i * self._clusters() == whole + self._clusters():
                    begin = border
                    tile += 1
                else:
                    end = begin
                begin -= (tile - whole) * _PARTS
                end -= (tile - whole) * _PARTS
        return tile, begin, end

    @cute.jit
    def find(self, chunk: Chunk, num_tiles: Int32, i: Int32):
        """Share i of the work of this cluster, and its chunk; i must not go down."""
        tile, begin, end = self._share(i, num_tiles)
        while tile >= chunk.first_tile + chunk.num_tiles and chunk.index < self._last_chunk():
            chunk = self._next(chunk)

        local = tile - chunk.first_tile
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(local >= chunk.lane_end_tile))
        lane = cutlass.min(passed, _LANES - 1)  # the first whose end lies past the tile
        rows = cute.arch.shuffle_sync(chunk.lane_rows, lane)
        row_tiles = cutlass.max(cute.ceil_div(rows, self.tile.m), 1)
        local -= cute.arch.shuffle_sync(chunk.lane_end_tile, lane) - row_tiles * self._column_tiles()
        column_tile = local // row_tiles
        # Row tiles of about the same size, so that none is nearly empty.
        step = cute.round_up(cute.ceil_div(rows, row_tiles), ROW_ALIGN)
        first = (local - column_tile * row_tiles) * step
        rows = cutlass.min(rows - first, step)
        if cutlass.const_expr(self._splits()):
            skipped = self._rows_before(rows, begin)
            rows = self._rows_before(rows, end) - skipped
            first += skipped
        work = WorkTile(
            valid=passed < _LANES and begin < end,
            lhs_batch=chunk.lhs_batch,
            out_batch=chunk.out_batch,
            group=cute.arch.shuffle_sync(chunk.lane_group, lane),
            row=cute.arch.shuffle_sync(chunk.lane_row, lane) + first,
            rows=rows,
            column=(column_tile * self.tile.cluster + self.rank()) * self.tile.n,
        )
        return chunk, work

    def _rows_before(self, rows, part):
        """Of the rows of a tile, those in parts [0, part)."""
        return cutlass.min(cute.round_up(rows * part // _PARTS, ROW_ALIGN), rows)
