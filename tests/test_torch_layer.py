"""The layer in torch is the layer of the benchmark, where torch is installed."""

import functools

import benchmarks_by_path  # noqa: F401
import jax
import jax.numpy as jnp
import pytest

import pearl_jax
from benchmarks import forms, moe_layer, shapes, torch_layer

MODEL = shapes.Model(64, 32, num_experts=8, top_k=2, expert_parallel=2)
NOT_RUN = "torch is not installed: its layer was not run"


def make_operands():
    normal = functools.partial(jax.random.normal, shape=(12, 64), dtype=jnp.bfloat16)
    return moe_layer.random_layer(MODEL), normal(jax.random.key(2)), normal(jax.random.key(3))


@pytest.mark.parametrize("name", moe_layer.PASSES)
def test_a_pass_gives_what_the_benchmark_gives(name):
    torch = pytest.importorskip("torch", reason=NOT_RUN)
    operands = make_operands()
    *layer, tokens, target = map(torch.from_dlpack, jax.tree.leaves(operands))
    got = getattr(torch_layer.functions(), name)(layer, tokens, target, MODEL.top_k)
    got = torch_layer.to_jax(name, got, operands[0])
    want = getattr(moe_layer, name)(
        *operands, top_k=MODEL.top_k, contraction=pearl_jax.grouped_matmul
    )
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert float(moe_layer.worst_error(got, want)) < moe_layer.TOLERANCE


def test_without_a_gpu_it_is_absent():
    with pytest.raises(forms.Absent, match=r"torch cannot be imported|torch sees no GPU"):
        torch_layer.compile_pass("forward", (), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", moe_layer.PASSES)
def test_on_a_gpu_it_is_timed(name):
    pytest.importorskip("torch", reason=NOT_RUN)
    operands, reasons = make_operands(), {}
    found = moe_layer.compile_candidates(name, MODEL, operands, ["pearl", "torch"], reasons)
    assert set(found) == {"pearl", "torch"}, reasons
    given = sum(x.nbytes for x in jax.tree.leaves(operands))
    workspaces = 2**26  # of the libraries that torch calls
    assert given < found["torch"].num_bytes < 100 * given + workspaces
