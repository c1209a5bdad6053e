"""The grouped matmuls under the names and signatures of jax.lax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pearl_jax.grouped_matmul import grouped_matmul, grouped_outer


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    out_sharding=None,
):
    """lhs (m, k), rhs (g, k, n), group_sizes (g,) -> (m, n), as ``jax.lax.ragged_dot``.

    :func:`grouped_matmul` under the signature of jax.lax, so that one import line
    switches a code base. group_offset works here, as an integer scalar or (1,).

    Args:
      lhs, rhs, group_sizes, precision, preferred_element_type, group_offset: as in
        :func:`grouped_matmul`.
      out_sharding: a PartitionSpec or NamedSharding for the result.

    Raises:
      TypeError, ValueError: as in :func:`grouped_matmul`.

      >>> import jax.numpy as jnp, pearl_jax
      >>> y = pearl_jax.ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2]))
      >>> y.shape
      (3, 4)
    """
    out = grouped_matmul(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
    return _shard("ragged_dot", out, out_sharding)


def ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    out_sharding=None,
):
    """As ``jax.lax.ragged_dot_general``, in its three canonical forms.

      rows ragged            (m, k), (g, k, n) -> (m, n)
      rows ragged            (m, k), (g, n, k) -> (m, n)
      contraction ragged     (m, k), (m, n) -> (g, k, n)

    Each may have batch dimensions anywhere, which lead in the result; group_sizes is
    then (g,) for all of them or (*batch, g).

    Args:
      lhs, rhs, group_sizes, precision, preferred_element_type, group_offset: as in
        :func:`grouped_matmul`.
      ragged_dot_dimension_numbers: a ``jax.lax.RaggedDotDimensionNumbers``.
      out_sharding: a PartitionSpec or NamedSharding for the result.

    Raises:
      NotImplementedError: dimension numbers of another form.
      TypeError, ValueError: as in :func:`grouped_matmul`.

      >>> import jax, jax.numpy as jnp, pearl_jax
      >>> dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> x = jnp.ones((3, 2))
      >>> pearl_jax.ragged_dot_general(x, x, jnp.array([1, 2]), dims).shape
      (2, 2, 2)
    """
    op = "ragged_dot_general"
    if not isinstance(ragged_dot_dimension_numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            f"{op}: ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, "
            f"got {ragged_dot_dimension_numbers!r}"
        )
    for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        if not hasattr(x, "shape"):
            raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}")
    dims = ragged_dot_dimension_numbers
    contract, batch = dims.dot_dimension_numbers
    matrix_axes = _without_batch(batch, lhs.ndim, rhs.ndim)
    form = tuple(
        tuple(matrix_axes[side].get(axis) for axis in axes)
        for side, axes in (
            (0, contract[0]),
            (1, contract[1]),
            (0, dims.lhs_ragged_dimensions),
            (1, dims.rhs_group_dimensions),
        )
    )
    ranks = lhs.ndim - len(batch[0]), rhs.ndim - len(batch[1])
    forms = {
        ((2, 3), ((1,), (1,), (0,), (0,))): (grouped_matmul, {}),
        ((2, 3), ((1,), (2,), (0,), (0,))): (grouped_matmul, {"transpose_rhs": True}),
        ((2, 2), ((0,), (0,), (0,), ())): (grouped_outer, {}),
    }
    if (ranks, form) not in forms:
        raise NotImplementedError(
            f"{op}: dimension numbers must be (m,k),(g,k,n) or (m,k),(g,n,k) with ragged m and "
            f"groups g, or (m,k),(m,n) contracted over ragged m, each with batch dimensions; got "
            f"{dims} for lhs {lhs.shape} and rhs {rhs.shape}"
        )
    function, options = forms[ranks, form]

    def call(lhs, rhs, group_sizes):
        return function(
            lhs,
            rhs,
            group_sizes,
            precision,
            preferred_element_type,
            group_offset,
            **options,
        )

    sizes_batched = group_sizes.ndim > 1
    if sizes_batched and group_sizes.ndim != 1 + len(batch[0]):
        raise ValueError(
            f"{op}: group_sizes must be (g,) or (*batch, g) with {len(batch[0])} batch axes, "
            f"got {group_sizes.shape}"
        )
    sizes = [[x.shape[i] for i in axes] for x, axes in ((lhs, batch[0]), (rhs, batch[1]))]
    sizes += [list(group_sizes.shape[:-1])] if sizes_batched else []
    if any(s != sizes[0] for s in sizes):
        raise ValueError(
            f"{op}: batch dimensions of lhs, rhs and group_sizes must agree, got {sizes} "
            f"(lhs {lhs.shape}, rhs {rhs.shape}, group_sizes {group_sizes.shape})"
        )
    lhs = jnp.moveaxis(jnp.asarray(lhs), batch[0], range(len(batch[0])))
    rhs = jnp.moveaxis(jnp.asarray(rhs), batch[1], range(len(batch[1])))
    for _ in batch[0]:
        call = jax.vmap(call, (0, 0, 0 if sizes_batched else None))
    return _shard(op, call(lhs, rhs, group_sizes), out_sharding)


def _without_batch(batch, *ndims):
    """For each operand: axis -> its number once the batch axes are gone."""
    return [
        {axis: i for i, axis in enumerate(a for a in range(ndim) if a not in axes)}
        for axes, ndim in zip(batch, ndims)
    ]


def _shard(op, out, out_sharding):
    if out_sharding is None:
        return out
    if not isinstance(out_sharding, (PartitionSpec, NamedSharding)):
        raise TypeError(
            f"{op}: out_sharding must be a PartitionSpec or a NamedSharding, got {out_sharding!r}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(out_sharding, NamedSharding):
        mesh = out_sharding.mesh
    elif mesh.empty:
        raise ValueError(
            f"{op}: out_sharding={out_sharding} needs a mesh, see jax.set_mesh; or give "
            f"a NamedSharding"
        )
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(out, out_sharding)
    return lax.with_sharding_constraint(out, out_sharding)
