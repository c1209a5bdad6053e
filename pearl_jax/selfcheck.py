"""A quick look whether the grouped matmul is right on the device at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pearl_jax import library
from pearl_jax.grouped_matmul import grouped_matmul, grouped_outer

_SIZES = (5, 0, 130, 1, 64)
_M, _K, _N = 256, 320, 192  # more rows than the groups have
_TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def selfcheck() -> dict[str, float]:
    """Multiplies small random groups on the default device and compares with float64.

    Returns:
      {"bfloat16 (g, k, n)": largest relative error of a group, ...} for each 16-bit dtype and
      float32, both layouts of the weights and the outer product.

    Raises:
      RuntimeError: an error is above the dtype's tolerance, or rows of no group are not 0; the
        text says which, on which device, and whether the compiled kernels ran.

      >>> import pearl_jax
      >>> sorted(pearl_jax.selfcheck())[0]
      'bfloat16 (g, k, n)'
    """
    found, wrong = {}, []
    for dtype, tolerance in _TOLERANCES.items():
        for name, error in _errors(jnp.dtype(dtype)).items():
            found[f"{dtype} {name}"] = error
            if not error <= tolerance:
                wrong.append(f"{dtype} {name} is off by {error:.1e}, more than {tolerance:.0e}")
    if wrong:
        device = jax.devices()[0]
        kernels = device.platform == "gpu" and library.unavailable() is None
        ran = "the compiled kernels, where they take the dtype" if kernels else "plain XLA"
        raise RuntimeError(f"selfcheck: on {device.device_kind}, {ran}: {'; '.join(wrong)}")
    return found


def _errors(dtype):
    rng = np.random.default_rng(0)
    x, y, w = (
        jnp.asarray(rng.standard_normal(shape) / 16, dtype)
        for shape in ((_M, _K), (_M, _N), (len(_SIZES), _K, _N))
    )
    sizes = jnp.asarray(_SIZES)
    matmul, outer = np.zeros((_M, _N)), np.zeros(w.shape)
    x64, y64, w64 = (np.asarray(a, np.float64) for a in (x, y, w))
    first, groups = 0, []
    for i, size in enumerate(_SIZES):
        rows = slice(first, first := first + size)
        matmul[rows], outer[i] = x64[rows] @ w64[i], x64[rows].T @ y64[rows]
        groups.append(rows)
    groups.append(slice(first, _M))
    precision = "highest" if dtype == jnp.float32 else None
    wt = w.swapaxes(1, 2)
    return {
        "(g, k, n)": _worst(grouped_matmul(x, w, sizes, precision), matmul, groups),
        "(g, n, k)": _worst(
            grouped_matmul(x, wt, sizes, precision, transpose_rhs=True), matmul, groups
        ),
        "outer": _worst(grouped_outer(x, y, sizes, precision), outer, range(len(_SIZES))),
    }


def _worst(got, want, parts):
    """The largest relative error of a part; what should be 0 has to be."""
    got = np.asarray(got, np.float64)
    errors = []
    for part in parts:
        error, scale = (np.linalg.norm(a) for a in (got[part] - want[part], want[part]))
        errors.append(error / scale if scale else np.inf * error if error else 0.0)
    return float(np.max(errors))
