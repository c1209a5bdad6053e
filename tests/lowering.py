"""Calls as they become on CUDA, seen without a GPU, and what of the text is looked at."""

import functools
import re

import jax
import pytest

import pearl_jax
from pearl_jax import TileConfig, cuda, library, tiling

M, K, N, G = 96, 128, 192, 4
BATCH = 3
SOME_TILE = TileConfig(24, 128)  # of no kernel
TARGET = "pearl_jax.grouped_matmul"
OUTER = "pearl_jax.grouped_outer"


@pytest.fixture(autouse=True)
def with_library(monkeypatch):
    """As where the library is installed. Lowering needs nothing else of it than its names."""
    monkeypatch.setattr(library, "unavailable", lambda: None)
    monkeypatch.setattr(library, "ensure_registered", lambda: None)
    forget()


def forget():
    """What was said once is said again, and nothing is lowered from a cache."""
    cuda.log_once.cache_clear()
    cuda.log_padding.cache_clear()
    jax.clear_caches()


def spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(dtype="bfloat16", transpose_rhs=False, m=M, k=K, n=N, g=G):
    rhs = (g, n, k) if transpose_rhs else (g, k, n)
    return spec(m, k, dtype=dtype), spec(*rhs, dtype=dtype), spec(g, dtype="int32")


def matmul(**options):
    return functools.partial(pearl_jax.grouped_matmul, **options)


def lower(f, *args):
    return (
        jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    )


ARCHS = ("sm_100f", "sm_90a")
KERNELS = r'kernels = \{sm_100 = "([^"]*)", sm_90 = "([^"]*)"\}'


def calls(text, target=TARGET):
    """For each call of the target: the Hopper kernel, the types of operands, that of the result."""
    found = []
    for line in text.splitlines():
        if f"custom_call @{target}(" in line:
            kernels = re.search(KERNELS, line)
            types, result = re.search(r": \((.*)\) -> \(?tensor<([^>]*)>", line).groups()
            assert {*kernels.groups()} <= {*names(), ""}
            found.append((kernels[2], re.findall(r"tensor<([^>]*)>", types), result))
    return found


def work(text):
    """The operations beside the calls that compute, copy or convert floats."""
    ops = r"stablehlo\.(transpose|pad|slice|dot_general|while|convert|concatenate|add|reduce)\b"
    return [s for s in text.splitlines() if re.search(ops, s) and re.search(r"x(bf|f)\d+>", s)]


def names():
    """The kernels of the library, or if there is none here, those that the build compiles."""
    compiled = {s.name for arch in ARCHS for s in tiling.kernels(arch)}
    return library.kernel_names() or compiled
