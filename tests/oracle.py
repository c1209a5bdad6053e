"""What the operations mean, in numpy float64, and the error measure of all tests."""

import numpy as np


def bounds(sizes, m):
    """(g + 1,) row bounds: negative sizes count as 0, the sum is cut off at m."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, object), 0)), m)
    return [0, *(int(end) for end in ends)]


def grouped_matmul(lhs, rhs, sizes, transpose_rhs=False, offset=0):
    """(m, k), (g, k, n) or (g, n, k), (G,) -> (m, n) float64."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    if transpose_rhs:
        rhs = rhs.swapaxes(1, 2)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    rows = bounds(sizes, lhs.shape[0])
    for i, weights in enumerate(rhs):
        if 0 <= i + offset < len(sizes):
            block = slice(rows[i + offset], rows[i + offset + 1])
            out[block] = lhs[block] @ weights
    return out


def grouped_outer(lhs, rhs, sizes, num_groups=None, offset=0):
    """(m, k), (m, n), (G,) -> (num_groups, k, n) float64."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    g = len(sizes) if num_groups is None else num_groups
    out = np.zeros((g, lhs.shape[1], rhs.shape[1]))
    rows = bounds(sizes, lhs.shape[0])
    for i in range(g):
        if 0 <= i + offset < len(sizes):
            block = slice(rows[i + offset], rows[i + offset + 1])
            out[i] = lhs[block].T @ rhs[block]
    return out


def worst_group_error(got, want, sizes, offset=0):
    """Largest relative error of a group; the worst one counts. Rows of no group must be 0.

    got and want are (m, n), cut into groups by sizes, or (g, k, n).
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.ndim == 2:
        rows = bounds(sizes, got.shape[0])
        tail = got[rows[-1] :]
        assert not tail.any(), f"rows of no group are not 0: {tail}"
        blocks = [slice(a, b) for a, b in zip(rows[:-1], rows[1:])]
    else:
        blocks = range(got.shape[0])
    worst = 0.0
    for block in blocks:
        if got[block].size:
            scale = np.linalg.norm(want[block])
            error = np.linalg.norm(got[block] - want[block])
            if scale == 0:
                assert error == 0, "a group that must be exactly 0 is not"
            else:
                worst = max(worst, error / scale)
    assert np.isfinite(worst)
    return worst


# Relative error of one group, by the result's dtype: a few units in the last place.
TOLERANCE = {
    "float64": 1e-13,
    "float32": 2e-6,
    "bfloat16": 8e-3,
    "float16": 1e-3,
    "float8_e4m3fn": 8e-2,
    "float8_e5m2": 1.6e-1,
}

# Group sizes by name, for 64 rows in 6 groups.
SIZES = {
    "uniform": [11, 11, 11, 11, 10, 10],
    "empty first": [0, 20, 4, 20, 10, 10],
    "empty middle": [20, 4, 0, 0, 30, 10],
    "empty last": [20, 4, 20, 10, 10, 0],
    "all empty": [0, 0, 0, 0, 0, 0],
    "size one": [1, 1, 1, 1, 1, 1],
    "sum below m": [3, 9, 0, 7, 1, 5],
    "unaligned": [7, 13, 5, 17, 3, 19],
    "one hot": [0, 0, 64, 0, 0, 0],
    "sum above m": [30, 0, 30, 9, 40, 5],
    "negative": [10, -5, 20, -1, 0, 12],
}
