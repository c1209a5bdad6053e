"""What runs on a GPU by default, against the oracle: pytest -m gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import SIZES, TOLERANCE, worst_group_error

import pearl_jax

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", SIZES)
def test_values_and_gradients(rng, case, dtype):
    sizes = SIZES[case]
    lhs, y = (jnp.asarray(rng.standard_normal((64, d)), dtype) for d in (72, 100))
    rhs = jnp.asarray(rng.standard_normal((len(sizes), 72, 100)), dtype)
    assert lhs.device.platform == "gpu"
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(lambda a, b: pearl_jax.grouped_matmul(a, b, np.array(sizes)), lhs, rhs)
        d_lhs, d_rhs = vjp(y)
    tolerance = TOLERANCE[dtype]
    assert worst_group_error(out, oracle.grouped_matmul(lhs, rhs, sizes), sizes) < tolerance
    assert worst_group_error(d_lhs, oracle.grouped_matmul(y, rhs, sizes, True), sizes) < tolerance
    assert worst_group_error(d_rhs, oracle.grouped_outer(lhs, y, sizes), sizes) < tolerance
