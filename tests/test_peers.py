"""What is asked of other projects' grouped matmuls, by stand-ins that check it; none is needed."""

import sys
import types

import benchmarks_by_path  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import pearl_jax
from benchmarks import forms, grouped_matmul, peers, protocol, shapes

TINY = shapes.Shape(g=3, k=16, n=8)
SIZES = np.int32([1, 0, 5])
EVEN = np.int32([2, 2, 2])


@pytest.fixture(autouse=True)
def one_copy(monkeypatch):
    monkeypatch.setattr(protocol, "COLD_BYTES", 1)


def problem(form="fwd", shape=TINY, m=6):
    return peers.FORMS[form].problem(shape, m)


def checked(name, form="fwd", sizes=SIZES, shape=TINY):
    """Why variants of a peer do not run, if they do not; their results must be right."""
    p = problem(form, shape, int(sizes.sum()))
    candidates, absent = grouped_matmul.make_candidates(p, [name])
    bursts, notes = grouped_matmul.prepare(p, candidates, sizes)
    ran = [candidate for candidate, _ in bursts if candidate != "pearl"]
    return ran, {candidate: note for (candidate, _), note in (absent | notes).items()}


@pytest.fixture
def modules(monkeypatch):
    """Modules by name, that take the place of all that peers import."""
    found = {}

    def import_peer(name):
        if name not in found:
            raise forms.Absent(f"{name} cannot be imported")
        return types.SimpleNamespace(**found[name])

    monkeypatch.setattr(peers, "import_peer", import_peer)
    monkeypatch.setattr(forms, "import_peer", import_peer)
    return found


@pytest.fixture
def on_blackwell(monkeypatch):
    monkeypatch.setattr(peers, "_capability", lambda: 10.0)


def test_without_other_projects_all_say_why(modules):
    for form in ("fwd", "wgrad"):
        for name, peer in peers.FORMS[form].peers.items():
            if not peer.on_cpu:
                ran, notes = checked(name, form)
                assert not ran
                assert all("cannot be imported" in x or "Blackwell" in x for x in notes.values())
                assert notes, name


# On JAX.


@pytest.mark.parametrize(("form", "masked"), [("fwd", 16), ("wgrad", 16 + 8)])
def test_lax_is_left_out_where_it_would_take_too_long(monkeypatch, form, masked):
    with monkeypatch.context() as patch:
        patch.setattr(peers, "LAX_MAX_SECONDS", 1e-12)
        (note,) = checked("lax", form)[1].values()
        assert note.startswith("skipped, 3 times the arithmetic would take")
    monkeypatch.setattr(peers, "LAX_MAX_BYTES", 2 * 3 * 6 * masked)
    assert checked("lax", form) == (["lax"], {})
    monkeypatch.setattr(peers, "LAX_MAX_BYTES", 2 * 3 * 6 * masked - 1)
    (note,) = checked("lax", form)[1].values()
    assert note.startswith("skipped, would need")


@pytest.mark.parametrize("form", ["fwd", "wgrad"])
def test_modes_of_lax_are_those_that_this_jax_has(monkeypatch, form):
    monkeypatch.setattr(forms, "on_gpu", lambda: True)
    monkeypatch.setattr(forms, "_implementation", lambda: None)
    instruction = "jax_ragged_dot_use_ragged_dot_instruction"
    before, seen = getattr(jax.config, instruction), []
    compile_ = jax.stages.Lowered.compile

    def note_options(self, options=None):
        seen.append((getattr(jax.config, instruction), options))
        return compile_(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", note_options)
    ran, notes = checked("lax", form)
    # On a CPU the instruction is expanded all the same; and there is no fusion.
    assert [name for name in ran if name != "lax triton"] == ["lax", "lax rollout"]
    assert notes["lax cudnn"] == "XLA compiles it without __cudnn$fusion"
    assert (False, None) in seen
    assert (before, {"xla_gpu_experimental_use_ragged_dot_fusion": True}) in seen
    assert getattr(jax.config, instruction) == before
    # What would take too long is left out, but for modes that do not expand.
    monkeypatch.setattr(peers, "LAX_MAX_SECONDS", 1e-12)
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: "%x = __cudnn$fusion")
    ran, notes = checked("lax", form)
    assert "lax cudnn" in ran
    assert all(notes[name].startswith("skipped") for name in ("lax", "lax rollout"))


def test_what_does_not_compile_is_not_compiled_again(monkeypatch):
    tried = []

    def fails(lhs, rhs, group_sizes):
        tried.append(1)
        raise ValueError("no such tile")

    bind = forms.jax_candidate(fails, problem(), "gkn")
    for sizes in (SIZES, EVEN):
        with pytest.raises(ValueError, match="no such tile"):
            bind(sizes)
    assert len(tried) == 1


def test_mosaic_gets_the_tiles_for_its_rows(modules):
    given = []

    def ragged_dot(lhs, rhs, *, group_sizes, block_m, block_n, **options):
        assert options == {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
        given.append((block_m, block_n))
        return pearl_jax.grouped_matmul(lhs, rhs, group_sizes)

    modules["jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"] = {"ragged_dot": ragged_dot}
    assert checked("mosaic") == (["mosaic 64x256"], {})
    both = (["mosaic 64x256", "mosaic 128x128"], {})
    assert checked("mosaic", sizes=np.int32([64] * 3)) == both
    assert checked("mosaic", sizes=np.int32([65] * 3)) == (["mosaic 128x128"], {})
    assert set(given) == {(64, 256), (128, 128)}


def test_mosaic_of_an_outer_product(modules):
    def transposed_ragged_dot(lhs, rhs, *, group_sizes, block_m, block_n, **options):
        assert options == {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
        return pearl_jax.grouped_outer(lhs, rhs, group_sizes)

    name = "jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu"
    modules[name] = {"transposed_ragged_dot": transposed_ragged_dot}
    assert checked("mosaic", "wgrad") == (["mosaic 64x256", "mosaic 128x128"], {})


def test_mosaic_on_blackwell(modules, on_blackwell):
    def ragged_dot_kernel(lhs, rhs, group_sizes, config):
        assert (config.tile_m, config.tile_n, config.tile_k) == (128, 128, 64)
        assert config.grid_minor_dim == "n"
        if config.collective:
            raise ValueError("m=6 must be divisible by tile_m=256")
        return pearl_jax.grouped_matmul(lhs, rhs, group_sizes)

    gpu = "jax.experimental.pallas.ops.gpu"
    modules[f"{gpu}.blackwell_ragged_dot_mgpu"] = {
        "ragged_dot_kernel": ragged_dot_kernel,
        "TuningConfig": types.SimpleNamespace,
    }
    dimension = types.SimpleNamespace(N="n")
    modules[f"{gpu}.blackwell_matmul_mgpu"] = {"MatmulDimension": dimension}
    ran, notes = checked("mosaic")
    assert ran == ["mosaic one 4 steps", "mosaic one 6 steps"]
    why = "ValueError: m=6 must be divisible by tile_m=256"
    assert notes == {f"mosaic pair {steps} steps": why for steps in (4, 6)}


def test_tokamax_gets_the_signature_of_jax(modules):
    def ragged_dot(lhs, rhs, group_sizes, *, implementation):
        if implementation == "triton":
            raise ValueError("Unknown implementation: triton")
        assert implementation == "mosaic"
        return pearl_jax.ragged_dot(lhs, rhs, group_sizes)

    def ragged_dot_general(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, **options):
        assert list(options) == ["implementation"]
        return pearl_jax.ragged_dot_general(lhs, rhs, group_sizes, ragged_dot_dimension_numbers)

    modules["tokamax"] = {"ragged_dot": ragged_dot, "ragged_dot_general": ragged_dot_general}
    ran, notes = checked("tokamax")
    assert ran == ["tokamax mosaic"]
    assert notes == {"tokamax triton": "ValueError: Unknown implementation: triton"}
    assert checked("tokamax", "wgrad") == (["tokamax mosaic", "tokamax triton"], {})


def test_transformer_engine_gets_tensors_with_group_sizes(modules):
    class Tensor(types.SimpleNamespace):
        pass

    def grouped_gemm(lhs, rhs, contracting_dims):
        for x in lhs, rhs:
            assert x.original_shape == x.data.shape
            assert x.amax is x.last_dims is None
        assert lhs.first_dims.dtype == jnp.int32
        if contracting_dims == ((1,), (1,)):
            assert rhs.first_dims is None
            return pearl_jax.grouped_matmul(lhs.data, rhs.data, lhs.first_dims)
        assert contracting_dims == ((0,), (0,))
        assert rhs.first_dims is lhs.first_dims
        return pearl_jax.grouped_outer(lhs.data, rhs.data, lhs.first_dims)

    modules["transformer_engine.jax.cpp_extensions"] = {"grouped_gemm": grouped_gemm}
    modules["transformer_engine.jax.quantize"] = {"GroupedNoScaleTensor": Tensor}
    assert checked("te") == checked("te", "wgrad") == (["te"], {})


def test_cudnn_says_that_it_is_for_blackwell(modules):
    for form in ("fwd", "wgrad"):
        ran, notes = checked("cudnn", form)
        assert not ran
        assert notes["cudnn"] == "its kernel is for Blackwell (10.x), this is cpu (no GPU)"


def test_cudnn_gets_addresses_of_weights_and_ends_of_groups(modules, on_blackwell):
    shape, sizes = shapes.Shape(2, 16, 8), np.int32([256, 512])
    weights = np.asarray(problem("fwd", shape, 768).operands["gnk"][0][1])

    def grouped_gemm_jax_sm100(a, ends, alpha, pointers, n, prob):
        assert a.shape == (768, 16, 1)
        assert (ends.dtype, ends.shape) == (jnp.int32, (2,))
        assert (alpha.dtype, alpha.shape) == (jnp.float32, (2,))
        assert (pointers.dtype, pointers.shape) == (jnp.uint8, (16,))
        assert n == 8
        assert (prob.dtype, prob.shape) == (jnp.float32, (768, 1, 1))
        low, high = pointers.reshape(2, 2, 4)[:, 0], pointers.reshape(2, 2, 4)[:, 1]
        apart = [jax.lax.bitcast_convert_type(x[1], jnp.uint32) for x in (low, high)]
        before = [jax.lax.bitcast_convert_type(x[0], jnp.uint32) for x in (low, high)]
        # The distance of two experts, in the low words: 8 * 16 elements of 2 bytes.
        right = (apart[0] - before[0]) == 256
        sizes = jnp.diff(ends, prepend=0)
        out = pearl_jax.grouped_matmul(a[:, :, 0], weights, sizes, transpose_rhs=True)
        return jnp.where(right & (alpha[0] == 1) & (prob[0, 0, 0] == 1), out, jnp.nan)[
            :, :, None
        ], None

    def grouped_gemm_wgrad_jax_sm100(a, b, ends):
        assert (a.shape, b.shape) == ((16, 768), (768, 8))
        out = pearl_jax.grouped_outer(a.T, b, jnp.diff(ends, prepend=0))
        return {"wgrad_tensor": out}

    modules["cudnn"] = {
        "grouped_gemm_jax_sm100": grouped_gemm_jax_sm100,
        "grouped_gemm_wgrad_jax_sm100": grouped_gemm_wgrad_jax_sm100,
    }
    assert checked("cudnn", "fwd", sizes, shape) == (["cudnn"], {})
    assert checked("cudnn", "wgrad", sizes, shape) == (["cudnn"], {})
    _, notes = checked("cudnn", "fwd", np.int32([255, 513]), shape)
    assert notes == {"cudnn": "takes groups of a multiple of 256 rows only"}


# On torch.


class Tensor(np.ndarray):
    """As torch's: transpose swaps two axes."""

    device = "gpu"

    def t(self):
        return self.T

    def transpose(self, *axes):
        return self.swapaxes(*axes)

    def new_zeros(self, shape):
        return np.zeros(shape, self.dtype).view(Tensor)


def tensor(values, device, dtype=np.int64):
    assert device == "gpu"
    return np.array(values, dtype).view(Tensor)


def torch_grouped_mm(a, b, offs):
    assert offs.dtype == np.int32
    if b.ndim == 3:
        return np.concatenate([x @ w for x, w in zip(np.split(a, offs[:-1]), b)])
    return np.stack([x @ y for x, y in zip(np.split(a, offs[:-1], 1), np.split(b, offs[:-1]))])


TORCH = types.SimpleNamespace(
    int32=np.int32,
    tensor=tensor,
    empty=lambda *shape, dtype, device: np.full(shape, np.nan, dtype).view(Tensor),
    bmm=np.matmul,
    _grouped_mm=torch_grouped_mm,
)


@pytest.fixture
def operands(rng):
    """lhs, rhs of a matmul with weights (g, n, k), and of an outer product, of 6 rows."""
    shapes = (6, 4), (3, 5, 4), (6, 5)
    lhs, rhs, other = (rng.standard_normal(shape).view(Tensor) for shape in shapes)
    return {"fwd": (lhs, rhs), "wgrad": (lhs, other)}


def check_call(make_call, operands, sizes, form="fwd"):
    """Twice, as what is captured runs many times."""
    call, finish = make_call(TORCH, *operands[form], sizes)
    oracle_of = {"fwd": oracle.grouped_matmul, "wgrad": oracle.grouped_outer}[form]
    options = {"transpose_rhs": True} if form == "fwd" else {}
    want = oracle_of(*(x.view(np.ndarray) for x in operands[form]), sizes, **options)
    for _ in range(2):
        out = call()
        got = finish(out) if finish else out
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [SIZES, EVEN], ids=["uneven", "even"])
def test_what_torch_is_asked_for(operands, sizes):
    check_call(peers._torch_grouped_mm, operands, sizes)
    check_call(peers._torch_grouped_outer, operands, sizes, "wgrad")


def test_what_cublas_is_asked_for(operands):
    check_call(peers._torch_bmm, operands, EVEN)
    check_call(peers._torch_bmm_outer, operands, EVEN, "wgrad")


def test_what_triton_kernels_is_asked_for(operands, modules):
    def matmul(a, b, bias, a_ragged_metadata):
        sizes, rows = a_ragged_metadata
        assert bias is None
        assert (sizes.dtype, rows) == (np.int32, 6)
        assert b.shape == (3, 4, 5)
        return torch_grouped_mm(a, b, np.cumsum(sizes, dtype=np.int32))

    modules["triton_kernels.matmul"] = {"matmul": matmul}
    modules["triton_kernels.tensor"] = {
        "make_ragged_tensor_metadata": lambda sizes, rows: (sizes, rows)
    }
    check_call(peers._triton, operands, SIZES)


def make_calls(monkeypatch, variants, form):
    """Variant -> make_call that it gives to torch_candidate."""
    monkeypatch.setattr(peers, "torch_candidate", lambda make_call, problem, column: make_call)
    return variants(problem(form), None)


@pytest.mark.parametrize("form", ["fwd", "wgrad"])
def test_what_quack_is_asked_for(operands, modules, monkeypatch, form):
    def gemm(a, b, out, *, config, cu_seqlens_m=None, cu_seqlens_k=None):
        assert not config.is_dynamic_persistent
        assert config.device_capacity == 9
        bounds = cu_seqlens_m if form == "fwd" else cu_seqlens_k
        assert bounds[0] == 0
        out[:] = torch_grouped_mm(a, b, bounds[1:])

    tuned = types.SimpleNamespace(fn=gemm)
    modules["quack.gemm_interface"] = {"gemm_tuned": tuned}
    modules["quack.gemm_config"] = {"GemmConfig": types.SimpleNamespace}
    monkeypatch.setattr(peers, "_capability", lambda: 9.0)
    variants = peers.FORMS[form].peers["quack"].variants
    found = make_calls(monkeypatch, variants, form)
    assert list(found) == ["128x128", "128x192", "128x256", "256x128"]
    for make_call in found.values():
        check_call(make_call, operands, SIZES, form)


@pytest.mark.parametrize("sizes", [SIZES, EVEN, np.int32([0, 0, 6])], ids=str)
def test_what_deep_gemm_is_asked_for(operands, modules, monkeypatch, sizes):
    """A group starts at a multiple of 4 rows here."""
    lhs, _ = operands["fwd"]
    lhs[0] = 7

    def contiguous(a, b, d, groups):
        assert len(a) == len(d) == len(groups) == sum(-(-size // 4) * 4 for size in sizes)
        for i, (row, group) in enumerate(zip(a, groups)):
            assert i % 4 == 0 or group in (-1, groups[i - 1])
            assert group >= 0 or not row.any()
            d[i] = row @ b[group].T if group >= 0 else np.nan

    def masked(a, b, d, rows, expected):
        assert expected == 2
        np.testing.assert_array_equal(rows, sizes)
        assert a.shape[:2] == d.shape[:2] == (3, max(sizes))
        for i, count in enumerate(rows):
            d[i, :count], d[i, count:] = a[i, :count] @ b[i].T, np.nan

    alignment = []
    modules["deep_gemm"] = {
        "get_theoretical_mk_alignment_for_contiguous_layout": lambda: 4,
        "set_mk_alignment_for_contiguous_layout": alignment.append,
        "m_grouped_bf16_gemm_nt_contiguous": contiguous,
        "m_grouped_bf16_gemm_nt_masked": masked,
    }
    found = make_calls(monkeypatch, peers._deep_gemm, "fwd")
    assert list(found) == ["contiguous", "masked"]
    for make_call in found.values():
        check_call(make_call, operands, sizes)
    assert alignment == [4]


def test_a_graph_of_torch_holds_calls_on_all_copies(monkeypatch, modules):
    """What is captured is all calls, in turn on the copies; the first gives the result."""
    captured = []

    class Graph:
        def replay(self):
            captured.append("replay")

    @jax.tree_util.Partial
    def nothing(*args, **kwargs):
        return None

    class Scope:
        def __init__(self, *args, **kwargs):
            captured.append(type(self).__name__)

        def __enter__(self):
            captured.append("begin")

        def __exit__(self, *args):
            captured.append("end")

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: types.SimpleNamespace(wait_stream=nothing),
        current_stream=nothing,
        stream=Scope,
        synchronize=nothing,
        CUDAGraph=Graph,
        graph=Scope,
    )
    modules["torch"] = {"cuda": cuda, "from_dlpack": lambda x: np.array(x).view(Tensor)}
    monkeypatch.setattr(forms.Problem, "calls", lambda self, column: 3)
    monkeypatch.setattr(protocol, "COLD_BYTES", 1500)  # of 960 in one copy
    p = problem()
    assert len(p.operands["gnk"]) == 2
    numbers = iter(range(10))

    def make_call(torch, lhs, rhs, group_sizes):
        number = next(numbers)

        def call():
            captured.append(number)
            return np.full((2, 24), number, np.float32)

        return call, lambda out: out + 10

    ready = forms.torch_candidate(make_call, p, "gnk")(SIZES)
    assert captured == ["Scope", "begin", 0, 1, "end", "Scope", "begin", 0, 1, 0, "end"]
    monkeypatch.setattr(jnp, "from_dlpack", jnp.asarray)
    np.testing.assert_array_equal(ready.result(), np.full((6, 8), 10))
    assert captured[-1] == "replay"
    ready.burst.wait(ready.burst.start(4))
    assert captured[-4:] == ["replay"] * 4
    assert ready.burst.calls == 3


def test_modules_that_fail_while_imported_say_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(forms.Absent, match="tokamax cannot be imported: ModuleNotFoundError"):
        forms.import_peer("tokamax")
