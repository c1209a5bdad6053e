"""What the package promises before anything is computed; each test names a public report."""

import ast
import doctest
import inspect
import pathlib
import platform
import re
import sys
import tomllib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import ROOT, python
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import pearl_jax
from pearl_jax import cuda, grouped_matmul, library


def test_import_jax_40888_cutlass_3083():
    """jax#40888: files were missing. cutlass#3083: importing crashed on a host without GPUs.

    Every module imports without CuTe DSL and Flax, and the functions run.
    """
    code = """
        import importlib, pkgutil, sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("cutlass", "flax", "safetensors"):
                    raise ModuleNotFoundError(name, name=name.partition(".")[0])

        sys.meta_path.insert(0, Block())
        import jax.numpy as jnp, pearl_jax

        for module in pkgutil.walk_packages(pearl_jax.__path__, "pearl_jax."):
            # The sources of the kernels, which only the build imports, and what it makes of them.
            if module.name.startswith(("pearl_jax.kernels", "pearl_jax.libpearl_jax")):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as e:
                assert module.name in ("pearl_jax.hf", "pearl_jax.nn"), module.name
                assert e.name == "flax" and "pip install" in str(e), e
        y = pearl_jax.grouped_matmul(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 2]))
        print(y.sum(), *(m for m in sys.modules if m.startswith("pearl_jax.")))
    """
    total, *modules = python(code, CUDA_VISIBLE_DEVICES="").split()
    assert total == "6.0"
    assert {"pearl_jax.ragged_dot", "pearl_jax.tiling"} <= set(modules)


def test_docstrings_run_tokamax_980():
    """tokamax PR#980: no documentation. All examples in the docstrings run as printed."""
    parser, runner, found = doctest.DocTestParser(), doctest.DocTestRunner(), []
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("pearl_jax.") or name.startswith(("pearl_jax.hf", "pearl_jax.nn")):
            continue
        # Strings of the source, so that those of module constants are among them.
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and ">>>" in text:
                found.append(text)
                runner.run(parser.get_doctest(text, {}, name, module.__file__, node.lineno))
    assert runner.summarize().failed == 0
    public = {n: f for n, f in vars(pearl_jax).items() if inspect.isfunction(f) and n[0] != "_"}
    assert {"grouped_matmul", "grouped_outer", "ragged_dot"} <= set(public)
    for name, function in public.items():
        assert ">>>" in (function.__doc__ or ""), f"{name} has no example"
    assert len(found) > len(public)


def test_jax_versions_marin_5347():
    """marin PR#5347: a removed API broke the operation. The range of versions is declared."""
    assert jax.__version_info__ >= (0, 10)
    project = ROOT / "pyproject.toml"
    if project.exists():
        declared = tomllib.loads(project.read_text())["project"]
        needs = {r.name: r.specifier for r in map(Requirement, declared["dependencies"])}
        assert needs["jax"].contains(jax.__version__, prereleases=True)
        assert not needs["jax"].contains("0.9.0")
        assert SpecifierSet(declared["requires-python"]).contains(platform.python_version())


@pytest.mark.parametrize("capability", ["12.0", "8.9"])
def test_no_kernel_for_a_gpu_cutlass_3096(capability, monkeypatch, caplog):
    """cutlass#3096: garbage on sm_120, which the kernel was not for.

    Here such a GPU runs plain XLA, and the log says why; asked for, the kernel is an error.
    """
    gpu = SimpleNamespace(id=0, device_kind="Some GPU", compute_capability=capability)
    devices = jax.devices
    monkeypatch.setattr(library, "_path", lambda: pathlib.Path(__file__))
    monkeypatch.setattr(library, "kernel_names", lambda: {"x_sm_90a_y"})
    monkeypatch.setattr(jax, "devices", lambda *p: [gpu] if p == ("cuda",) else devices(*p))
    for said in (library.unavailable, cuda.log_once):
        said.cache_clear()
    x, w = jnp.ones((8, 64), "bfloat16"), jnp.ones((2, 64, 64), "bfloat16")
    reason = (
        f"GPU 0 (Some GPU) has compute capability {capability}, but the kernels are for "
        "9.0 (Hopper)"
    )
    try:
        with caplog.at_level("WARNING", "pearl_jax"):
            run = jax.jit(lambda *args: grouped_matmul(*args)).trace(x, w, np.int32([3, 5]))
            assert "custom_call" not in run.lower(lowering_platforms=("cuda",)).as_text()
        assert [r.message.endswith(f"on the GPU: {reason}") for r in caplog.records] == [True]
        with pytest.raises(ValueError, match=re.escape(reason)):
            grouped_matmul(x, w, np.int32([3, 5]), implementation="cuda")
    finally:
        library.unavailable.cache_clear()
