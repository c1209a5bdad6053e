"""The example of expert parallelism, as a program of one or several processes."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import ROOT

EXAMPLE = Path(__file__).parents[1] / "examples" / "expert_parallel.py"


@pytest.fixture
def start_example():
    """Starts the example with some arguments; it ends with the test at the latest."""
    with contextlib.ExitStack() as stack:

        def start(*args):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(EXAMPLE), *args],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={
                        "PYTHONPATH": str(ROOT),
                        "JAX_PLATFORMS": "cpu",
                        "XLA_FLAGS": "--xla_backend_optimization_level=0",
                    },
                )
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize(
    "args",
    [
        ("--spawn=2", "--strategy=gather"),
        ("--spawn=4", "--mesh=data=2,expert=2", "--strategy=all_to_all"),
        ("--cpu-devices=8", "--mesh=expert=4,tensor=2"),
    ],
)
def test_example(args, start_example):
    """Several processes that talk through sockets; it compares its losses with one device."""
    process = start_example("--steps=3", *args)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s+\d+ +0\.\d+", line)]
    assert len(rows) == 3
    assert float(rows[2][1]) < 0.95 * float(rows[0][1])  # it learns


def test_a_dead_process_ends_the_others(start_example):
    process = start_example("--spawn=2", "--steps=1000000", "--heartbeat=10")
    lines = iter(process.stdout.readline, "")
    victim = next(int(line.split()[2]) for line in lines if line.startswith("processes"))
    next(line for line in lines if re.match(r"\s+2 ", line))
    subprocess.run(["kill", "-KILL", str(victim)], check=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(r"Task 1 heartbeat timeout|Connection (closed|reset) by peer", out)
