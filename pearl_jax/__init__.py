"""pearl_jax: grouped matmul for Mixture-of-Experts, as a JAX primitive."""

import importlib

from pearl_jax import expert_parallel as expert_parallel
from pearl_jax import moe as moe
from pearl_jax import routing as routing
from pearl_jax.autotune import autotune as autotune
from pearl_jax.grouped_matmul import check_group_sizes as check_group_sizes
from pearl_jax.grouped_matmul import grouped_matmul as grouped_matmul
from pearl_jax.grouped_matmul import grouped_outer as grouped_outer
from pearl_jax.ragged_dot import ragged_dot as ragged_dot
from pearl_jax.ragged_dot import ragged_dot_general as ragged_dot_general
from pearl_jax.selfcheck import selfcheck as selfcheck
from pearl_jax.tiling import TileConfig as TileConfig
from pearl_jax.tuned import tuned_tiles as tuned_tiles

__version__ = "0.1.0"


def __getattr__(name):
    # What needs Flax is imported when it is used.
    if name in ("hf", "nn"):
        return importlib.import_module(f"pearl_jax.{name}")
    raise AttributeError(f"module 'pearl_jax' has no attribute {name!r}")
