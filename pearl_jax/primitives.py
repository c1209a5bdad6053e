"""The two primitives and every rule that JAX needs from them.

  grouped_matmul_p   lhs (*b, m, k), rhs (*b, g, k, n) -> (*b, m, n): rows of group i times
                     rhs[i]; with transpose_rhs, rhs is (*b, g, n, k)
  grouped_outer_p    lhs (*b, m, k), rhs (*b, m, n) -> (*b, g, k, n): lhs_i^T rhs_i of group i

The outer product takes one more operand if there is something to add it to: accumulate
(*b, g, k, n), in which it is linear; its axes in reduce_axes have size 1.

Both also take group_sizes (*b, G) int32 and group_offset (*b,) int32: the g groups at
hand are groups [offset, offset + g) of the G. The leading batch axes *b broadcast as in
numpy: vmap adds one, of size 1 for an operand that is not mapped, and so shares that
operand instead of copying it.

Each is linear in lhs and in rhs, and the transposes are again one of the two:

  grouped_matmul    d lhs = grouped_matmul(d out, rhs, transposed)
                    d rhs = grouped_outer(lhs, d out)
  grouped_outer     d lhs = grouped_matmul(rhs, d out, transposed)
                    d rhs = grouped_matmul(lhs, d out)

so derivatives of any order and mode need nothing else. A gradient that the batch shares
is summed over it: grouped_outer does so itself along reduce_axes (batch axes that stay
in the output with size 1), which spares a copy of the weights for each batch entry.
"""

from __future__ import annotations

import functools

import jax
import jax.core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pearl_jax import cuda, reference, sharding

grouped_matmul_p = Primitive("grouped_matmul")
grouped_outer_p = Primitive("grouped_outer")


def bind(primitive, *operands, **params):
    """Binds with operands that agree on the mesh axes they vary over."""
    operands = sharding.vary_alike(*(jnp.asarray(x) for x in operands))
    if sharding.explicit_axes(operands):
        return sharding.bind_explicit(bind, primitive, operands, params)
    return primitive.bind(*operands, **params)


# Abstract evaluation: shapes, dtype, and the mesh axes that the result varies over.


def _matmul_abstract(lhs, rhs, group_sizes, group_offset, *, transpose_rhs, out_dtype, **_):
    batch = reference.batch_shape((lhs, 2), (rhs, 3), (group_sizes, 1), (group_offset, 0))
    n = rhs.shape[-2] if transpose_rhs else rhs.shape[-1]
    return _out_aval((lhs, rhs, group_sizes, group_offset), (*batch, lhs.shape[-2], n), out_dtype)


def _outer_abstract(*operands, num_groups, reduce_axes, out_dtype, **_):
    lhs, rhs, *_ = operands
    batch = reference.batch_shape(*zip(operands, (2, 2, 1, 0, 3)))
    batch = (1 if i in reduce_axes else d for i, d in enumerate(batch))
    shape = (*batch, num_groups, lhs.shape[-1], rhs.shape[-1])
    return _out_aval(operands, shape, out_dtype)


def _out_aval(operands, shape, dtype):
    varying = frozenset().union(*(x.manual_axis_type.varying for x in operands))
    # Operands that carry a mesh agree on it; constants may carry none.
    aval = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
    return aval.update(
        shape=shape,
        dtype=dtype,
        weak_type=False,
        sharding=sharding.replicated(aval.sharding.mesh, len(shape)),
        manual_axis_type=type(aval.manual_axis_type)(varying=varying),
    )


# Derivatives.


def _jvp(primitive, primals, tangents, **params):
    lhs, rhs, *groups = primals[:4]
    lhs_dot, rhs_dot, _, _, *accumulate_dot = tangents
    # The name is for the policies of jax.checkpoint, which decide about what is computed
    # here. Anywhere else it would only be in the way: a name has no transpose.
    out = checkpoint_name(bind(primitive, *primals, **params), primitive.name)
    terms = list(accumulate_dot)
    if type(lhs_dot) is not ad.Zero:
        terms.append(bind(primitive, lhs_dot, rhs, *groups, **params))
    if type(rhs_dot) is not ad.Zero:
        terms.append(bind(primitive, lhs, rhs_dot, *groups, **params))
    out_dot = ad.Zero(jax.typeof(out).to_tangent_aval())
    for x in terms:
        if type(x) is not ad.Zero:  # what only `out` has a batch of is broadcast
            out_dot = ad.add_tangents(out_dot, jnp.broadcast_to(x, out.shape))
    return out, out_dot


def _matmul_transpose(ct, lhs, rhs, *groups, transpose_rhs, out_dtype, **options):
    if type(ct) is ad.Zero:
        return [None] * 4
    if ad.is_undefined_primal(lhs):
        grad = _matmul(ct, rhs, *groups, transpose_rhs=not transpose_rhs, like=lhs, **options)
        return [grad, None, None, None]
    pair = (lhs, ct)
    if transpose_rhs:
        pair, options = pair[::-1], _swap_precision(options)
    num_groups = rhs.aval.shape[-3]
    return [None, _outer(*pair, *groups, num_groups=num_groups, like=rhs, **options), None, None]


def _outer_transpose(
    ct, lhs, rhs, sizes, offset, *accumulate, num_groups, reduce_axes, out_dtype, **options
):
    grads: list = [None] * (4 + len(accumulate))
    if type(ct) is ad.Zero:
        return grads
    for x in accumulate:
        if ad.is_undefined_primal(x):
            grads[4] = _sum_to(ct, x.aval.shape)
    if ad.is_undefined_primal(lhs):
        swapped = _swap_precision(options)
        grads[0] = _matmul(rhs, ct, sizes, offset, transpose_rhs=True, like=lhs, **swapped)
    elif ad.is_undefined_primal(rhs):
        grads[1] = _matmul(lhs, ct, sizes, offset, transpose_rhs=False, like=rhs, **options)
    return grads


def _matmul(lhs, rhs, *groups, like, **params):
    """The matmul as the gradient of `like`: its dtype, and its batch axes."""
    aval = like.aval
    params = _for_gradient(params)
    out = bind(grouped_matmul_p, lhs, rhs, *groups, out_dtype=aval.dtype, **params)
    return _sum_to(out, aval.shape)


def _sum_to(x, shape):
    """The sum over axes of size 1 in shape, as the gradient of what was broadcast from it."""
    shared = tuple(i for i, d in enumerate(shape) if d == 1 and x.shape[i] != 1)
    if shared:
        x = jnp.sum(x, axis=shared, keepdims=True, dtype=x.dtype)
    return jnp.broadcast_to(x, shape)


def _outer(lhs, rhs, *groups, like, **params):
    aval = like.aval
    batch = reference.batch_shape((lhs, 2), (rhs, 2), (groups[0], 1), (groups[1], 0))
    reduce_axes = tuple(i for i, d in enumerate(batch) if aval.shape[i] == 1 and d != 1)
    return bind(
        grouped_outer_p,
        lhs,
        rhs,
        *groups,
        out_dtype=aval.dtype,
        reduce_axes=reduce_axes,
        **_for_gradient(params),
    )


def _for_gradient(params):
    """Without what was asked for by hand: it need not exist for the gradient's operands."""
    implementation = params["implementation"]
    return params | {
        "tile": None,
        "implementation": None if implementation == "cuda" else implementation,
    }


def _swap_precision(options):
    precision = options["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    return options | {"precision": precision}


# Batching: one more leading axis.


def _batch(primitive, operands, dims, **params):
    operands = [
        jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims)
    ]
    if "reduce_axes" in params:
        params["reduce_axes"] = tuple(i + 1 for i in params["reduce_axes"])
    return bind(primitive, *operands, **params), 0


# Lowering: each platform's own implementation, inside whatever sharding is around it.


def _lower_locally(implementation):
    """The lowering of local code: it sees plain shapes, and neither mesh nor varying axes."""

    def lower(ctx, *operands, **params):
        avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        fun = functools.partial(implementation, **params)
        with sharding.no_mesh():
            return mlir.lower_fun(fun, multiple_results=False)(
                ctx.replace(avals_in=avals), *operands
            )

    return lower


def _portable(reference):
    """Plain XLA, on any platform."""

    def run(*operands, implementation, **params):
        if implementation == "cuda":
            raise ValueError(
                f"{reference.__name__}: implementation='cuda' runs on NVIDIA GPUs only, and this "
                f"is for another platform; None and 'xla' run everywhere"
            )
        return reference(*operands, **params)

    return run


def _on_cuda(reference, kernels):
    """The kernels, unless plain XLA is asked for."""

    def run(*operands, implementation, **params):
        if implementation == "xla":
            return reference(*operands, **params)
        return kernels(*operands, implementation=implementation, **params)

    return run


@functools.partial(jax.jit, static_argnums=(0, 1))
def _eager(primitive, params, *operands):
    return primitive.bind(*operands, **dict(params))


def _register(primitive, abstract, transpose, reference, kernels):
    primitive.def_abstract_eval(abstract)
    primitive.def_impl(lambda *xs, **params: _eager(primitive, tuple(params.items()), *xs))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    for platform, local in ((None, _portable(reference)), ("cuda", _on_cuda(reference, kernels))):
        lowering = sharding.partitioned(primitive, _lower_locally(local))
        mlir.register_lowering(primitive, lowering, platform=platform)


_register(
    grouped_matmul_p,
    _matmul_abstract,
    _matmul_transpose,
    reference.grouped_matmul,
    cuda.grouped_matmul,
)
_register(
    grouped_outer_p, _outer_abstract, _outer_transpose, reference.grouped_outer, cuda.grouped_outer
)
