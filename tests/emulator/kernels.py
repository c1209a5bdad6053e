"""Compiles the kernels that tests run, without a GPU.

The DSL is bound to one architecture once imported, so each architecture gets a process of its
own. What it compiles is kept under build/, by the content of what went into it.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from .emulator import Kernel
from .launch import Exported
from .native import build_folder
from .ptx import parse

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]


def missing() -> str:
    """Why kernels cannot be compiled here, or ""."""
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-operators"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return ""


def compile_cases(arch: str, source: str, cases: dict[str, dict]) -> dict[str, Kernel]:
    """Compiles `cases` of compile_nvidia.py or compile_pearl_jax.py for one architecture.

    Each case is the keyword arguments of `compile_case` in that file.
    """
    script = HERE / f"compile_{source}.py"
    digest = hashlib.sha256(importlib.metadata.version("nvidia-cutlass-dsl").encode())
    inputs = [script, *(sorted((CHECKOUT / "pearl_jax").glob("kernels/*.py")))]
    for path in inputs + [CHECKOUT / "pearl_jax" / "tiling.py"]:
        digest.update(path.read_bytes())
    folder = build_folder() / f"{source}-{arch}-{digest.hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Of several test processes, one compiles.
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = {name: case for name, case in cases.items() if not _there(folder, name, case)}
        if wanted:
            _compile(script, arch, folder, wanted)
    return {name: _read(folder, name) for name in cases}


def _compile(script: Path, arch: str, folder: Path, cases: dict[str, dict]) -> None:
    environment = os.environ | {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), arch, str(folder), json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} failed:\n{done.stdout}\n{done.stderr}")


def _there(folder: Path, name: str, case: dict) -> bool:
    record = folder / f"{name}.json"
    return record.exists() and record.read_text() == json.dumps(case)


def _read(folder: Path, name: str) -> Kernel:
    exported = Exported.read(folder / f"{name}.o", folder / f"{name}.h")
    return Kernel(parse((folder / f"{name}.ptx").read_text()), exported)


def save(compiled, folder: str, name: str, case: dict) -> None:
    """Keeps what the DSL compiled; called in the compiling process."""
    compiled.export_to_c(folder, name, function_prefix="kernel")
    path = Path(folder) / f"{name}.ptx"
    path.write_text(compiled.__ptx__)
    path.with_suffix(".json").write_text(json.dumps(case))
