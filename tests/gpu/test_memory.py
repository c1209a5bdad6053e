"""What the kernels write to memory, and what they leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from gpu.problems import SIZES, TILES, G, M, check, int32, on_gpu, problem

pytestmark = pytest.mark.gpu

CANARY = 640.0  # which every dtype here holds


def address(x):
    return x.unsafe_buffer_pointer()


def holes(shape, dtype, count=8):
    """Memory full of NaN that is free, between arrays in use that hold CANARY.

    Returns these arrays and the addresses of the holes. An array of exactly that shape
    fits best into one of them, so the allocator puts it there.
    """
    blocks = [
        jax.block_until_ready(jnp.full(shape, CANARY if i % 2 == 0 else jnp.nan, dtype))
        for i in range(2 * count + 1)
    ]
    addresses = {address(x) for x in blocks[1::2]}
    kept = blocks[::2]
    del blocks
    return kept, addresses


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_poisoned_outputs_and_canaries(options, out_dtype):
    """Outputs that lie in memory full of NaN, each between two arrays that must not change.

    n = 328 and 200 end inside a tile, and so does every group.
    """
    hits = neighbours = 0
    for n in (328, 200):
        p = problem(M + 4, 136, n, G)  # rows: so that the output is a multiple of 256 bytes
        lhs, rhs = p.operands("bfloat16", options["transpose_rhs"])
        run = on_gpu(**options, preferred_element_type=out_dtype)
        sizes = {name: jnp.asarray(int32(*values)) for name, values in SIZES.items()}
        zero = jnp.int32(0)
        jax.block_until_ready(run(lhs, rhs, sizes["unaligned"], zero))  # compiles
        for name, values in SIZES.items():
            x = jax.block_until_ready(p.poisoned(lhs, values))
            kept, addresses = holes((p.m, n), out_dtype)
            outs = [run(x, rhs, sizes[name], zero) for _ in range(8)]
            hits += sum(address(out) in addresses for out in outs)
            ends = {address(out) + out.nbytes for out in outs}
            neighbours += sum(address(other) in ends for other in kept)
            for out in outs[1:]:
                assert jnp.array_equal(out, outs[0]), name
            check(outs[0], p.want(values), name)
            for other in kept:
                assert (other == CANARY).all(), f"{name}: written outside of the output"
            del outs, kept
    # Of 208 outputs: the test is about these.
    assert hits > 100, f"only {hits} outputs lay in memory full of NaN"
    assert neighbours > 50, f"only {neighbours} outputs had a canary right behind them"


def test_operands_do_not_change():
    """Also not the padding between what the copy engine reads and what there is."""
    p = problem(M, 136, 328, G)
    operands = [*p.operands("float16"), jnp.asarray(int32(*SIZES["unaligned"])), jnp.int32(0)]
    before = [np.asarray(x).copy() for x in operands]
    run = on_gpu()
    for _ in range(5):
        run(*operands)
    for x, old in zip(operands, before):
        np.testing.assert_array_equal(np.asarray(x), old)


def test_donated_operand_is_not_overwritten_too_early():
    """The output may take the memory of a donated lhs, only if nothing reads it any more."""
    p = problem(M, 328, 328, G)
    lhs, rhs = p.operands("bfloat16")
    call = on_gpu()
    run = jax.jit(lambda *operands: call(*operands), donate_argnums=0)
    sizes = SIZES["sum below m"]
    for _ in range(5):
        x = p.poisoned(lhs, sizes)
        check(run(x, rhs, int32(*sizes), np.int32(0)), p.want(sizes))
        assert x.is_deleted()


# More elements than an int32 counts. The operands are functions of the index, so that the
# host computes only those parts that it looks at.


def hashed(row, column):
    """-2 to 2, from row and column, uint32 arrays that broadcast."""
    x = row * np.uint32(2654435761) + column * np.uint32(2246822519)
    x = (x ^ (x >> 15)) * np.uint32(3266489917)
    return (x >> 11) % np.uint32(5)


def on_device(*shape, dtype="bfloat16"):
    """hashed for an array whose leading axes count as one axis of rows."""

    @jax.jit
    def make():
        axes = [jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in range(len(shape))]
        row = axes[0] if len(shape) == 2 else axes[0] * np.uint32(shape[1]) + axes[1]
        return hashed(row, axes[-1]).astype(dtype) - 2

    return make()


def on_host(rows, columns):
    row = np.arange(rows.start, rows.stop, dtype=np.uint32)[:, None]
    return hashed(row, np.arange(columns, dtype=np.uint32)).astype(np.float64) - 2


def check_rows(out, blocks, k, n, bounds):
    """Rows around each of `blocks` against the oracle; rows past the groups are 0."""
    for start in blocks:
        rows = range(max(start - 70, 0), min(start + 70, out.shape[0]))
        want = np.zeros((len(rows), n))
        x = on_host(rows, k)
        for i in range(len(bounds) - 1):
            inside = slice(
                max(bounds[i] - rows.start, 0), max(min(bounds[i + 1], rows.stop) - rows.start, 0)
            )
            if inside.start < inside.stop:
                want[inside] = x[inside] @ on_host(range(i * k, (i + 1) * k), n)
        check(out[rows.start : rows.stop], want, f"rows {rows}")


@pytest.mark.parametrize(
    ("m", "k", "n"), [(600_000, 64, 4096), (560_000, 4096, 128)], ids=["out", "lhs"]
)
def test_more_than_2_31_elements_in_rows_vllm_45884(m, k, n):
    """vllm#45884, Liger#1296: an offset of 32 bits wrapped around. Here the last rows are right."""
    assert m * max(k, n) > 2**31
    sizes = [m // 3, 1, 0, m // 2, 999, m // 6 - 2500]
    bounds = oracle.bounds(sizes, m)
    lhs, rhs = on_device(m, k), on_device(len(sizes), k, n)
    out = on_gpu()(lhs, rhs, int32(*sizes), np.int32(0))
    wraps = [2**31 // max(k, n), 2**30 // max(k, n)]
    assert wraps[0] < bounds[-1] < m - 1000
    check_rows(out, [*bounds, m, *wraps], k, n, bounds)
    assert not jnp.any(out[bounds[-1] :])


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_more_than_2_31_elements_in_weights_vllm_45884(transpose_rhs):
    g, k, n = 140, 4096, 4104
    sizes = [0] * g
    sizes[0], sizes[63], sizes[127], sizes[139] = 3, 70, 17, 40
    assert 127 * k * n < 2**31 < 128 * k * n
    lhs = on_device(136, k)
    rhs = on_device(g, n, k) if transpose_rhs else on_device(g, k, n)
    out = on_gpu(transpose_rhs=transpose_rhs)(lhs, rhs, int32(*sizes), np.int32(0))
    x, row = on_host(range(136), k), 0
    want = np.zeros((136, n))
    for i in np.flatnonzero(sizes):
        rows, columns = (n, k) if transpose_rhs else (k, n)
        w = on_host(range(i * rows, (i + 1) * rows), columns).astype(np.float32)
        block = slice(row, row + sizes[i])
        want[block] = x[block].astype(np.float32) @ (w.T if transpose_rhs else w)
        row = block.stop
    check(out, want)


def test_more_than_2_31_elements_over_batches_vllm_45884():
    batch, m, k, n = 40, 15_000, 64, 4096
    assert batch * m * n > 2**31
    sizes = [7000, 0, 7900]
    lhs, rhs = on_device(m, k), on_device(3, k, n)
    run = jax.jit(jax.vmap(on_gpu(), (0, None, None, None)))
    scale = jnp.where(jnp.arange(batch) % 2 == 0, 1, -1).astype("bfloat16")[:, None, None]
    out = run(lhs * scale, rhs, int32(*sizes), np.int32(0))
    bounds = oracle.bounds(sizes, m)
    for i in (0, batch // 2 - 1, batch - 2, batch - 1):
        check_rows(out[i] * scale[i], [0, *bounds[1:], m], k, n, bounds)
