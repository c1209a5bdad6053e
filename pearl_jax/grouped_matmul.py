"""The public functions, and the one place where arguments are checked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify

from pearl_jax import cuda, library, primitives, reference, tiling

_DTYPES = tuple(
    jnp.dtype(d)
    for d in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
)

check_group_sizes = jax.make_user_context(default_value=False)
"""Context manager: ``with pearl_jax.check_group_sizes(True):`` group sizes are checked.

Calls traced inside report negative sizes, and sizes that sum to more rows than there
are, through ``jax.experimental.checkify``; outside they are clamped without a word.
Under ``jax.jit`` wrap the function with ``checkify.checkify``.

  >>> import jax.numpy as jnp, pearl_jax
  >>> from jax.experimental import checkify
  >>> x, w = jnp.ones((4, 2)), jnp.ones((2, 2, 3))
  >>> with pearl_jax.check_group_sizes(True):
  ...     error, y = checkify.checkify(pearl_jax.grouped_matmul)(x, w, jnp.array([3, 2]))
  >>> print(error.get().splitlines()[0])
  grouped_matmul: group_sizes sum to more than the 4 rows of lhs, got [3 2] (`check` failed)
"""


def grouped_matmul(
    lhs,
    rhs,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    *,
    transpose_rhs=False,
    implementation=None,
    tile=None,
):
    """lhs (m, k), rhs (g, k, n), group_sizes (g,) -> (m, n): rows of group i times rhs[i].

    The first group_sizes[0] rows of lhs are multiplied with rhs[0], the next
    group_sizes[1] rows with rhs[1], and so on. Rows past sum(group_sizes) are exactly 0
    in the output, whatever lhs holds there. Differentiable to any order in lhs and rhs;
    works under jit, grad, vmap over any operand, scan, remat, shard_map and sharded jit.
    Products are accumulated in float32 (float64 for float64, int32 for integers) and
    the result is the same bits in every run. Policies of ``jax.checkpoint`` know the
    result by the name "grouped_matmul".

    Args:
      lhs: (m, k) rows sorted by group: bfloat16, float16, float32, float64,
        float8_e4m3fn, float8_e5m2 or int8.
      rhs: (g, k, n) weights, or (g, n, k) with transpose_rhs; any of the same dtypes.
      group_sizes: (g,) rows of each group, any integer dtype. Read on the device only:
        new values never recompile. Negative sizes count as 0, and the sum is cut off
        at m; see :data:`check_group_sizes` to have both reported.
      precision: as in ``jax.lax.dot_general``.
      preferred_element_type: dtype of the result, as in ``jax.lax.dot_general``; by
        default the wider of the two operands' dtypes.
      group_offset: integer scalar or (1,). rhs then holds only the groups
        [offset, offset + rhs.shape[0]) of group_sizes, which may be longer; rows of other
        groups are 0 in the output, so that the sum over all parts is the whole result.
      transpose_rhs: whether rhs is (g, n, k). Nothing is copied either way.
      implementation: None (the best for the platform), "cuda" or "xla".
      tile: a :class:`TileConfig` instead of the automatic choice.

    Returns:
      (m, n) array.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit together, or an option is not supported.

    The operation is ``jax.lax.ragged_dot`` at 1/g of its arithmetic.

      >>> import jax.numpy as jnp, pearl_jax
      >>> x = jnp.array([[1., 2.], [3., 4.], [5., 6.]])
      >>> w = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
      >>> print(pearl_jax.grouped_matmul(x, w, jnp.array([2, 1])))
      [[ 1.  2.]
       [ 3.  4.]
       [50. 60.]]
    """
    op = "grouped_matmul"
    lhs, rhs, shapes = _arrays(op, lhs, rhs, (2, 3))
    if not isinstance(transpose_rhs, bool):
        raise TypeError(f"{op}: transpose_rhs must be a bool, got {transpose_rhs!r}")
    axis = 2 if transpose_rhs else 1
    _require_equal(op, "the k of lhs", lhs.shape[1], f"axis {axis} of rhs", rhs.shape[axis], shapes)
    group_sizes, group_offset = _groups(op, lhs, group_sizes, group_offset, shapes)
    _require_groups(op, "rhs", rhs.shape[0], group_sizes, group_offset, shapes)
    return primitives.bind(
        primitives.grouped_matmul_p,
        lhs,
        rhs,
        group_sizes,
        jnp.int32(0) if group_offset is None else group_offset,
        transpose_rhs=transpose_rhs,
        **_options(op, lhs, rhs, precision, preferred_element_type, implementation, tile),
    )


def grouped_outer(
    lhs,
    rhs,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    *,
    num_groups=None,
    accumulate=None,
    implementation=None,
    tile=None,
):
    """lhs (m, k), rhs (m, n), group_sizes (g,) -> (g, k, n): lhs_i^T rhs_i of each group i.

    The rows of both operands are cut into groups as in :func:`grouped_matmul`, whose
    gradient with respect to its weights this is. Rows of no group contribute nothing,
    whatever they hold; an empty group gives exactly 0. Policies of ``jax.checkpoint``
    know the result by the name "grouped_outer".

    Args:
      lhs: (m, k) rows sorted by group, dtypes as in :func:`grouped_matmul`.
      rhs: (m, n) rows sorted by group.
      group_sizes: (g,) rows of each group, any integer dtype.
      precision: as in ``jax.lax.dot_general``.
      preferred_element_type: dtype of the result, as in ``jax.lax.dot_general``.
      group_offset: integer scalar or (1,). The result then holds the groups
        [offset, offset + num_groups) of group_sizes.
      num_groups: how many groups the result holds; by default all of group_sizes.
        Only with group_offset. Groups past the last one are 0.
      accumulate: (g, k, n) array of the result's dtype that the result is added to, in
        the accumulator's dtype and rounded once; a GPU kernel does so in place where the
        array is donated or not used again. Differentiable in it too.
      implementation: None (the best for the platform), "cuda" or "xla".
      tile: a :class:`TileConfig` instead of the automatic choice.

    Returns:
      (g, k, n) array.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit together, or an option is not supported.

    The operation is the ragged-contracting mode of ``jax.lax.ragged_dot_general``.

      >>> import jax.numpy as jnp, pearl_jax
      >>> x = jnp.array([[1.], [2.], [3.]])
      >>> print(pearl_jax.grouped_outer(x, x, jnp.array([2, 0, 1]))[:, 0, 0])
      [5. 0. 9.]
    """
    op = "grouped_outer"
    lhs, rhs, shapes = _arrays(op, lhs, rhs, (2, 2))
    _require_equal(op, "the m of lhs", lhs.shape[0], "the m of rhs", rhs.shape[0], shapes)
    group_sizes, group_offset = _groups(op, lhs, group_sizes, group_offset, shapes)
    if num_groups is None:
        num_groups = group_sizes.shape[0]
    elif group_offset is None:
        raise ValueError(
            f"{op}: num_groups needs group_offset, got num_groups={num_groups!r} alone"
        )
    elif (
        isinstance(num_groups, bool)
        or not isinstance(num_groups, (int, np.integer))
        or num_groups < 0
    ):
        raise ValueError(f"{op}: num_groups must be an int of at least 0, got {num_groups!r}")
    _require_groups(op, "the result", num_groups, group_sizes, group_offset, shapes)
    options = _options(op, lhs, rhs, precision, preferred_element_type, implementation, tile)
    shape = (int(num_groups), lhs.shape[1], rhs.shape[1])
    return primitives.bind(
        primitives.grouped_outer_p,
        lhs,
        rhs,
        group_sizes,
        jnp.int32(0) if group_offset is None else group_offset,
        *_accumulate(op, accumulate, shape, options["out_dtype"], shapes),
        num_groups=int(num_groups),
        reduce_axes=(),
        **options,
    )


def _accumulate(op, x, shape, dtype, shapes):
    """What the result is added to, as one or no operand."""
    if x is None:
        return ()
    x = _as_array(op, "accumulate", x)
    if x.shape != shape or x.dtype != dtype:
        expected = _text(jax.ShapeDtypeStruct(shape, dtype))
        raise ValueError(
            f"{op}: accumulate must be like the result {expected}, got {_text(x)} {shapes}"
        )
    return (x,)


def _arrays(op, lhs, rhs, ranks):
    """Both matrices as arrays of supported dtype and rank, and their text for messages."""
    lhs, rhs = _as_array(op, "lhs", lhs), _as_array(op, "rhs", rhs)
    # A weakly typed operand takes the other's dtype, as everywhere in jax.numpy.
    weak = jax.typeof(lhs).weak_type, jax.typeof(rhs).weak_type
    if weak[0] != weak[1]:
        dtype = jnp.result_type(lhs, rhs)
        lhs, rhs = (lhs.astype(dtype), rhs) if weak[0] else (lhs, rhs.astype(dtype))
    shapes = f"(lhs {_text(lhs)}, rhs {_text(rhs)})"
    for name, x, rank in (("lhs", lhs, ranks[0]), ("rhs", rhs, ranks[1])):
        if x.ndim != rank:
            raise ValueError(f"{op}: {name} must have {rank} axes, got {x.ndim} {shapes}")
        if x.dtype not in _DTYPES:
            names = ", ".join(d.name for d in _DTYPES)
            raise TypeError(
                f"{op}: dtype of {name} must be one of {names}, got {x.dtype.name} {shapes}"
            )
    if isinstance(lhs.shape[0], int) and lhs.shape[0] >= 2**31:
        raise ValueError(f"{op}: lhs must have fewer than 2**31 rows, got {lhs.shape[0]} {shapes}")
    return lhs, rhs, shapes


def _as_array(op, name, x):
    if not (isinstance(x, (jax.Array, np.ndarray, np.generic)) or hasattr(x, "__jax_array__")):
        raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}")
    return jnp.asarray(x)


def _text(x):
    short = x.dtype.name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u")
    return f"{short.replace('int', 'i')}[{','.join(map(str, x.shape))}]"


def _require_equal(op, one, one_size, other, other_size, shapes):
    if one_size != other_size:
        raise ValueError(f"{op}: {one} is {one_size} but {other} is {other_size} {shapes}")


def _require_groups(op, name, count, group_sizes, group_offset, shapes):
    given = group_sizes.shape[0]
    if group_offset is None:
        if count != given:
            raise ValueError(
                f"{op}: {name} has {count} groups but group_sizes has {given} {shapes}; "
                f"a part of the groups needs group_offset"
            )
    elif count > given:
        raise ValueError(
            f"{op}: {name} has {count} groups, more than the {given} of group_sizes {shapes}"
        )


def _groups(op, lhs, group_sizes, group_offset, shapes):
    """group_sizes and group_offset as int32; their values are looked at only when asked."""
    group_sizes = _as_int32(op, "group_sizes", group_sizes)
    if group_sizes.ndim != 1:
        raise ValueError(f"{op}: group_sizes must have 1 axis, got {_text(group_sizes)} {shapes}")
    if group_offset is not None:
        if isinstance(group_offset, int) and not isinstance(group_offset, bool):
            group_offset = np.asarray(group_offset)
        group_offset = _as_int32(op, "group_offset", group_offset)
        if group_offset.shape not in ((), (1,)):
            raise ValueError(
                f"{op}: group_offset must be a scalar or have shape (1,), "
                f"got {_text(group_offset)} {shapes}"
            )
        group_offset = group_offset.reshape(())
    if check_group_sizes.value:
        _check_values(op, lhs.shape[0], group_sizes)
    return group_sizes, group_offset


def _as_int32(op, name, x):
    """Converts by clamping, so that no value of a wider dtype wraps around."""
    if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.integer):
        # Before jax sees it: without 64-bit mode it would cut off the upper half.
        x = np.clip(x, -(2**31), 2**31 - 1).astype(np.int32) if x.dtype.itemsize > 4 else x
    x = _as_array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must have an integer dtype, got {_text(x)}")
    info, int32 = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if info.max > int32.max:
        x = jnp.clip(x, max(info.min, int32.min), int32.max)
    return x.astype(jnp.int32)


def _check_values(op, m, group_sizes):
    checkify.check(
        jnp.all(group_sizes >= 0),
        f"{op}: group_sizes must not be negative, got {{sizes}}",
        sizes=group_sizes,
    )
    bounds = reference.group_bounds(group_sizes, jnp.int32(0), group_sizes.shape[0], m)
    checkify.check(
        jnp.all(jnp.diff(bounds) >= group_sizes),  # no group was cut
        f"{op}: group_sizes sum to more than the {m} rows of lhs, got {{sizes}}",
        sizes=group_sizes,
    )


def _options(op, lhs, rhs, precision, preferred_element_type, implementation, tile):
    """The parameters that both primitives share, in the form the primitives take."""
    if implementation not in (None, "xla", "cuda"):
        raise ValueError(
            f"{op}: implementation must be None, 'xla' or 'cuda', got {implementation!r}"
        )
    out_dtype = _out_dtype(op, lhs, rhs, preferred_element_type)
    precision = _precision(op, precision)
    if implementation == "cuda":
        reason = cuda.unsupported(lhs.dtype, rhs.dtype, out_dtype, precision)
        if reason := reason or library.unavailable():
            raise ValueError(
                f"{op}: implementation='cuda' cannot run, {reason}; None and 'xla' run everywhere"
            )
    if tile is not None and not isinstance(tile, tiling.TileConfig):
        raise TypeError(f"{op}: tile must be a TileConfig or None, got {tile!r}")
    return {
        "precision": precision,
        "out_dtype": out_dtype,
        "implementation": implementation,
        "tile": tile,
    }


def _precision(op, precision):
    """None, a Precision, a pair of them, or a DotAlgorithmPreset: the forms of jax.lax."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    if precision is None or isinstance(
        precision, (lax.Precision, lax.DotAlgorithmPreset, lax.DotAlgorithm)
    ):
        return precision
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        pair = tuple(_precision(op, p) for p in precision)
        if all(p is None or isinstance(p, lax.Precision) for p in pair):
            return tuple(lax.Precision.DEFAULT if p is None else p for p in pair)
    elif isinstance(precision, str):
        if precision in lax.DotAlgorithmPreset.__members__:
            return lax.DotAlgorithmPreset[precision]
        try:
            return lax.Precision(precision)
        except ValueError:
            pass
    raise ValueError(
        f"{op}: precision must be what jax.lax.dot_general takes: None, a jax.lax.Precision, its "
        f"name, a pair of these, a DotAlgorithm or a DotAlgorithmPreset; got {precision!r}"
    )


def _out_dtype(op, lhs, rhs, preferred):
    """The result's dtype by the rules of jax.lax.dot_general."""

    def width(dtype):
        if jnp.issubdtype(dtype, jnp.integer):
            return (-1, -1)
        return (jnp.finfo(dtype).maxexp, jnp.finfo(dtype).nmant)

    dtype = max(lhs.dtype, rhs.dtype, key=width)
    if preferred is None:
        return dtype
    try:
        preferred = jnp.dtype(preferred)
    except TypeError:
        raise TypeError(
            f"{op}: preferred_element_type must be a dtype, got {preferred!r}"
        ) from None
    if preferred.itemsize == 8 and not jax.config.jax_enable_x64:  # pyright: ignore
        preferred = jax.dtypes.canonicalize_dtype(preferred)
    integer = jnp.issubdtype(dtype, jnp.integer)
    allowed = jnp.issubdtype(preferred, jnp.floating) or (
        integer and jnp.issubdtype(preferred, jnp.signedinteger)
    )
    if not allowed or preferred.itemsize < dtype.itemsize:
        raise TypeError(
            f"{op}: preferred_element_type must be at least as wide as the operands and of their "
            f"kind, got {preferred.name} for {lhs.dtype.name} and {rhs.dtype.name}"
        )
    return preferred
