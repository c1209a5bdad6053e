"""What pearl_jax is compared with: for each peer a small adapter, and the forms that they take.

All are optional; what cannot run raises, and says why. Run on an H200 so far: lax by default,
mosaic, tokamax 0.0.17, torch 2.11, bmm, quack 0.6.5 but for its gradient of weights. The
others follow their sources, and are tested with stand-ins only: TransformerEngine of August
2026 (d0067d0), cudnn-frontend 1.32.0, triton_kernels of Triton's main branch, DeepGEMM 2.6.1.

Left out are Triton's tutorial kernel, which no package holds, and DeepGEMM's gradient of
weights, which only adds to a float32 result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import forms, shapes
from benchmarks.forms import ASSUMED, Absent, Peer, import_peer, jax_candidate, torch_candidate

LAX_MAX_SECONDS = 0.05
LAX_MAX_BYTES = 2**33

lax_outer = functools.partial(
    jax.lax.ragged_dot_general,
    ragged_dot_dimension_numbers=jax.lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), [0], []
    ),
)


def _capability():
    """Compute capability of the GPU; 0 without one."""
    return float(getattr(jax.devices()[0], "compute_capability", 0))


def _require_blackwell(what):
    if not 10 <= (found := _capability()) < 11:
        kind = jax.devices()[0].device_kind
        raise Absent(f"{what} is for Blackwell (10.x), this is {kind} ({found or 'no GPU'})")


# Variants of a peer: (problem, column) -> {variant: candidate}.


@contextlib.contextmanager
def _config(name, value):
    """An option of JAX, not of every version."""
    if not hasattr(jax.config, name):
        raise Absent(f"jax {jax.__version__} has no option {name}")
    old = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, old)


def _absent(why):
    """A candidate that says why it is none."""

    def bind(group_sizes):
        raise Absent(why)

    return bind


def _lax(function, masked):
    """By default XLA multiplies densely, with rows that are copied and masked for each group.

    So it does from the rollout in JAX's own lowering, without the instruction. The others are
    a fusion for cuDNN (off by default, and not made for one that is older than 9.22) and JAX's
    Triton kernel (jax before 0.12). masked: shape -> columns of the operands that are copied.
    """

    def too_much(problem):
        shape = problem.shape
        seconds = shape.g * problem.flops / ASSUMED.flops
        num_bytes = problem.dtype.itemsize * problem.m * masked(shape) * shape.g
        if seconds > LAX_MAX_SECONDS:
            ms = 1e3 * seconds
            return f"skipped, {shape.g} times the arithmetic would take {ms:.0f} ms"
        if num_bytes > LAX_MAX_BYTES:
            return f"skipped, would need {num_bytes / 2**30:.0f} GiB"
        return None

    def variants(problem, column):
        # One call: XLA merges matmuls that share an operand.
        candidate = functools.partial(jax_candidate, function, problem, column, calls=1)
        why = too_much(problem)
        if not forms.on_gpu():
            return {"": _absent(why) if why else candidate()}
        rollout = functools.partial(_config, "jax_ragged_dot_use_ragged_dot_instruction", False)
        triton = functools.partial(_config, "jax_ragged_dot_use_gpu_pallas_triton_lowering", True)
        fusion = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
        return {
            "": _absent(why) if why else candidate(),
            "rollout": _absent(why) if why else candidate(context=rollout),
            # Without it, XLA multiplies densely after all.
            "cudnn": candidate(compiler_options=fusion, expect="__cudnn$fusion"),
            "triton": candidate(context=triton),
        }

    return variants


def _by_group(x, group_sizes):
    return x.reshape(len(group_sizes), -1, x.shape[1])


def _dense(problem, column):
    """XLA's batched matmul over groups of the same size."""

    def function(lhs, rhs, group_sizes):
        out = jnp.einsum(f"gmk,{column}->gmn", _by_group(lhs, group_sizes), rhs)
        return out.reshape(-1, out.shape[-1])

    return {"": jax_candidate(function, problem, column)}


def _dense_outer(problem, column):
    def function(lhs, rhs, group_sizes):
        lhs, rhs = _by_group(lhs, group_sizes), _by_group(rhs, group_sizes)
        return jnp.einsum("gmk,gmn->gkn", lhs, rhs)

    return {"": jax_candidate(function, problem, column)}


# What does well on an H200, for few and for many rows per group.
_MOSAIC_COMMON = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
MOSAIC_FEW = {"block_m": 64, "block_n": 256, **_MOSAIC_COMMON}
MOSAIC_MANY = {"block_m": 128, "block_n": 128, **_MOSAIC_COMMON}
_PALLAS = "jax.experimental.pallas.ops.gpu"


def _mosaic(problem, column):
    if _capability() >= 10:
        return _mosaic_blackwell(problem, column)
    kernel = import_peer(f"{_PALLAS}.ragged_dot_mgpu").ragged_dot
    rows = problem.m / problem.shape.g
    configs = [MOSAIC_FEW] * (rows <= 64) + [MOSAIC_MANY] * (rows >= 64)
    return _mosaic_candidates(kernel, configs, problem, column)


def _mosaic_outer(problem, column):
    kernel = import_peer(f"{_PALLAS}.transposed_ragged_dot_mgpu").transposed_ragged_dot
    return _mosaic_candidates(kernel, [MOSAIC_FEW, MOSAIC_MANY], problem, column)


def _mosaic_candidates(kernel, configs, problem, column):
    def candidate(config):
        def function(lhs, rhs, group_sizes):
            return kernel(lhs, rhs, group_sizes=group_sizes, **config)

        return jax_candidate(function, problem, column)

    return {f"{c['block_m']}x{c['block_n']}": candidate(c) for c in configs}


def _mosaic_blackwell(problem, column):
    module = import_peer(f"{_PALLAS}.blackwell_ragged_dot_mgpu")
    along = import_peer(f"{_PALLAS}.blackwell_matmul_mgpu").MatmulDimension

    def candidate(steps, collective):
        config = module.TuningConfig(
            tile_m=128,
            tile_n=128,
            tile_k=64,
            max_concurrent_steps=steps,
            collective=collective,
            grid_tile_width=8,
            grid_minor_dim=along.N,
        )

        def function(lhs, rhs, group_sizes):
            return module.ragged_dot_kernel(lhs, rhs, group_sizes, config)

        return jax_candidate(function, problem, column)

    return {
        f"{'pair' if pair else 'one'} {steps} steps": candidate(steps, pair)
        for steps, pair in itertools.product((4, 6), (False, True))
    }


def _tokamax(name, **options):
    def variants(problem, column):
        function = functools.partial(getattr(import_peer("tokamax"), name), **options)
        return {
            kernel: jax_candidate(
                functools.partial(function, implementation=kernel), problem, column
            )
            for kernel in ("mosaic", "triton")
        }

    return variants


def _transformer_engine(contracting, ragged_rhs):
    """Its cuBLAS calls; before Blackwell every one waits for the host to read the sizes."""

    def variants(problem, column):
        tex = import_peer("transformer_engine.jax.cpp_extensions")
        tensor = import_peer("transformer_engine.jax.quantize").GroupedNoScaleTensor

        def grouped(x, sizes):
            return tensor(
                data=x, amax=None, first_dims=sizes, last_dims=None, original_shape=x.shape
            )

        def function(lhs, rhs, group_sizes):
            rhs = grouped(rhs, group_sizes if ragged_rhs else None)
            return tex.grouped_gemm(grouped(lhs, group_sizes), rhs, contracting_dims=contracting)

        return {"": jax_candidate(function, problem, column)}

    return variants


def _cudnn(problem, column):
    """NVIDIA's CuTe DSL kernel through cutlass_call; it finds the weights by their addresses."""
    _require_blackwell("its kernel")
    cudnn = import_peer("cudnn")
    shape = problem.shape

    def prepare(lhs, rhs):
        first = rhs.unsafe_buffer_pointer()
        pointers = first + np.arange(shape.g, dtype=np.int64) * shape.n * shape.k * 2
        return lhs[:, :, None], rhs, jnp.asarray(pointers.view(np.uint8))

    def function(lhs, rhs, pointers, group_sizes):
        ones = jnp.ones((shape.g,), jnp.float32), jnp.ones((problem.m, 1, 1), jnp.float32)
        ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
        out, _ = cudnn.grouped_gemm_jax_sm100(lhs, ends, ones[0], pointers, shape.n, ones[1])
        return out[:, :, 0]

    return {"": _of_256_rows(jax_candidate(function, problem, column, prepare=prepare))}


def _cudnn_outer(problem, column):
    _require_blackwell("its kernel")
    cudnn = import_peer("cudnn")

    def function(lhs, rhs, group_sizes):
        ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
        return cudnn.grouped_gemm_wgrad_jax_sm100(lhs, rhs, ends)["wgrad_tensor"]

    def prepare(lhs, rhs):
        return lhs.T, rhs

    return {"": _of_256_rows(jax_candidate(function, problem, column, prepare=prepare))}


def _of_256_rows(bind):
    def checked(group_sizes):
        if np.any(group_sizes % 256):
            raise Absent("takes groups of a multiple of 256 rows only")
        return bind(group_sizes)

    return checked


# On torch: (torch, lhs, rhs, group_sizes) -> what torch_candidate takes.


def _on_torch(make_call):
    return lambda problem, column: {"": torch_candidate(make_call, problem, column)}


def _int32(torch, values, device):
    return torch.tensor(np.asarray(values).tolist(), dtype=torch.int32, device=device)


def _torch_grouped_mm(torch, lhs, rhs, group_sizes):
    ends = _int32(torch, np.cumsum(group_sizes), lhs.device)
    return lambda: torch._grouped_mm(lhs, rhs.transpose(1, 2), offs=ends), None


def _torch_grouped_outer(torch, lhs, rhs, group_sizes):
    ends = _int32(torch, np.cumsum(group_sizes), lhs.device)
    return lambda: torch._grouped_mm(lhs.t(), rhs, offs=ends), None


def _torch_bmm(torch, lhs, rhs, group_sizes):
    lhs = _by_group(lhs, group_sizes)
    return lambda: torch.bmm(lhs, rhs.transpose(1, 2)), None


def _torch_bmm_outer(torch, lhs, rhs, group_sizes):
    lhs, rhs = _by_group(lhs, group_sizes), _by_group(rhs, group_sizes)
    return lambda: torch.bmm(lhs.transpose(1, 2), rhs), None


def _triton(torch, lhs, rhs, group_sizes):
    matmul = import_peer("triton_kernels.matmul").matmul
    make_metadata = import_peer("triton_kernels.tensor").make_ragged_tensor_metadata
    metadata = make_metadata(_int32(torch, group_sizes, lhs.device), len(lhs))
    weights = rhs.transpose(1, 2)
    return lambda: matmul(lhs, weights, None, a_ragged_metadata=metadata), None


# A selection of its tuner's configurations: that compiles every one of them.
_QUACK_TILES = ((128, 128, True), (128, 192, True), (128, 256, False), (256, 128, False))


def _quack(make_operands):
    """make_operands: (torch, lhs, rhs, bounds of the groups) -> A, B, shape of the result, bounds
    by the name of quack's argument."""

    def variants(problem, column):
        gemm_tuned = import_peer("quack.gemm_interface").gemm_tuned
        config_type = import_peer("quack.gemm_config").GemmConfig

        def candidate(tile_m, tile_n, pingpong):
            config = config_type(
                tile_m=tile_m,
                tile_n=tile_n,
                pingpong=pingpong,
                is_dynamic_persistent=False,
                device_capacity=int(_capability()),
            )

            def make_call(torch, lhs, rhs, group_sizes):
                bounds = _int32(torch, [0, *np.cumsum(group_sizes)], lhs.device)
                a, b, shape, bounds = make_operands(lhs, rhs, bounds)
                out = torch.empty(*shape, dtype=lhs.dtype, device=lhs.device)

                def call():
                    gemm_tuned.fn(a, b, out, config=config, **bounds)
                    return out

                return call, None

            return torch_candidate(make_call, problem, column)

        return {f"{m}x{n}": candidate(m, n, pingpong) for m, n, pingpong in _QUACK_TILES}

    return variants


def _quack_operands(lhs, rhs, bounds):
    return lhs, rhs.transpose(1, 2), (len(lhs), rhs.shape[1]), {"cu_seqlens_m": bounds}


def _quack_outer_operands(lhs, rhs, bounds):
    shape = len(bounds) - 1, lhs.shape[1], rhs.shape[1]
    return lhs.t(), rhs, shape, {"cu_seqlens_k": bounds}


def _deep_gemm(problem, column):
    """Groups start at multiples of a number of rows, or each has as many as the largest.

    The rows in between are copied and read, but what puts tokens there is not timed.
    """
    deep_gemm = import_peer("deep_gemm")

    def pad(torch, lhs, starts, rows, group_sizes):
        """lhs with the groups at starts, among so many rows, and where its rows are."""
        within = np.concatenate([np.arange(size) for size in group_sizes])
        where = torch.tensor((np.repeat(starts, group_sizes) + within).tolist(), device=lhs.device)
        padded = lhs.new_zeros((rows, lhs.shape[1]))
        padded[where] = lhs
        return padded, where

    def contiguous(torch, lhs, rhs, group_sizes):
        step = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout()
        deep_gemm.set_mk_alignment_for_contiguous_layout(step)
        room = -(-group_sizes // step) * step
        starts = np.cumsum(room) - room
        padded, where = pad(torch, lhs, starts, int(room.sum()), group_sizes)
        groups = np.full(int(room.sum()), -1)
        for i, (start, size) in enumerate(zip(starts, group_sizes)):
            groups[start : start + size] = i
        groups = _int32(torch, groups, lhs.device)
        out = lhs.new_zeros((len(padded), rhs.shape[1]))

        def call():
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(padded, rhs, out, groups)
            return out

        return call, lambda out: out[where]

    def masked(torch, lhs, rhs, group_sizes):
        g, most = len(group_sizes), int(max(group_sizes))
        padded, where = pad(torch, lhs, most * np.arange(g), g * most, group_sizes)
        padded = padded.reshape(g, most, -1)
        out = lhs.new_zeros((g, most, rhs.shape[1]))
        sizes, mean = _int32(torch, group_sizes, lhs.device), max(problem.m // g, 1)

        def call():
            deep_gemm.m_grouped_bf16_gemm_nt_masked(padded, rhs, out, sizes, mean)
            return out

        return call, lambda out: out.reshape(g * most, -1)[where]

    kernels = {"contiguous": contiguous, "masked": masked}
    return {name: torch_candidate(f, problem, column) for name, f in kernels.items()}


_MATMUL = {
    "lax": Peer(("gkn",), _lax(jax.lax.ragged_dot, lambda s: s.k), "jax", on_cpu=True),
    "dense": Peer(("gnk", "gkn"), _dense, "jax", uniform_only=True, on_cpu=True),
    "mosaic": Peer(("gkn",), _mosaic, "jax"),
    "tokamax": Peer(("gkn",), _tokamax("ragged_dot"), "tokamax"),
    "te": Peer(("gkn",), _transformer_engine(((1,), (1,)), False), "transformer-engine-jax"),
    "cudnn": Peer(("gnk",), _cudnn, "nvidia-cudnn-frontend"),
    "torch": Peer(("gnk",), _on_torch(_torch_grouped_mm), "torch"),
    "bmm": Peer(("gnk",), _on_torch(_torch_bmm), "torch", uniform_only=True),
    "triton": Peer(("gnk",), _on_torch(_triton), "triton-kernels"),
    "quack": Peer(("gnk",), _quack(_quack_operands), "quack-kernels"),
    "deep_gemm": Peer(("gnk",), _deep_gemm, "deep-gemm"),
}
_fwd = forms.matmul(_MATMUL)
FORMS = {
    "fwd": _fwd,
    # The gradient of lhs: (m, n) by the same weights, so n is contracted.
    "dgrad": dataclasses.replace(_fwd, product=lambda s: shapes.Shape(s.g, s.n, s.k)),
    "wgrad": forms.outer(
        {
            "lax": Peer((), _lax(lax_outer, lambda s: s.k + s.n), "jax", on_cpu=True),
            "dense": Peer((), _dense_outer, "jax", uniform_only=True, on_cpu=True),
            "mosaic": Peer((), _mosaic_outer, "jax"),
            "tokamax": Peer((), _tokamax("ragged_dot_general", **lax_outer.keywords), "tokamax"),
            "te": Peer((), _transformer_engine(((0,), (0,)), True), "transformer-engine-jax"),
            "cudnn": Peer((), _cudnn_outer, "nvidia-cudnn-frontend"),
            "torch": Peer((), _on_torch(_torch_grouped_outer), "torch"),
            "bmm": Peer((), _on_torch(_torch_bmm_outer), "torch", uniform_only=True),
            "quack": Peer((), _quack(_quack_outer_operands), "quack-kernels"),
        }
    ),
}
