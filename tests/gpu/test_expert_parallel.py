"""Experts over two GPUs: the results, the counts and all gradients of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import ROOT
from mesh_problem import (
    CONFIG,
    E,
    K,
    T,
    agree,
    apply_kept,
    expert_gradients,
    kept_pairs,
    make_mesh,
    normal,
    routed_problem,
)

from pearl_jax import moe, routing
from pearl_jax.expert_parallel import ExpertParallel

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"
DROPLESS = {
    "replicate": {"strategy": "replicate"},
    "gather": {"strategy": "gather"},
    "all_to_all": {"strategy": "all_to_all"},
    "ragged": {"strategy": "ragged"},
    "micro-batches": {"strategy": "all_to_all", "capacity": 2, "micro_batches": 3},
}
CASES = ("uniform", "hot expert", "empty devices", "masked", "all masked")
dropless = pytest.mark.parametrize("options", DROPLESS.values(), ids=DROPLESS)


# Compiling is what takes the time: once for all tests.
one_device = jax.jit(expert_gradients(moe.apply_experts))
one_device_kept = jax.jit(expert_gradients(apply_kept))


@pytest.fixture(autouse=True)
def two_gpus():
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs, and there is one: experts over devices were not run")


@dropless
def test_same_as_one_device(options):
    ep = ExpertParallel(make_mesh(expert=2), **options)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(expert_gradients(ep))
        for case in CASES:
            args = routed_problem(case)
            agree(got(*args), one_device(*args))


@pytest.mark.parametrize("strategy", ["gather", "all_to_all"])
def test_capacity(strategy):
    """What has room is as on one device, the rest is left out and counted."""
    ep = ExpertParallel(make_mesh(expert=2), strategy=strategy, capacity=0.5)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(expert_gradients(ep))
        for case in ("uniform", "hot expert", "masked"):
            args = routed_problem(case)
            expected = one_device_kept(*args, kept_pairs(ep, np.asarray(args[1].experts)))
            assert 0 < expected[0][1][2] < T * K
            agree(got(*args), expected)


@dropless
def test_by_the_kernels(options):
    """In bfloat16, results and gradients are hardly further from float32 than those of one GPU."""
    d, f, t = 128, 64, 128
    tokens, logits, ct = normal(1, t, d), normal(2, t, E), normal(3, t, d)
    weights = moe.ExpertWeights(normal(4, E, d, 2, f) / d**0.5, normal(5, E, f, d) / f**0.5)
    routed = routing.route(logits, CONFIG)
    tokens, weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (tokens, weights))
    ep = ExpertParallel(make_mesh(expert=2), **options)
    args = tokens, routed, weights, ct
    sharded = jax.jit(expert_gradients(ep)).lower(*args).compile()
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (tokens, weights))
        (_, wanted), wanted_gradients = one_device(wide[0], routed, wide[1], ct)

    def errors(function):
        (_, results), gradients = function(*args)
        pairs = zip(
            jax.tree.leaves((results[0], gradients)),
            jax.tree.leaves((wanted[0], wanted_gradients)),
            strict=True,
        )
        pairs = [[np.asarray(x, np.float64) for x in pair] for pair in pairs]
        return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])

    text = sharded.as_text()
    for name, calls in (("grouped_matmul", 4), ("grouped_outer", 2)):
        parts = options.get("micro_batches", 1)
        assert text.count(f'custom_call_target="pearl_jax.{name}"') >= calls * parts
    # The most in micro-batches, whose gradients of weights are rounded before they are added.
    assert np.all(errors(sharded) <= 1.3 * errors(one_device))


def test_a_process_for_each_gpu():
    """The example compares its losses with those of one device."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--spawn=2", "--strategy=all_to_all", "--steps=3"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"'expert': 2\} on 2 x NVIDIA .* in 2 process", done.stdout), done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"\s+\d+ +0\.\d+", line)]
    assert len(rows) == 3
    assert float(rows[2][1]) < 0.95 * float(rows[0][1])  # it learns
