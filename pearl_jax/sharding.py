"""How the primitives run on a mesh: what each device computes, and what is summed.

Every array axis belongs to a factor of the problem: rows m, contraction k, columns n,
groups g, and the batch axes. A mesh axis that shards a factor means, for

  grouped_matmul    m, n: nothing to exchange    k: partial sums, psum
                    g: each device holds some groups and computes the rows they own, psum
  grouped_outer     k, n, g: nothing to exchange    m: partial sums, psum

Weights do not move: where one mesh axis shards the groups and also the rows, the rows
are gathered and the psum becomes a reduce-scatter. The psum over k or m is taken in the
accumulator's dtype and rounded once; the one over g adds zeros to one value, so it is
exact in any dtype.

Meshes of type Explicit know all shardings while tracing, and the primitive is bound
inside a shard_map. On meshes of type Auto the compiler chooses them, and the same local
function is handed to it through custom_partitioning.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pearl_jax import reference

_log = logging.getLogger(__name__)


def vary_alike(*arrays):
    """The arrays, cast to vary over the same mesh axes in shard_map.

    The cast is what makes gradients of replicated operands sum over those axes, and
    what keeps shard_map from taking a varying result for a replicated one.
    """
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))

    def cast(x):
        missing = tuple(sorted(varying - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x) for x in arrays]


def place(x, mesh, spec):
    """x sharded by spec along the Explicit axes of mesh; others are the compiler's to choose."""
    explicit = {a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    if not explicit:
        return x
    axes = _axes(NamedSharding(mesh, spec), x.ndim)
    spec = P(*(tuple(a for a in entry if a in explicit) or None for entry in axes))
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def place_like(x, other):
    """x with the Explicit axes of the array other."""
    kind = jax.typeof(other).sharding
    return x if kind.mesh.empty else place(x, kind.mesh, kind.spec)


@dataclasses.dataclass(frozen=True)
class _Factors:
    """Names of the axes of lhs, rhs, group_sizes, group_offset, accumulate and the output."""

    operands: tuple[tuple[str, ...], ...]
    out: tuple[str, ...]
    summed: frozenset[str]

    @classmethod
    def of(cls, operand_shapes, primitive_name, params):
        summed = set()
        if primitive_name == "grouped_matmul":
            rhs = ("g", "n", "k") if params["transpose_rhs"] else ("g", "k", "n")
            core, out = (("m", "k"), rhs, ("s",), ()), ("m", "n")
            summed |= {"k", "g"}
        else:
            out = ("g", "k", "n")
            core = (("m", "k"), ("m", "n"), ("s",), (), out)  # the last if there is one
            summed |= {"m"}
        num_batch = len(operand_shapes[3])
        names = tuple(f"b{i}" for i in range(num_batch))
        summed |= {names[i] for i in params.get("reduce_axes", ())}
        operands = tuple(
            tuple(
                # An axis of size 1 is a factor of its own: it is shared, not sharded.
                names[i] if shape[i] != 1 else f"{names[i]}x{position}"
                for i in range(num_batch)
            )
            + core[position]
            for position, shape in enumerate(operand_shapes)
        )
        out = tuple(f"{b}y" if b in summed else b for b in names) + out
        return cls(operands, out, frozenset(summed))


def no_mesh():
    """The context of code for one device, which must not be sharded once more."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def replicated(mesh, ndim):
    return NamedSharding(mesh, P(*[None] * ndim))


def _axes(sharding, ndim):
    """One tuple of mesh axis names for each array axis; no sharding is none of them."""
    entries = () if sharding is None else tuple(sharding.spec)
    entries += (None,) * (ndim - len(entries))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


class _Plan:
    """Which mesh axes shard which factor, and what one device then computes."""

    def __init__(self, primitive, params, mesh_shape, operands, operand_axes, out_axes=None):
        self.primitive, self.params = primitive, params
        self.factors = _Factors.of([x.shape for x in operands], primitive.name, params)
        self.sizes = {"g": params.get("num_groups")}
        for names, x in zip(self.factors.operands, operands):
            self.sizes |= dict(zip(names, x.shape))

        def fits(factor, axes):
            parts = math.prod(mesh_shape[a] for a in axes)
            return axes and self.sizes[factor] % parts == 0

        asked = {}  # factor -> mesh axes, where tensors disagree as the weights have it
        lhs, rhs, *rest = zip(self.factors.operands, operand_axes)
        out = [] if out_axes is None else [(self.factors.out, out_axes)]
        for names, spec in (rhs, lhs, *rest, *out):
            for factor, axes in zip(names, spec):
                if axes and factor != "s":
                    asked.setdefault(factor, axes)

        self.axes = {}  # each mesh axis goes to one factor, the groups come first
        for factor in sorted(asked, key="g".__ne__):
            free = tuple(a for a in asked[factor] if a not in sum(self.axes.values(), ()))
            if fits(factor, free):
                self.axes[factor] = free

        # A sum that the output wants sharded ends in a reduce-scatter, the others in a psum.
        self.psum = tuple(a for f in self.axes if f in self.factors.summed for a in self.axes[f])
        self.scatter = {}
        out_asked = asked if out_axes is None else dict(zip(self.factors.out, out_axes))
        for factor in self.factors.out:
            axes = tuple(a for a in out_asked.get(factor, ()) if a in self.psum)
            if axes and fits(factor, (*self.axes.get(factor, ()), *axes)):
                self.scatter[factor] = axes
                self.psum = tuple(a for a in self.psum if a not in axes)
        self.groups_here = self.sizes["g"] // math.prod(
            mesh_shape[a] for a in self.axes.get("g", ())
        )

        def scattered(names):
            return P(*((*self.axes.get(f, ()), *self.scatter.get(f, ())) or None for f in names))

        self.out_spec = scattered(self.factors.out)
        lhs, rhs, *groups, accumulate = (*self.factors.operands, ())[:5]
        self.operand_specs = tuple(
            P(*(self.axes.get(f) for f in names)) for names in (lhs, rhs, *groups)
        )
        if accumulate:  # it lies where the sum ends up
            self.operand_specs += (scattered(accumulate),)

    def local(self, bind, lhs, rhs, group_sizes, group_offset, *accumulate):
        """What one device computes from its blocks."""
        params = dict(self.params)
        if "m" in self.axes:
            group_sizes = self._rows_here(group_sizes, lhs.shape[-2])
        if "g" in self.axes:
            group_offset = group_offset + lax.axis_index(self.axes["g"]) * self.groups_here
            if "num_groups" in params:
                params["num_groups"] = self.groups_here
        out_dtype = params["out_dtype"]
        summed = {f for f in self.axes if f in self.factors.summed}
        added = ()  # to the sum over all devices, once
        if summed - {"g"}:
            params["out_dtype"] = reference.accumulator_dtype(lhs.dtype, rhs.dtype, out_dtype)
            accumulate, added = (), accumulate
        out = bind(self.primitive, lhs, rhs, group_sizes, group_offset, *accumulate, **params)
        for factor, axes in self.scatter.items():
            dim = self.factors.out.index(factor)
            out = lax.psum_scatter(out, axes, scatter_dimension=dim, tiled=True)
        if self.psum:
            out = lax.psum(out, self.psum)
        for x in added:
            out = out + x.astype(out.dtype)
        return out.astype(out_dtype)

    def _rows_here(self, group_sizes, m_local):
        """Sizes of the groups' parts that lie in this device's block of rows."""
        g = group_sizes.shape[-1]
        zero = jnp.zeros(group_sizes.shape[:-1], jnp.int32)
        bounds = reference.group_bounds(group_sizes, zero, g, self.sizes["m"])
        first = lax.axis_index(self.axes["m"]) * m_local
        return jnp.diff(jnp.clip(bounds, first, first + m_local), axis=-1)


# Explicit meshes.


def explicit_axes(operands):
    """Mesh axes of type Explicit that shard an operand."""
    axes = set()
    for x in operands:
        kind = jax.typeof(x).sharding
        types = dict(zip(kind.mesh.axis_names, kind.mesh.axis_types))
        spec = _axes(kind, jax.typeof(x).ndim)
        axes |= {a for entry in spec for a in entry if types[a] == AxisType.Explicit}
    return axes


def bind_explicit(bind, primitive, operands, params):
    """Binds inside a shard_map over the Explicit axes; bind is used for the local part."""
    avals = [jax.typeof(x) for x in operands]
    # The mesh of the context, not the operands': vmap takes a sharded batch's axis out of it.
    mesh = jax.sharding.get_abstract_mesh()
    axes = [_axes(a.sharding, a.ndim) for a in avals]
    plan = _Plan(primitive, params, dict(mesh.shape), avals, axes)
    axis_names = explicit_axes(operands)
    if plan.scatter:
        # jax 0.12 cannot lower a reduce-scatter while another axis is still Explicit.
        types = zip(mesh.axis_names, mesh.axis_types)
        axis_names = {a for a, kind in types if kind == AxisType.Explicit}
    operands = [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, plan.operand_specs)
    ]
    return jax.shard_map(
        functools.partial(plan.local, bind),
        mesh=mesh,
        in_specs=plan.operand_specs,
        out_specs=plan.out_spec,
        axis_names=axis_names,
    )(*operands)


# Auto meshes.


def partitioned(primitive, local_lowering):
    """A lowering that lets the compiler shard the primitive; local_lowering is one device's."""

    def lowering(ctx, *operands, **params):
        mesh = _auto_mesh(ctx)
        if mesh is None:
            return local_lowering(ctx, *operands, **params)
        context = mlir.ShardingContext(
            mesh.size, tuple(mesh.devices.flat), abstract_mesh=mesh.abstract_mesh
        )
        ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
        fun = _custom_partitioned(primitive, params, ctx.avals_in)
        return mlir.lower_fun(fun, multiple_results=False)(ctx, *operands)

    return lowering


def _auto_mesh(ctx):
    """The mesh whose axes the compiler shards, or None where there is nothing to shard."""
    context = ctx.module_context.axis_context
    mesh = next((a.sharding.mesh for a in ctx.avals_in if not a.sharding.mesh.empty), None)
    reason = None
    if not isinstance(context, mlir.ShardingContext):
        if mesh is None or AxisType.Auto not in mesh.axis_types:
            return None
        reason = "a shard_map leaves some axes to the compiler; give it all of them"
    elif context.num_devices == 1:
        return None
    elif ctx.module_context.lowering_parameters.for_export:
        reason = "an exported module cannot hold the sharding rule; use an Explicit mesh"
    elif mesh is None:
        reason = "no mesh is known while lowering; use jax.set_mesh"
    elif len(jax.devices()) < mesh.size:
        reason = f"{mesh.size} devices are needed to lower, {len(jax.devices())} are there"
    if mesh is None or reason:
        _log.warning("pearl_jax: sharded without its own rule, weights may be gathered: %s", reason)
        return None
    # Only the shape of the mesh will be read, so any devices will do.
    devices = np.array(jax.devices()[: mesh.size])
    return jax.sharding.Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)


def _custom_partitioned(primitive, params, avals):
    factors = _Factors.of([a.shape for a in avals], primitive.name, params)

    def plan(mesh, operands, out=None):
        axes = [_axes(x.sharding, len(x.shape)) for x in operands]
        out_axes = None if out is None else _axes(out.sharding, len(out.shape))
        return _Plan(primitive, params, dict(mesh.shape), operands, axes, out_axes)

    def partition(mesh, operands, out):
        if jax.__version_info__ < (0, 11):
            # The compiler of jax 0.10 reads the stack frames of the module built below in
            # the table of another module and may follow them in a circle for ever.
            jax.config.update("jax_traceback_in_locations_limit", 0)
        p = plan(mesh, operands, out)

        def local(*operands):
            with no_mesh():
                return p.local(lambda prim, *xs, **ps: prim.bind(*xs, **ps), *operands)

        operand_shardings = tuple(NamedSharding(mesh, spec) for spec in p.operand_specs)
        return mesh, local, NamedSharding(mesh, p.out_spec), operand_shardings

    def infer(mesh, operands, out):
        return NamedSharding(mesh, plan(mesh, operands).out_spec)

    def call(lhs, rhs, group_sizes, group_offset):
        return primitive.bind(lhs, rhs, group_sizes, group_offset, **params)

    def add_to(lhs, rhs, group_sizes, group_offset, accumulate):
        return primitive.bind(lhs, rhs, group_sizes, group_offset, accumulate, **params)

    # Neither *operands nor a default: it would be handed over as one more operand.
    fun = custom_partitioning(call if len(avals) == 4 else add_to)
    rule = ", ".join(" ".join(names) for names in factors.operands) + " -> " + " ".join(factors.out)
    in_order = dict.fromkeys(name for names in factors.operands for name in names)
    fun.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        reduction_factors=tuple(f for f in in_order if f in factors.summed),
        need_replication_factors=("s",),
    )
    return fun
