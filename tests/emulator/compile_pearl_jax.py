"""Compiles kernels of this project: `ARCH FOLDER CASES`."""

import importlib
import json
import sys
import types
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
MODULES = {"sm_90a": "pearl_jax.kernels.hopper", "sm_100f": "pearl_jax.kernels.blackwell"}


def compile_case(arch, form, dtype, out_dtype, wide, tile):
    from pearl_jax.tiling import KernelSpec, TileConfig

    spec = KernelSpec(arch, form, dtype, out_dtype, wide, TileConfig(*tile))
    return importlib.import_module(MODULES[arch]).compile_kernel(spec)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    # Without pearl_jax/__init__.py, which imports jax.
    sys.modules["pearl_jax"] = types.ModuleType("pearl_jax")
    sys.modules["pearl_jax"].__path__ = [str(CHECKOUT / "pearl_jax")]
    from emulator.kernels import save

    arch, folder, cases = sys.argv[1:]
    for name, case in json.loads(cases).items():
        save(compile_case(arch, **case), folder, name, case)
