"""Tile shapes as data: what a tile is, and which one a problem gets."""

from __future__ import annotations

import dataclasses

# Rows of a tile. Below 8 the cost of a step is the read of the weights, so fewer
# rows save nothing; above 128 a step is bound by arithmetic already.
_MIN_ROWS, _MAX_ROWS = 8, 128


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """The tile by hand, for the ``tile`` argument of the public functions.

    Attributes:
      m: rows of one tile. Each group is cut into tiles of this many rows; the last
        one may be partly empty.
    """

    m: int

    def __post_init__(self):
        if isinstance(self.m, bool) or not isinstance(self.m, int) or self.m < 1:
            raise ValueError(f"TileConfig: m must be a positive int, got {self.m!r}")


def choose(m, num_groups) -> TileConfig:
    """The tile for m rows in num_groups groups (group sizes are not known here).

    The mean group fits into one tile, rounded up to a power of two. With a symbolic
    m the mean is unknown and the largest tile is taken.
    """
    if not isinstance(m, int):
        return TileConfig(_MAX_ROWS)
    mean = -(-m // max(num_groups, 1))
    return TileConfig(min(max(1 << max(mean - 1, 0).bit_length(), _MIN_ROWS), _MAX_ROWS))
