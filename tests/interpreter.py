"""A fresh Python, with the package that is tested."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pearl_jax

ROOT = pathlib.Path(pearl_jax.__file__).parents[1]


def python(code, **env):
    """Runs code in a fresh interpreter and returns what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | env
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
