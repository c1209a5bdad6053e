"""NVIDIA's compute-sanitizer finds nothing: wrong addresses, races, barriers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pearl_jax

pytestmark = pytest.mark.gpu

TOOLS = ["memcheck", "racecheck", "synccheck"]
SECONDS = 300


@pytest.fixture(scope="module")
def runs():
    """All tools at the same time: they keep the host busy more than the GPU."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer here: memory, races and barriers were not checked")
    tests = Path(__file__).parents[1]
    package = Path(pearl_jax.__file__).parents[1]
    path = os.pathsep.join([str(tests), str(package), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = {
        tool: subprocess.Popen(
            [
                "compute-sanitizer", "--tool", tool, "--error-exitcode", "9",
                sys.executable, str(Path(__file__).with_name("sanitize.py")),
            ],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for tool in TOOLS
    }  # fmt: skip
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer(runs, tool):
    output, _ = runs[tool].communicate(timeout=SECONDS)
    last = output[-5000:]
    assert runs[tool].returncode == 0, last
    assert re.search(r"\d+ calls, all right", output), last
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors|hazards)", output)
    assert summary == ["0"], last
