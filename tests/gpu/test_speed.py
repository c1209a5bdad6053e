"""A guard against slower kernels: ratios to cuBLAS in one run, on GPUs where they were measured."""

import benchmarks_by_path  # noqa: F401
import jax
import pytest

from benchmarks import forms, grouped_matmul, peers, protocol, shapes
from pearl_jax import timing

# Importing torch warns of things that are its own.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SHAPE = shapes.MODELS["GLM-5.3"].gate_up

# How many times longer cuBLAS's batched matmul takes, at least: the least of several runs on
# an H200 (README, benchmarks/notes) less 4 %, by form, rows of each group and column.
LEAST = {
    ("fwd", 16, "gnk"): 1.02,
    ("fwd", 64, "gnk"): 1.02,
    ("fwd", 256, "gnk"): 0.99,
    ("fwd", 1024, "gnk"): 1.0,
    ("wgrad", 256, "same"): 1.0,
}


def ratio(form, rows, column, shape=SHAPE, peer="bmm"):
    """Time of the peer over that of pearl_jax, for groups of the same size."""
    problem = peers.FORMS[form].problem(shape, shape.g * rows)
    candidates, notes = grouped_matmul.make_candidates(problem, [peer])
    candidates = {key: bind for key, bind in candidates.items() if key[1] == column}
    bursts, more = grouped_matmul.prepare(problem, candidates, shapes.uniform(problem.m, shape.g))
    if (peer, column) not in bursts:
        pytest.skip(f"{peer} does not run: {[*notes.values(), *more.values()]}")
    found = timing.measure(bursts, rounds=5)
    return found[peer, column].seconds / found["pearl", column].seconds


@pytest.mark.parametrize(("form", "rows", "column"), LEAST)
def test_no_slower_than_when_it_was_measured(form, rows, column):
    kind = jax.devices()[0].device_kind
    if kind not in protocol.GPU_PEAKS:
        pytest.skip(f"no ratios are known for {kind}, only for {', '.join(protocol.GPU_PEAKS)}")
    try:
        forms.import_peer("torch")
    except forms.Absent as error:
        pytest.skip(str(error))
    found = [ratio(form, rows, column)]
    if found[0] < LEAST[form, rows, column]:  # once more: single runs move by some percent
        found.append(ratio(form, rows, column))
    assert max(found) >= LEAST[form, rows, column], found
