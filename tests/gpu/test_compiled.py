"""What XLA compiles a call to: the kernel and nothing else, also inside a CUDA graph."""

import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import pearl_jax
from gpu.problems import SIZES, G, M, check, int32, on_gpu, problem

pytestmark = pytest.mark.gpu

K, N = 136, 264  # such that no two operands have the same number of elements
HOST = r"callback|infeed|outfeed|\bsend\(|\brecv\(|S\(5\)|MoveToHost"


def operations(hlo, shape):
    """The HLO operations that produce an array of so many elements (or more of them at once)."""
    found = set()
    for dims, op in re.findall(r"= \w+\[([\d,]*)\](?:\{[^}]*\})? ([\w-]+)\(", hlo):
        if np.prod([int(d) for d in dims.split(",") if d], dtype=int) >= np.prod(shape):
            found.add(op)
    return found


def arguments(dtype="bfloat16", transpose_rhs=False):
    p = problem(M, K, N, G)
    return *p.operands(dtype, transpose_rhs), int32(*[0] * G), np.int32(0)


NOTHING = {"parameter", "bitcast", "custom-call", "call", "get-tuple-element"}


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_only_the_kernel_cudnn_frontend_592(transpose_rhs):
    """cudnn-frontend PR#592, PR#631: filling outputs with zeros cost more than the kernel.

    Nothing but the kernel makes an array as large as the smallest operand: outputs are
    not filled, weights neither copied nor transposed. No scratch, nothing on the host.
    """
    args = arguments(transpose_rhs=transpose_rhs)
    run = on_gpu(transpose_rhs=transpose_rhs).lower(*args).compile()
    hlo = run.as_text()
    assert hlo.count('custom_call_target="pearl_jax.grouped_matmul"') == 1
    assert "custom-call" in operations(hlo, (M, K)) <= NOTHING
    assert not re.search(HOST, hlo)
    assert run.memory_analysis().temp_size_in_bytes < 4096
    # So that it can fail:
    x = jnp.zeros((M, N), "bfloat16")
    other = jax.jit(lambda x: jnp.zeros_like(x).at[1].set(x[0])).lower(x).compile().as_text()
    assert not operations(other, (M, K)) <= NOTHING


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_gradient_of_lhs_is_only_the_kernel(transpose_rhs):
    """On the weights as they are: the layout is another, not the data."""
    *args, sizes, offset = arguments(transpose_rhs=transpose_rhs)
    f = on_gpu(transpose_rhs=transpose_rhs)

    def gradient(lhs, rhs, sizes, ct):
        return jax.vjp(lambda a: f(a, rhs, sizes, offset), lhs)[1](ct)[0]

    hlo = jax.jit(gradient).lower(*args, sizes, jnp.zeros((M, N), "bfloat16")).compile().as_text()
    assert hlo.count('custom_call_target="pearl_jax.grouped_matmul"') == 1
    assert re.search("_gkn_" if transpose_rhs else "_gnk_", hlo)
    assert operations(hlo, (M, K)) <= NOTHING


def test_batches_copy_nothing():
    """vmap over rows, with shared weights: still only the kernel."""
    p = problem(M, K, N, G)
    lhs, rhs = p.operands("bfloat16")
    batch = jnp.stack([lhs, lhs, lhs])
    f = jax.jit(jax.vmap(on_gpu(), (0, None, None, None)))
    run = f.lower(batch, rhs, int32(*[0] * G), np.int32(0)).compile()
    assert operations(run.as_text(), rhs.shape) <= NOTHING
    assert run.memory_analysis().temp_size_in_bytes < 4096


def test_scratch_does_not_grow_with_groups_marin_5394():
    """marin#5394: scratch grew from 15 to 54 GiB. Ours has none, for 4 groups or 512."""
    for g in (4, 512):
        lhs, rhs = jnp.zeros((64, 64), "bfloat16"), jnp.zeros((g, 64, 64), "bfloat16")
        run = on_gpu().lower(lhs, rhs, int32(*[0] * g), np.int32(0)).compile()
        assert run.memory_analysis().temp_size_in_bytes < 4096


def test_new_sizes_do_not_recompile_te_2469():
    """TE#2469, PR#2680: sizes were read by the host. Here only the device sees them."""
    p = problem(M, K, N, G)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu()
    with jax.transfer_guard_device_to_host("disallow"):
        outs = {
            name: run(lhs, rhs, int32(*sizes), np.int32(offset))
            for offset in (0, 1)
            for name, sizes in SIZES.items()
        }
        jax.block_until_ready(outs)
    assert run._cache_size() == 1
    for name, out in outs.items():
        check(out, p.want(SIZES[name], 1), name)


def layers(*args):
    """Six calls, each on the result of the one before, and nothing else."""
    h, rhs, sizes, offset = args
    f = on_gpu()
    for _ in range(6):
        h = f(h, rhs, sizes, offset)
    return h


def dumped(compiled_with, args, folder):
    """The optimised HLO, and all that XLA writes about the sequence of its commands."""
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, **compiled_with}
    run = jax.jit(layers).lower(*args).compile(options)
    files = [f for f in Path(folder).rglob("*") if "thunk_sequence" in f.name]
    return run, run.as_text() + "".join(f.read_text() for f in files)


def test_captured_in_a_cuda_graph_jax_27988(tmp_path):
    """jax#27988, xla#14889: custom kernels were left out of command buffers.

    Six calls become one graph, which is right for new sizes, new values and new addresses.
    """
    rng = np.random.default_rng(0)
    sparse = rng.integers(-1, 2, (G, 128, 128)) * (rng.random((G, 128, 128)) < 0.012)
    x = rng.integers(-1, 2, (M, 128))
    args = jnp.asarray(x, "bfloat16"), jnp.asarray(sparse, "bfloat16")
    zeros = int32(*[0] * G), np.int32(0)
    graph = "kCommandBuffer|command_buffer"
    off = {"xla_gpu_enable_command_buffer": ""}
    _, without = dumped(off, (*args, *zeros), tmp_path / "off")
    assert not re.search(graph, without)
    run, text = dumped({}, (*args, *zeros), tmp_path / "on")
    assert re.search(graph, text), "no call became a part of a command buffer"
    for case in SIZES.values():
        want = x.astype(float)
        for _ in range(6):
            want = oracle.grouped_matmul(want, sparse, case)
        assert np.abs(want).max() <= 256  # exact in bfloat16, all the way
        out = run(args[0] + 0, args[1] + 0, jnp.asarray(int32(*case)), jnp.int32(0))
        check(out, want, case)


def seconds(f, *args, calls=20):
    """The least time of one call, of several rounds that wait once at their end."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        outs = [f(*args) for _ in range(calls)]
        jax.block_until_ready(outs)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def test_faster_than_ragged_dot_xla_46127():
    """xla#46127, marin#7012: jax.lax.ragged_dot does g times the arithmetic on a GPU."""
    m, k, n, g = 4096, 2048, 2048, 32
    keys = jax.random.split(jax.random.key(0))
    lhs = jax.random.normal(keys[0], (m, k), "bfloat16")
    rhs = jax.random.normal(keys[1], (g, k, n), "bfloat16")
    sizes = jnp.full(g, m // g, jnp.int32)
    ours = seconds(jax.jit(pearl_jax.grouped_matmul), lhs, rhs, sizes)
    theirs = seconds(jax.jit(jax.lax.ragged_dot), lhs, rhs, sizes)
    assert theirs > 2 * ours, f"{ours * 1e6:.0f} us, and jax.lax.ragged_dot {theirs * 1e6:.0f} us"


def test_both_layouts_are_fast_marin_9077():
    """marin#9077: weights in the other layout were copied first, or took a slower way."""
    m, k, n, g = 2048, 4096, 4096, 32
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (m, k), "bfloat16")
    sizes = jnp.full(g, m // g, jnp.int32)
    times = {}
    for transpose_rhs in (False, True):
        rhs = jax.random.normal(keys[1], (g, k, n), "bfloat16")  # k = n: fits both
        f = on_gpu(transpose_rhs=transpose_rhs)
        times[transpose_rhs] = seconds(f, lhs, rhs, sizes, jnp.int32(0))
    assert max(times.values()) < 1.2 * min(times.values()), times


def test_rows_of_no_group_cost_what_they_are_cudnn_frontend_631():
    """cudnn-frontend PR#631: all of the output was filled. Few such rows cost next to nothing."""
    m, k, n, g = 65536, 64, 4096, 4
    lhs, rhs = jnp.ones((m, k), "bfloat16"), jnp.ones((g, k, n), "bfloat16")
    run = on_gpu()
    full, less = (jnp.full(g, m // g - d, jnp.int32) for d in (0, 1))
    times = [seconds(run, lhs, rhs, s, jnp.int32(0)) for s in (full, less)]
    assert times[1] < 1.2 * times[0], times
