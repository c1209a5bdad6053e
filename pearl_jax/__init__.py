"""pearl_jax: grouped matmul for Mixture-of-Experts, as a JAX primitive."""

from pearl_jax.grouped_matmul import check_group_sizes as check_group_sizes
from pearl_jax.grouped_matmul import grouped_matmul as grouped_matmul
from pearl_jax.grouped_matmul import grouped_outer as grouped_outer
from pearl_jax.ragged_dot import ragged_dot as ragged_dot
from pearl_jax.ragged_dot import ragged_dot_general as ragged_dot_general
from pearl_jax.tiling import TileConfig as TileConfig

__version__ = "0.1.0"
