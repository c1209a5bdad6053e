"""The same bits in every run: beside other work, from many threads, on every device."""

import concurrent.futures
import contextlib
import ctypes
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu.problems import SIZES, TILES, G, M, Problem, check, int32, on_gpu, problem

pytestmark = pytest.mark.gpu

UNEVEN = [7, 900, 0, 1, 33, 1500, 0, 250, 64, 5, 600, 0, 16, 300, 2, 100]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, "bfloat16")


@jax.jit
def differ(a, b):
    """How many elements differ in any bit."""
    return jnp.sum(a.view(jnp.uint16) != b.view(jnp.uint16))


def uneven_problem(tile=None, transpose_rhs=False):
    """A call of several rounds of work tiles, with random data, as a function of nothing."""
    m = sum(UNEVEN) + 50
    k, n = 1096, 2056
    rhs = normal(1, len(UNEVEN), *((n, k) if transpose_rhs else (k, n)))
    operands = normal(0, m, k), rhs
    sizes, zero = jnp.asarray(int32(*UNEVEN)), jnp.int32(0)
    run = on_gpu(tile=tile, transpose_rhs=transpose_rhs)
    return lambda: run(*operands, sizes, zero)


@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_same_bits_in_50_runs_pytorch_186365(options):
    run = uneven_problem(**options)
    first = run()
    assert jnp.isfinite(first).all()
    assert sum(int(differ(run(), first)) for _ in range(50)) == 0


# A kernel that keeps multiprocessors busy, on a stream that JAX knows nothing about.

SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
  .reg .pred %p<2>;
  .reg .b64 %d<5>;
  ld.param.u64 %d1, [cycles];
  mov.u64 %d2, %clock64;
again:
  mov.u64 %d3, %clock64;
  sub.s64 %d4, %d3, %d2;
  setp.lt.u64 %p1, %d4, %d1;
  @%p1 bra again;
  ret;
}
"""


class Spinner:
    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.stream = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        with self.current():
            self("cuModuleLoadData", ctypes.byref(module), SPIN)
            self("cuModuleGetFunction", ctypes.byref(self.function), module, b"spin")
            non_blocking = 1
            self("cuStreamCreate", ctypes.byref(self.stream), non_blocking)

    def __call__(self, name, *arguments):
        if error := getattr(self.driver, name)(*arguments):
            raise RuntimeError(f"{name} returned the CUDA error {error}")

    @contextlib.contextmanager
    def current(self):
        self("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def spin(self, blocks, cycles):
        """Each block takes most of one multiprocessor's threads for so long."""
        cycles = ctypes.c_uint64(cycles)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(cycles))
        shape = (blocks, 1, 1, 1024, 1, 1)
        with self.current():
            self("cuLaunchKernel", self.function, *shape, 0, self.stream, parameters, None)

    def busy(self):
        """Whether the stream still has work; other errors raise."""
        not_ready = 600
        with self.current():
            error = self.driver.cuStreamQuery(self.stream)
        if error not in (0, not_ready):
            raise RuntimeError(f"cuStreamQuery returned the CUDA error {error}")
        return error == not_ready

    def wait(self):
        with self.current():
            self("cuStreamSynchronize", self.stream)


@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_same_bits_beside_another_kernel_marin_8870(options):
    """marin#8870: rows were wrong when another kernel held multiprocessors.

    Here 1 to 200 blocks do so for up to half a millisecond, and start at any time.
    """
    run, spinner, rng = uneven_problem(**options), Spinner(), np.random.default_rng(0)
    first = jax.block_until_ready(run())
    wrong, overlapping = 0, 0
    for _ in range(100):
        for _ in range(rng.integers(1, 4)):
            spinner.spin(int(rng.integers(1, 200)), int(rng.integers(1_000, 1_000_000)))
        out = run()
        overlapping += spinner.busy()
        wrong += int(differ(out, first))
    spinner.wait()
    assert wrong == 0
    assert overlapping > 20, "the other kernel was done before ours began: nothing was tested"


def test_same_bits_beside_another_thread_marin_8870():
    """Another thread multiplies large matrices all the time."""
    run = uneven_problem()
    first = jax.block_until_ready(run())
    done, started, rounds = threading.Event(), threading.Event(), 0

    def compete():
        nonlocal rounds
        a = normal(2, 4096, 4096)
        multiply = jax.jit(lambda a: a @ a)
        while not done.is_set():
            jax.block_until_ready(multiply(a))
            rounds += 1
            started.set()

    thread = threading.Thread(target=compete)
    thread.start()
    try:
        assert started.wait(60)
        before = rounds
        wrong = sum(int(differ(run(), first)) for _ in range(100))
    finally:
        done.set()
        thread.join()
    assert wrong == 0
    assert rounds > before


def test_skewed_groups_with_a_cold_cache_cutlass_3165():
    """cutlass#3165, #2737: wrong addresses with one group of 95 %, and with a cold cache."""
    sizes = [3] * 32
    sizes[17] = 95 * 31 * 3 // 5
    p = problem(sum(sizes) + 9, 264, 328, 32)
    lhs, rhs = p.operands("bfloat16")
    run, flush = on_gpu(), jnp.zeros(1 << 26)  # 256 MiB, more than the cache
    out = run(lhs, rhs, int32(*sizes), np.int32(0))
    check(out, p.want(sizes))
    for _ in range(50):
        flush = flush + 1
        assert int(differ(run(lhs, rhs, int32(*sizes), np.int32(0)), out)) == 0


def test_eight_threads_at_once():
    """Each compiles and runs problems of its own."""
    barrier = threading.Barrier(8)

    def work(seed):
        rng = np.random.default_rng(seed)
        p = Problem(300 + seed, 136, 264, G, seed)
        options = list(TILES.values())[seed % len(TILES)]
        lhs, rhs = p.operands("bfloat16", options["transpose_rhs"])
        run = on_gpu(**options)
        barrier.wait(60)
        for _ in range(20):
            sizes = [int(s) for s in rng.multinomial(290, np.ones(G) / G)]
            out = run(p.poisoned(lhs, sizes), rhs, int32(*sizes), np.int32(0))
            check(out, p.want(sizes), f"thread {seed}, sizes {sizes}")
        return seed

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


def test_one_function_from_eight_threads():
    p = problem(M, 136, 264, G)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu()
    cases = list(SIZES.items())

    def work(i):
        name, sizes = cases[i % len(cases)]
        check(run(p.poisoned(lhs, sizes), rhs, int32(*sizes), np.int32(0)), p.want(sizes), name)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert run._cache_size() == 1


def test_two_devices():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one GPU here: several were not tested")
    p, sizes = problem(M, 136, 264, G), SIZES["sum below m"]
    operands = {d: [jax.device_put(x, d) for x in p.operands("bfloat16")] for d in devices}
    run = on_gpu()
    for _ in range(3):
        outs = {}
        for device, (lhs, rhs) in operands.items():
            group_sizes = jax.device_put(int32(*sizes), device)
            outs[device] = run(lhs, rhs, group_sizes, jax.device_put(np.int32(0), device))
        for device, out in outs.items():
            assert out.devices() == {device}
            check(out, p.want(sizes), device)
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:

        def work(device):
            lhs, rhs = operands[device]
            with jax.default_device(device):
                for _ in range(20):
                    check(run(lhs, rhs, int32(*sizes), np.int32(0)), p.want(sizes), device)

        list(pool.map(work, devices))


def test_memory_may_go_as_soon_as_the_call_returns_cudnn_frontend_1174():
    """cudnn-frontend PR#1174: scratch was freed while a kernel still used it.

    Here operands are dropped, and their memory filled with NaN, before the kernel has run.
    """
    p, sizes = problem(M, 1096, 2056, G), SIZES["unaligned"]
    lhs, rhs = p.operands("bfloat16")
    busy, run = normal(3, 8192, 8192), on_gpu()
    check(run(lhs, rhs, int32(*sizes), np.int32(0)), p.want(sizes))
    spin = jax.jit(lambda a: a @ a @ a)
    jax.block_until_ready(spin(busy))
    for _ in range(5):
        x, w = lhs + 0, rhs + 0
        group_sizes = jnp.asarray(int32(*sizes))
        spin(busy)  # the calls below wait behind it
        out = run(x, w, group_sizes, jnp.int32(0))
        del x, w, group_sizes
        junk = [jnp.full(a.shape, jnp.nan, a.dtype) for a in (lhs, rhs) for _ in range(3)]
        check(out, p.want(sizes))
        del junk
