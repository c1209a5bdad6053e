"""The arguments: every bad call fails while tracing, and says which operator, argument, rule
and values; every good option takes effect."""

import ast
import contextlib
import importlib
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import pearl_jax
from pearl_jax import TileConfig, grouped_matmul, grouped_outer, ragged_dot, ragged_dot_general

X = np.ones((6, 4), np.float32)  # (m, k)
W = np.ones((3, 4, 5), np.float32)  # (g, k, n)
Y = np.ones((6, 5), np.float32)  # (m, n)
S = np.array([2, 3, 1], np.int32)
LONG = np.array([2, 1, 1, 2], np.int32)
XW = "(lhs f32[6,4], rhs f32[3,4,5])"
XY = "(lhs f32[6,4], rhs f32[6,5])"
DTYPES = "bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2, int8"
PRECISION = (
    "precision must be what jax.lax.dot_general takes: None, a jax.lax.Precision, its name, "
    "a pair of these, a DotAlgorithm or a DotAlgorithmPreset; got "
)
WIDE = "preferred_element_type must be at least as wide as the operands and of their kind, got "
FORMS = (
    "dimension numbers must be (m,k),(g,k,n) or (m,k),(g,n,k) with ragged m and groups g, or "
    "(m,k),(m,n) contracted over ragged m, each with batch dimensions; got RaggedDot"
)


def dims(contract, batch=((), ()), ragged=(0,), group=(0,)):
    return jax.lax.RaggedDotDimensionNumbers((contract, batch), ragged, group)


ROWS = dims(((1,), (1,)))
OUTER = dims(((0,), (0,)), group=())
BATCHED = dims(((2,), (2,)), ((0,), (0,)), ragged=(1,), group=(1,))

# (id, function, arguments, keyword arguments, exception, whole beginning of the message)
CASES = []


def bad(name, function, args, error, message, **kwargs):
    """The message starts with the operator's name, which the public functions share."""
    prefix = {ragged_dot: "grouped_matmul"}.get(function, function.__qualname__)
    if not re.match(r"\w+: ", message):
        message = f"{prefix}: {message}"
    CASES.append(pytest.param(function, args, kwargs, error, message, id=name))


# What holds for the operands of every function.
for f, x, y, text in (
    (grouped_matmul, X, W, XW),
    (ragged_dot, X, W, XW),
    (grouped_outer, X, Y, XY),
):
    n = f.__name__
    rank = y.ndim
    bad(f"{n}-lhs-list", f, (X.tolist(), y, S), TypeError, "lhs must be an array, got list")
    bad(f"{n}-rhs-none", f, (x, None, S), TypeError, "rhs must be an array, got NoneType")
    bad(
        f"{n}-lhs-rank", f, (X[0], y, S), ValueError,
        f"lhs must have 2 axes, got 1 (lhs f32[4], rhs {text.split('rhs ')[1]}",
    )  # fmt: skip
    bad(
        f"{n}-rhs-rank", f, (x, y[None], S), ValueError,
        f"rhs must have {rank} axes, got {rank + 1} (lhs f32[6,4], rhs f32[1,",
    )  # fmt: skip
    bad(
        f"{n}-lhs-dtype", f, (X.astype(np.int32), y, S), TypeError,
        f"dtype of lhs must be one of {DTYPES}, got int32 (lhs i32[6,4], rhs f32",
    )  # fmt: skip
    bad(
        f"{n}-rhs-dtype", f, (x, y.astype(np.complex64), S), TypeError,
        f"dtype of rhs must be one of {DTYPES}, got complex64 (lhs f32[6,4], rhs complex64[",
    )  # fmt: skip
    bad(
        f"{n}-sizes-list", f, (x, y, [2, 3, 1]), TypeError, "group_sizes must be an array, got list"
    )
    bad(
        f"{n}-sizes-dtype", f, (x, y, S.astype(np.float32)), TypeError,
        "group_sizes must have an integer dtype, got f32[3]",
    )  # fmt: skip
    bad(
        f"{n}-sizes-bool", f, (x, y, S > 1), TypeError,
        "group_sizes must have an integer dtype, got bool[3]",
    )  # fmt: skip
    bad(
        f"{n}-sizes-rank", f, (x, y, S[None]), ValueError,
        f"group_sizes must have 1 axis, got i32[1,3] {text}",
    )  # fmt: skip
    bad(
        f"{n}-offset-shape", f, (x, y, S), ValueError,
        f"group_offset must be a scalar or have shape (1,), got i32[2] {text}",
        group_offset=np.zeros(2, np.int32),
    )  # fmt: skip
    bad(
        f"{n}-offset-float", f, (x, y, S), TypeError,
        "group_offset must be an array, got float", group_offset=1.0,
    )  # fmt: skip
    bad(
        f"{n}-offset-bool", f, (x, y, S), TypeError,
        "group_offset must be an array, got bool", group_offset=True,
    )  # fmt: skip
    bad(
        f"{n}-offset-dtype", f, (x, y, S), TypeError,
        "group_offset must have an integer dtype, got f32[]", group_offset=np.float32(1),
    )  # fmt: skip
    for p in ("exact", 3, ("high",), (None, "F32_F32_F32"), ("high", "high", "high")):
        bad(f"{n}-precision-{p}", f, (x, y, S), ValueError, f"{PRECISION}{p!r}", precision=p)
    for dtype, name in (
        (jnp.bfloat16, "bfloat16"),
        (np.int32, "int32"),
        (np.complex64, "complex64"),
    ):
        bad(
            f"{n}-preferred-{name}", f, (x, y, S), TypeError,
            f"{WIDE}{name} for float32 and float32", preferred_element_type=dtype,
        )  # fmt: skip
    bad(
        f"{n}-preferred-nonsense", f, (x, y, S), TypeError,
        "preferred_element_type must be a dtype, got 'wide'", preferred_element_type="wide",
    )  # fmt: skip

# The options that only the functions of this package have.
for f, y in ((grouped_matmul, W), (grouped_outer, Y)):
    n = f.__name__
    bad(
        f"{n}-implementation", f, (X, y, S), ValueError,
        "implementation must be None, 'xla' or 'cuda', got 'triton'", implementation="triton",
    )  # fmt: skip
    bad(
        f"{n}-cuda", f, (X, y, S), ValueError,
        "implementation='cuda' cannot run, ", implementation="cuda",
    )  # fmt: skip
    bad(f"{n}-tile", f, (X, y, S), TypeError, "tile must be a TileConfig or None, got 64", tile=64)

# grouped_matmul: shapes that do not fit together.
for f in (grouped_matmul, ragged_dot):
    n = f.__name__
    bad(
        f"{n}-k", f, (X[:, :3], W, S), ValueError,
        "the k of lhs is 3 but axis 1 of rhs is 4 (lhs f32[6,3], rhs f32[3,4,5])",
    )  # fmt: skip
    bad(
        f"{n}-groups", f, (X, W, S[:2]), ValueError,
        f"rhs has 3 groups but group_sizes has 2 {XW}; a part of the groups needs group_offset",
    )  # fmt: skip
    bad(f"{n}-part", f, (X, W, LONG), ValueError, f"rhs has 3 groups but group_sizes has 4 {XW}")
    bad(
        f"{n}-offset-groups", f, (X, W, S[:2]), ValueError,
        f"rhs has 3 groups, more than the 2 of group_sizes {XW}", group_offset=0,
    )  # fmt: skip
bad(
    "transpose-k", grouped_matmul, (X, W, S), ValueError,
    f"the k of lhs is 4 but axis 2 of rhs is 5 {XW}", transpose_rhs=True,
)  # fmt: skip
for value in (1, "yes", None):
    bad(
        f"transpose-{value}", grouped_matmul, (X, W, S), TypeError,
        f"transpose_rhs must be a bool, got {value!r}", transpose_rhs=value,
    )  # fmt: skip
bad(
    "rows", grouped_matmul,
    (jax.ShapeDtypeStruct((2**31, 4), jnp.int8), jax.ShapeDtypeStruct((3, 4, 5), jnp.int8), S),
    ValueError, "lhs must have fewer than 2**31 rows, got 2147483648 (lhs i8[2147483648,4], rhs i8",
)  # fmt: skip

# grouped_outer.
bad(
    "outer-m", grouped_outer, (X, Y[:5], S), ValueError,
    "the m of lhs is 6 but the m of rhs is 5 (lhs f32[6,4], rhs f32[5,5])",
)  # fmt: skip
bad(
    "outer-num-groups-alone", grouped_outer, (X, Y, S), ValueError,
    "num_groups needs group_offset, got num_groups=2 alone", num_groups=2,
)  # fmt: skip
for value in (-1, True, 1.0):
    bad(
        f"outer-num-groups-{value}", grouped_outer, (X, Y, S), ValueError,
        f"num_groups must be an int of at least 0, got {value!r}",
        num_groups=value, group_offset=0,
    )  # fmt: skip
bad(
    "outer-num-groups-many", grouped_outer, (X, Y, S), ValueError,
    f"the result has 4 groups, more than the 3 of group_sizes {XY}", num_groups=4, group_offset=0,
)  # fmt: skip

bad(
    "outer-accumulate-list", grouped_outer, (X, Y, S), TypeError,
    "accumulate must be an array, got list", accumulate=[1.0],
)  # fmt: skip
for name, wrong in (
    ("shape", jnp.zeros((2, 4, 5))), ("dtype", jnp.zeros((3, 4, 5), "bfloat16"))
):  # fmt: skip
    bad(
        f"outer-accumulate-{name}", grouped_outer, (X, Y, S), ValueError,
        "accumulate must be like the result f32[3,4,5], got", accumulate=wrong,
    )  # fmt: skip

# ragged_dot_general and the out_sharding that both of the jax.lax names take.
for f, args in ((ragged_dot, (X, W, S)), (ragged_dot_general, (X, W, S, ROWS))):
    bad(
        f"{f.__name__}-out-sharding", f, args, ValueError,
        f"{f.__name__}: out_sharding={P('a', None)} needs a mesh, see jax.set_mesh",
        out_sharding=P("a", None),
    )  # fmt: skip
    bad(
        f"{f.__name__}-out-sharding-type", f, args, TypeError,
        f"{f.__name__}: out_sharding must be a PartitionSpec or a NamedSharding, got 'x'",
        out_sharding="x",
    )  # fmt: skip
BATCHED = jax.lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
bad(
    "general-batch-sizes", ragged_dot_general, (X[None], jnp.stack([W, W]), S, BATCHED), ValueError,
    "batch dimensions of lhs, rhs and group_sizes must agree, got [[1], [2]]",
)  # fmt: skip
bad(
    "general-dims-type", ragged_dot_general, (X, W, S, (((1,), (1,)), ((), ()))), TypeError,
    "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, got (((1,), (1,))",
)  # fmt: skip
for i, name in enumerate(("lhs", "rhs", "group_sizes")):
    args = (X, W, S, ROWS)
    args = (*args[:i], [1.0], *args[i + 1 :])
    bad(
        f"general-{name}-list", ragged_dot_general, args, TypeError,
        f"{name} must be an array, got list",
    )  # fmt: skip
for name, args in {
    "two-ragged": (X, W, S, dims(((1,), (1,)), ragged=(0, 1))),
    "no-groups": (X, W, S, dims(((1,), (1,)), group=())),
    "ragged-k": (X, W, S, dims(((1,), (1,)), ragged=(1,))),
    "two-contracted": (X[None], W, S, dims(((1, 2), (0, 1)), group=())),
    "ragged-batch": (X, W[:, 0], S, dims(((1,), (1,)), ((0,), (0,)), group=())),
    "groups-last": (X, W.transpose(1, 2, 0), S, dims(((1,), (0,)), group=(2,))),
}.items():
    bad(f"general-{name}", ragged_dot_general, args, NotImplementedError, FORMS)
bad(
    "general-sizes-batch", ragged_dot_general, (X[None], W[None], S[None, None], BATCHED),
    ValueError, "group_sizes must be (g,) or (*batch, g) with 1 batch axes, got (1, 1, 3)",
)  # fmt: skip
bad(
    "general-k", ragged_dot_general, (X, W, S, dims(((1,), (2,)))), ValueError,
    f"grouped_matmul: the k of lhs is 4 but axis 2 of rhs is 5 {XW}",
)  # fmt: skip
bad(
    "general-m", ragged_dot_general, (X, Y[:5], S, OUTER), ValueError,
    "grouped_outer: the m of lhs is 6 but the m of rhs is 5",
)  # fmt: skip

for value in (0, -8, 8.0, True, "8", None):
    bad(
        f"tile-{value}", TileConfig, (value,), ValueError,
        f"m must be a positive int, got {value!r}",
    )  # fmt: skip
bad("tile-text", TileConfig.parse, ("64x",), ValueError, "a tile is written like 64x128x128c1")


def is_operand(x):
    return isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct))


def trace(function, args, kwargs):
    """Traces the call under jit, with all arrays (keywords too) as arguments of the jit."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None or is_operand(x))
    where = [i for i, x in enumerate(leaves) if is_operand(x)]

    def call(*operands):
        filled = list(leaves)
        for i, x in zip(where, operands):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    return jax.jit(call).trace(*(leaves[i] for i in where))


def call(function, args, kwargs):
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in args):
        return trace(function, args, kwargs)
    return function(*args, **kwargs)


@pytest.mark.parametrize("how", [call, trace], ids=["eager", "jit"])
@pytest.mark.parametrize(("function", "args", "kwargs", "error", "message"), CASES)
def test_bad_call(function, args, kwargs, error, message, how):
    with pytest.raises(error, match="^" + re.escape(message)) as caught:
        how(function, args, kwargs)
    assert caught.type is error


def test_cases_are_bad_in_one_thing():
    """The calls that the cases above spoil are good, so each message has its own cause."""
    want = np.broadcast_to(np.float32(4), (6, 5))
    np.testing.assert_array_equal(grouped_matmul(X, W, S), want)
    np.testing.assert_array_equal(ragged_dot(X, W, S), want)
    np.testing.assert_array_equal(ragged_dot_general(X, W, S, ROWS), want)
    np.testing.assert_array_equal(
        ragged_dot_general(X[None], W[None], S[None], BATCHED), want[None]
    )
    sums = np.broadcast_to(S.astype(np.float32)[:, None, None], (3, 4, 5))
    np.testing.assert_array_equal(grouped_outer(X, Y, S), sums)
    np.testing.assert_array_equal(ragged_dot_general(X, Y, S, OUTER), sums)
    assert TileConfig(8).m == 8


@pytest.mark.parametrize("module", ["grouped_matmul", "ragged_dot", "tiling"])
def test_every_raise_is_covered(module):
    """Each raise statement of the module ends one of the cases above."""
    module = importlib.import_module(f"pearl_jax.{module}") and sys.modules[f"pearl_jax.{module}"]
    raises = {
        (node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Raise)
    }
    assert raises
    reached = set()
    for case in CASES:
        function, args, kwargs, error, _ = case.values
        with pytest.raises(error) as caught:
            call(function, args, kwargs)
        lines = {t.lineno + 1 for t in caught.traceback if str(t.path) == module.__file__}
        reached |= {r for r in raises for line in lines if r[0] <= line <= r[1]}
    missing = sorted(raises - reached)
    assert not missing, f"no case reaches the raise statements at lines {missing}"


# Group sizes are values: they are clamped, and reported only when asked.

CHECKED = {
    "grouped_matmul": lambda s: grouped_matmul(X, W, s),
    "grouped_outer": lambda s: grouped_outer(X, Y, s),
}
BAD_SIZES = {
    "negative": ([2, -3, 1], "group_sizes must not be negative, got [ 2 -3  1]"),
    "minimum": ([0, -(2**31), 0], "group_sizes must not be negative, got"),
    "sum": ([2, 3, 2], "group_sizes sum to more than the 6 rows of lhs, got [2 3 2]"),
    "one": ([0, 7, 0], "group_sizes sum to more than the 6 rows of lhs, got [0 7 0]"),
    "overflow": ([2**31 - 1, 2**31 - 1, 2], "group_sizes sum to more than the 6 rows of lhs"),
}
GOOD_SIZES = [[2, 3, 1], [6, 0, 0], [0, 0, 0], [1, 0, 2]]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CHECKED)
def test_checkify_reports_bad_sizes(name, jit):
    with pearl_jax.check_group_sizes(True):
        checked = checkify.checkify(CHECKED[name])
        checked = jax.jit(checked) if jit else checked
        for sizes, message in BAD_SIZES.values():
            error, _ = checked(jnp.array(sizes, jnp.int32))
            assert (error.get() or "").startswith(f"{name}: {message}"), sizes
            with pytest.raises(checkify.JaxRuntimeError, match=re.escape(message)):
                error.throw()
        for sizes in GOOD_SIZES:
            error, out = checked(jnp.array(sizes, jnp.int32))
            assert error.get() is None, sizes
            np.testing.assert_array_equal(out, CHECKED[name](jnp.array(sizes)) if not jit else out)


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_leaves_results_alone(name):
    """With the mode, bad sizes are clamped as without it."""
    for sizes, _ in BAD_SIZES.values():
        sizes = jnp.array(sizes, jnp.int32)
        want = CHECKED[name](sizes)
        with pearl_jax.check_group_sizes(True):
            _, got = checkify.checkify(CHECKED[name])(sizes)
        np.testing.assert_array_equal(got, want)


def test_checkify_reports_wide_sizes():
    """Sizes past 32 bits are reported, and not the ones they would wrap around to."""
    for sizes in (np.array([2**32 + 1, 1, 1]), np.array([2**31, 0, 0], np.uint32)):
        with pearl_jax.check_group_sizes(True):
            error, _ = checkify.checkify(CHECKED["grouped_matmul"])(sizes)
        assert "sum to more than the 6 rows" in (error.get() or "")


@pytest.mark.parametrize(
    ("m", "sizes", "reported"),
    [
        (2**24, [2**24, 1], True),
        (2**25 + 2, [2**25 - 1, 3], False),
        (2**31 - 1, [2**31 - 1, 0], False),
        (2**31 - 1, [2**31 - 1, 1], True),
    ],
)
def test_checkify_decides_exactly(m, sizes, reported):
    """Where float32 or int32 sums would not; without the 2 GiB that such an lhs takes."""
    public = sys.modules["pearl_jax.grouped_matmul"]
    check = lambda sizes: public._check_values("grouped_matmul", m, sizes)
    error, _ = checkify.checkify(check)(jnp.array(sizes, jnp.int32))
    assert (error.get() is not None) == reported


def test_checkify_under_grad_and_vmap():
    def loss(w, s):
        return grouped_matmul(X, w, s).sum()

    with pearl_jax.check_group_sizes(True):
        error, _ = jax.jit(checkify.checkify(jax.grad(loss)))(W, jnp.array([2, 3, 2]))
        assert "grouped_matmul: group_sizes sum to more than the 6 rows" in error.get()
        batch = jnp.array([[2, 3, 1], [2, -1, 1]])
        error, _ = checkify.checkify(jax.vmap(CHECKED["grouped_outer"]))(batch)
        assert "grouped_outer: group_sizes must not be negative" in error.get()
        error, _ = checkify.checkify(jax.vmap(CHECKED["grouped_outer"]))(batch[:1])
        assert error.get() is None


@pytest.mark.parametrize("name", CHECKED)
def test_mode_is_off_by_default(name):
    """Outside the mode nothing is checked, and a jitted function notices the switch."""
    sizes = jnp.array([2, -3, 9], jnp.int32)
    checked = jax.jit(checkify.checkify(CHECKED[name]))
    for mode in (False, True, False):
        with pearl_jax.check_group_sizes(True) if mode else contextlib.nullcontext():
            error, _ = checked(sizes)
        assert (error.get() is not None) == mode
    assert pearl_jax.check_group_sizes.value is False


@pytest.mark.parametrize("name", CHECKED)
def test_no_effects_without_the_mode(name):
    assert not jax.make_jaxpr(CHECKED[name])(S).effects
    with pearl_jax.check_group_sizes(True):
        assert jax.make_jaxpr(CHECKED[name])(S).effects  # so the line above can fail


# Public reports about the arguments of other grouped matmuls.

RNG = np.random.default_rng(0)
RANDOM_X, RANDOM_W = (RNG.standard_normal(s, np.float32) for s in ((12, 32), (3, 32, 32)))
RANDOM_S = np.array([3, 0, 8], np.int32)
PRECISIONS = [None, "default", "tensorfloat32", "float32", (lax.Precision.HIGH, None)]
PRECISIONS += [*lax.Precision, *lax.DotAlgorithmPreset]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision_jax_32207(precision):
    """jax#32207: DotAlgorithmPreset was rejected. Each value is honoured or a ValueError.

    Honoured: the backend's own matmul gets that value, and is no more accurate than ours.
    """
    pair = (
        (lax.Precision.HIGH, lax.Precision.DEFAULT) if isinstance(precision, tuple) else precision
    )
    want = oracle.grouped_matmul(RANDOM_X, RANDOM_W, RANDOM_S)

    def dense(x, w):
        return lax.dot_general(x, w[0], (((1,), (0,)), ((), ())), pair, jnp.float32)

    def ours(x, w):
        return grouped_matmul(x, w, RANDOM_S, precision)

    try:
        first = np.asarray(dense(RANDOM_X, RANDOM_W))[:3]
    except ValueError:
        with pytest.raises(ValueError, match=r"(?i)precision"):
            ours(RANDOM_X, RANDOM_W)
        return
    bound = 2 * oracle.worst_group_error(first, want[:3], [3]) + 1e-7
    assert oracle.worst_group_error(ours(RANDOM_X, RANDOM_W), want, RANDOM_S) < bound
    # Every matmul of the lowered call carries what the dense one carries.
    pattern = r"algorithm = <.*?>|precision = \[.*?\]"
    lowered = (jax.jit(f).lower(RANDOM_X, RANDOM_W).as_text() for f in (dense, ours))
    carried = [set(re.findall(pattern, text)) for text in lowered]
    assert carried[0]
    assert carried[1] == carried[0]


@pytest.mark.parametrize(
    ("function", "name", "values"),
    [
        (grouped_matmul, "transpose_rhs", (False, True)),
        (grouped_matmul, "precision", ("F32_F32_F32", "BF16_BF16_F32")),
        (grouped_matmul, "preferred_element_type", (jnp.float32, jnp.float64)),
        (grouped_matmul, "tile", (TileConfig(8), TileConfig(16))),
        (grouped_outer, "num_groups", (2, 3)),
        (grouped_outer, "preferred_element_type", (jnp.float32, jnp.float64)),
        (grouped_outer, "tile", (TileConfig(8), TileConfig(16))),
    ],
)
def test_static_parameters_are_distinct_jax_40847(function, name, values):
    """jax#40847: a static value was missing from a cache key. Each of ours is in it.

    maxtext PR#3330, PR#3779: users patched a private heuristic to set the tile. Here it is
    an argument that takes effect, and leaves the result as it is.
    """
    outer = function is grouped_outer
    rhs = RANDOM_X if outer else RANDOM_W
    fixed = {"group_offset": 0} if name == "num_groups" else {}

    def want(transpose_rhs=False, num_groups=3, **_):
        if outer:
            return oracle.grouped_outer(RANDOM_X, rhs, RANDOM_S, num_groups)
        return oracle.grouped_matmul(RANDOM_X, rhs, RANDOM_S, transpose_rhs=transpose_rhs)

    jaxprs, lowered = [], []
    with jax.enable_x64(True):
        for value in (*values, values[0]):  # the first again: nothing of the second is left
            options = {name: value, **fixed}
            run = jax.jit(lambda x, y, o=options: function(x, y, RANDOM_S, **o))
            jaxprs.append(str(jax.make_jaxpr(run)(RANDOM_X, rhs)))
            lowered.append(run.lower(RANDOM_X, rhs).as_text())
            out = function(RANDOM_X, rhs, RANDOM_S, **options)
            assert oracle.worst_group_error(out, want(**options), RANDOM_S) < 1e-6
            assert out.dtype == options.get("preferred_element_type", jnp.float32)
    assert jaxprs[0] == jaxprs[2] != jaxprs[1]
    assert lowered[0] == lowered[2] != lowered[1]
    if name == "tile":
        assert all(f"tile={tile}" in text for tile, text in zip(values, jaxprs))
    if name == "tile" and not outer:
        assert [f"tensor<{rows}x32xf32>" in lowered[0] for rows in (8, 16)] == [True, False]


def test_only_arrays_in_the_signature_cudnn_frontend_260():
    """cudnn-frontend#260: raw pointers in the API. Ours takes arrays, and static options."""
    static = {"precision", "preferred_element_type", "implementation", "tile"}
    static |= {"transpose_rhs", "num_groups", "out_sharding"}
    for function in (grouped_matmul, grouped_outer, ragged_dot):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:3] == ["lhs", "rhs", "group_sizes"]
        arrays = {"lhs", "rhs", "group_sizes", "group_offset"}
        assert set(parameters) - static - {"accumulate"} == arrays
        assert all(p.default is not p.empty for n, p in parameters.items() if n in static)
    for name in ("ragged_dot", "ragged_dot_general"):
        ours, theirs = (inspect.signature(getattr(a, name)) for a in (pearl_jax, lax))
        assert list(ours.parameters)[: len(theirs.parameters)] == list(theirs.parameters)
    with pytest.raises(TypeError, match="lhs must be an array, got int"):
        grouped_matmul(0x7F0000000000, W, S)
