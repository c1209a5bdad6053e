"""Which work tile comes next: a walk over groups whose sizes only the device knows.

Work tiles of the matmul are numbered by batch, group, column tile and, fastest, row tile,
so that the row tiles of one group read the same weights at about the same time; with
tile.raster_along_n column tiles come fastest, and read the same rows. A column tile here is
one of each CTA, or pair of CTAs, of a cluster. Cluster c takes the tiles c, c + clusters,
c + 2 clusters and so on. Every warp that needs the tiles walks by itself: its
32 lanes hold 32 groups at a time, and one ballot finds the group of a tile.

Those of the outer product are numbered by batch, group, band of columns, row tile and column
tile of the result, whose groups all have the same number of tiles; what differs are the rows
over which they sum, and so how long they take. The tiles of the largest group come first,
and who has one more of them than others has fewer of the rest. On a cluster of two, where most
CTAs would have nothing else to do meanwhile, two share one of its last tiles: half of the rows
each.

Negative sizes count as 0, and the sum is cut off at m.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.base_dsl.native_struct import native_struct

from pearl_jax.tiling import K_TILE, SHARED_TILES

_LANES = 32

# All tiles of a group but the last have a multiple of this many rows.
ROW_ALIGN = 16

# Tiles of so many rows are bound by arithmetic, and that by the power the chip may draw.
# Of r rounds of tiles all then get as many clusters, however many that leaves idle: a
# shorter last round would leave power unused that the others lack (2 % on an H200).
_EVEN_ROUNDS = 256

# What a tile of an outer product takes beside its K tiles, counted in K tiles (on an H200,
# benchmarks/notes/outer.md): to store its result, and more on each of two multiprocessors that
# share it. Who does which tiles depends on these.
_STORE_K_TILES, _SHARE_K_TILES = 3, 8

# Columns of the result of an outer product that its tiles go through before they turn to other
# rows: what is stored at the same time lies side by side, and the next rows find the operand in
# the L2 cache. Up to two bands are one, as stores then count more.
_BAND = 4096


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
    columns: Int32  # of a tile


@native_struct
class Chunk:
    """32 groups of one batch, the lane's own in the fields that begin with "lane"."""

    index: Int32  # of the chunk, over all batches
    first_tile: Int32  # tiles before this chunk
    num_tiles: Int32  # tiles of this chunk
    columns: Int32  # of a tile
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


@native_struct
class Order:
    """The order of the work tiles of an outer product, see OuterScheduler.nth."""

    largest: Int32  # group, counted over all batches of the result
    busy: Int32  # the first so many CTAs (or pairs) work on its last tiles, the others
    ahead: Int32  # on so many others meanwhile
    shared: Boolean  # two work on each of its last tiles


@native_struct
class OuterTile:
    """Columns [column, ...) of rows [row, ...) of one group of one batch of the result."""

    out_batch: Int32
    group: Int32
    row: Int32
    column: Int32
    shared: Boolean  # summed over half of the rows by each CTA of the cluster


@native_struct
class Ends:
    """Where 32 groups of one batch begin and end; "lane": the lane's own group."""

    batch: Int32
    index: Int32  # of the 32 in the batch
    offset: Int32  # group_offset of the batch
    end_row: Int32  # of the last of the 32
    lane_row: Int32
    lane_end: Int32


@native_struct
class Rows:
    """count rows from row first on, of all rows of lhs and of all of rhs."""

    lhs_first: Int32
    rhs_first: Int32
    count: Int32


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows of each group, as one warp reads them from group_sizes.

    group_sizes (.., num_sizes), group_offset (..), and batch_index (.., 4): which batch of
    lhs, rhs, group_sizes and group_offset a batch uses.
    """

    group_sizes: cute.Pointer
    group_offset: cute.Pointer
    batch_index: cute.Pointer
    m: Int32
    n: Int32
    num_groups: Int32  # of rhs, or of the outer product's result
    num_sizes: Int32
    num_batches: Int32  # of the result
    tile: cutlass.Constexpr  # TileConfig

    @cute.jit
    def _batch(self, batch: Int32, operand: cutlass.Constexpr[int]) -> Int32:
        index = Int32(0)
        if self._num_indices() > 1:
            index = self.batch_index[batch * 4 + operand]
        return index

    def _num_indices(self):
        """Rows of batch_index; the only one would be 0."""
        return self.num_batches

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


@dataclasses.dataclass(frozen=True)
class Scheduler(Groups):
    """The work tiles of a matmul, as one warp walks over them.

    Where so few groups have rows that half of the clusters would have no tile, tiles have
    `narrow` columns instead of tile.n.
    """

    narrow: cutlass.Constexpr[int]  # tile.n, or half of it

    def _column_tiles(self, columns):
        together = columns * self.tile.cluster
        return (self.n + together - 1) // together

    def rank(self):
        """Which of the neighbouring column tiles of a cluster this CTA works on."""
        if self.tile.cluster == 1:
            return 0
        return cute.arch.block_idx_in_cluster() // self.tile.ctas

    def _chunks_per_batch(self):
        return cute.ceil_div(self.num_sizes, _LANES)

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
    def _load(self, index: Int32, first_tile: Int32, row: Int32, columns: Int32) -> Chunk:
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
            tiles = cute.ceil_div(end - start, self.tile.m) * self._column_tiles(columns)
        end_tile = tiles
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(end_tile, 1 << step)
            if lane >= (1 << step):
                end_tile += before
        return Chunk(
            index=index,
            first_tile=first_tile,
            num_tiles=cute.arch.shuffle_sync(end_tile, _LANES - 1),
            columns=columns,
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
        """The first chunk, this cluster's first tile, and the step from one to the next."""
        ctas = self.tile.cluster * self.tile.ctas
        cluster = cute.arch.block_idx()[0] // ctas
        clusters = cute.arch.grid_dim()[0] // ctas
        columns = Int32(self.tile.n)
        if cutlass.const_expr(self.narrow < self.tile.n):
            few = 2 * self._num_tiles(columns, clusters // 2) <= clusters
            columns = Int32(self.narrow) if few else columns
        if cutlass.const_expr(self.tile.m >= _EVEN_ROUNDS):
            num_tiles = self._num_tiles(columns, Int32(2**31 - 1))
            rounds = cutlass.max(cute.ceil_div(num_tiles, clusters), 1)
            clusters = cute.ceil_div(num_tiles, rounds)
            if cluster >= clusters:
                cluster = num_tiles  # there is no such tile
        return self._load(Int32(0), Int32(0), Int32(0), columns), cluster, clusters

    @cute.jit
    def _num_tiles(self, columns: Int32, enough: Int32) -> Int32:
        """Tiles in all, or some number above enough."""
        num_tiles, index, row = Int32(0), Int32(0), Int32(0)
        while index <= self._last_chunk() and num_tiles <= enough:
            chunk = self._load(index, num_tiles, row, columns)
            num_tiles += chunk.num_tiles
            row = chunk.end_row
            index += 1
        return num_tiles

    def _last_chunk(self):
        return self._chunks_per_batch() * self.num_batches - 1

    def _fast_tiles(self, row_tiles, column_tiles):
        """How many tiles of a group lie along the axis that varies fastest."""
        return column_tiles if self.tile.raster_along_n else row_tiles

    def _raster(self, fast, slow):
        """The row tile and the column tile with these indices along the two axes."""
        return (slow, fast) if self.tile.raster_along_n else (fast, slow)

    @cute.jit
    def find(self, chunk: Chunk, tile: Int32):
        """Work tile number tile, and its chunk; tile must not lie before the given chunk."""
        while tile >= chunk.first_tile + chunk.num_tiles and chunk.index < self._last_chunk():
            chunk = self._load(
                chunk.index + 1, chunk.first_tile + chunk.num_tiles, chunk.end_row, chunk.columns
            )

        local = tile - chunk.first_tile
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(local >= chunk.lane_end_tile))
        lane = cutlass.min(passed, _LANES - 1)  # the first whose end lies past the tile
        rows = cute.arch.shuffle_sync(chunk.lane_rows, lane)
        row_tiles = cutlass.max(cute.ceil_div(rows, self.tile.m), 1)
        column_tiles = self._column_tiles(chunk.columns)
        local -= cute.arch.shuffle_sync(chunk.lane_end_tile, lane) - row_tiles * column_tiles
        fast_tiles = self._fast_tiles(row_tiles, column_tiles)
        slow = local // fast_tiles
        # Row tiles of about the same size, so that none is nearly empty.
        step = cute.round_up(cute.ceil_div(rows, row_tiles), ROW_ALIGN)
        row_tile, column_tile = self._raster(local - slow * fast_tiles, slow)
        first = row_tile * step
        work = WorkTile(
            valid=passed < _LANES,
            lhs_batch=chunk.lhs_batch,
            out_batch=chunk.out_batch,
            group=cute.arch.shuffle_sync(chunk.lane_group, lane),
            row=cute.arch.shuffle_sync(chunk.lane_row, lane) + first,
            rows=cutlass.min(rows - first, step),
            column=(column_tile * self.tile.cluster + self.rank()) * chunk.columns,
            columns=chunk.columns,
        )
        return chunk, work


@dataclasses.dataclass(frozen=True)
class OuterScheduler(Groups):
    """The work tiles of an outer product, and the rows that each sums over."""

    k: Int32
    reduced: Int32  # batches that one batch of the result sums over, consecutive ones

    def _num_indices(self):
        return self.num_batches * self.reduced

    def _row_tiles(self):
        return cute.ceil_div(self.k, self.tile.m)

    def _column_tiles(self):
        return cute.ceil_div(self.n, self.tile.n)

    def num_tiles(self):
        return self._groups() * self._tiles_of_a_group()

    @cute.jit
    def start(self):
        """The ends of the first groups, and the order of the tiles."""
        return self._load(Int32(0), Int32(0), Int32(0)), self._order()

    def _groups(self):
        return self.num_batches * self.num_groups

    def _places(self):
        """CTAs (or pairs), and which of them this is."""
        ctas = self.tile.ctas
        return cute.arch.grid_dim()[0] // ctas, cute.arch.block_idx()[0] // ctas

    def share(self):
        """Which half of the rows of a shared tile is this CTA's."""
        return cute.arch.block_idx()[0] % 2

    @cute.jit
    def _cost(self, group: Int32) -> Int32:
        """What a tile of the lane's group takes, in K tiles; 0 if there is no such group."""
        cost = Int32(0)
        if group < self._groups():
            cost = Int32(_STORE_K_TILES)
            for part in range(self.reduced):
                batch = group // self.num_groups * self.reduced + part
                index = self._offset(batch) + group % self.num_groups
                if index >= 0 and index < self.num_sizes:
                    size = self.group_sizes[self._batch(batch, 2) * self.num_sizes + index]
                    cost += cute.ceil_div(cutlass.min(cutlass.max(size, 0), self.m), K_TILE)
        return cost

    @cute.jit
    def _order(self) -> Order:
        lane = cute.arch.lane_idx()
        # Of the groups that the lane has seen.
        most, largest, second, total = Int32(0), Int32(0), Int32(1), Int32(0)
        for first in range(0, self._groups(), _LANES):
            cost = self._cost(first + lane)
            total += cost
            second = cutlass.max(second, cutlass.min(cost, most))
            if cost > most:
                most, largest = cost, first + lane
        cost = cute.arch.warp_redux_sync(most, "max")
        largest = largest if most == cost else self._groups()
        chosen = cute.arch.warp_redux_sync(largest, "min")
        second = second if largest == chosen else cutlass.max(second, most)
        others = cute.arch.warp_redux_sync(total, "add") - cost
        places, _ = self._places()
        tiles = self._tiles_of_a_group()
        busy, shared = tiles % places, Boolean(False)
        if cutlass.const_expr(self.tile.cluster > 1):
            # All others' tiles and the shares must be done before one whole tile would be.
            both = cost + 2 * _SHARE_K_TILES
            work = Int64(busy) * both + Int64(tiles) * others
            shared = both < 2 * cost and work < Int64(places) * cost
            shared = shared and busy > 0 and busy <= SHARED_TILES and 2 * busy <= places
            if shared:
                busy, cost = 2 * busy, both // 2
        # Who is ahead comes to other groups of any size: at most the second largest, or, where
        # each turn of theirs is a whole group or more, the mean.
        other = cute.arch.warp_redux_sync(second, "max")
        if places - busy >= tiles and self._groups() > 1:
            other = others // (self._groups() - 1)
        ahead = cost // cutlass.max(other, 1)
        return Order(largest=chosen, busy=busy, ahead=ahead, shared=shared)

    @cute.jit
    def nth(self, order: Order, i: Int32) -> Int32:
        """The i-th tile of this CTA (or pair), counted with the largest group's tiles first.

        All take turns at these. Who had one less of them then does `ahead` others, which take
        about as long as one of them, and after that all take turns again.
        """
        places, place = self._places()
        idle = places - order.busy
        first = self._tiles_of_a_group()
        rounds = first // places  # of whole ones
        meanwhile = 1 if place < order.busy else order.ahead
        tile = i * places + place
        if i >= rounds + meanwhile:
            tile += first + order.ahead * idle - (rounds + meanwhile) * places
        elif i >= rounds and place >= order.busy:
            tile = first + (i - rounds) * idle + place - order.busy
        elif i >= rounds and order.shared:
            tile = rounds * places + place // 2
        return tile

    @cute.jit
    def find(self, order: Order, tile: Int32) -> OuterTile:
        index, in_group = tile // self._tiles_of_a_group(), tile % self._tiles_of_a_group()
        group = index - (index <= order.largest)
        if index == 0:
            group = order.largest
        most = Int32(_BAND // self.tile.n)
        if self._column_tiles() <= 2 * most:
            most = self._column_tiles()
        band = in_group // (self._row_tiles() * most)
        in_band = in_group - band * self._row_tiles() * most
        columns = cutlass.min(self._column_tiles() - band * most, most)
        row_tile = in_band // columns
        return OuterTile(
            out_batch=group // self.num_groups,
            group=group % self.num_groups,
            row=row_tile * self.tile.m,
            column=(band * most + in_band - row_tile * columns) * self.tile.n,
            shared=order.shared and index == 0 and in_group >= self._whole_rounds(),
        )

    def _whole_rounds(self):
        """Tiles of the largest group in rounds in which every CTA (or pair) has one."""
        places, _ = self._places()
        return self._tiles_of_a_group() // places * places

    def _tiles_of_a_group(self):
        return self._row_tiles() * self._column_tiles()

    @cute.jit
    def _load(self, batch: Int32, index: Int32, row: Int32) -> Ends:
        """The groups from 32 * index on; row: the first of them."""
        lane = cute.arch.lane_idx()
        end = self._end_row(batch, index * _LANES + lane, row)
        start = cute.arch.shuffle_sync_up(end, 1)
        if lane == 0:
            start = row
        return Ends(
            batch=batch,
            index=index,
            offset=self._offset(batch),
            end_row=cute.arch.shuffle_sync(end, _LANES - 1),
            lane_row=start,
            lane_end=end,
        )

    @cute.jit
    def rows(self, ends: Ends, work: OuterTile, part: Int32):
        """The rows of work's group in the part-th of its batches, and the ends around them."""
        batch = work.out_batch * self.reduced + part
        if batch != ends.batch:
            ends = self._load(batch, Int32(0), Int32(0))
        group = ends.offset + work.group
        first, count = Int32(0), Int32(0)
        if group >= 0 and group < self.num_sizes:
            if group // _LANES < ends.index:
                ends = self._load(batch, Int32(0), Int32(0))
            while group // _LANES > ends.index:
                ends = self._load(batch, ends.index + 1, ends.end_row)
            first = cute.arch.shuffle_sync(ends.lane_row, group % _LANES)
            count = cute.arch.shuffle_sync(ends.lane_end, group % _LANES) - first
        if work.shared:
            half = cutlass.min(cute.round_up(cute.ceil_div(count, 2), K_TILE), count)
            first += self.share() * half
            count = cutlass.min(count - self.share() * half, half)
        return ends, Rows(
            lhs_first=self._batch(batch, 0) * self.m + first,
            rhs_first=self._batch(batch, 1) * self.m + first,
            count=count,
        )

    @cute.jit
    def k_tiles(self, ends: Ends, work: OuterTile):
        """K tiles of all rows that work sums over, and the ends around the last of them."""
        k_tiles = Int32(0)
        for part in range(self.reduced):
            ends, rows = self.rows(ends, work, part)
            k_tiles += cute.ceil_div(rows.count, K_TILE)
        return ends, k_tiles
