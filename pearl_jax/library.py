"""The shared library of compiled kernels: where it is, what is in it, whether it runs here."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.resources
import re
import threading
from pathlib import Path
from typing import NamedTuple

import jax

from pearl_jax import tiling

# By operation; one handler serves both.
TARGETS = {op: f"pearl_jax.{op}" for op in ("grouped_matmul", "grouped_outer")}


class _Family(NamedTuple):
    """GPUs that run the same compiled kernels."""

    arch: str  # compilation target, a part of the kernels' names
    capability: str  # compute capability of these GPUs, or its beginning
    label: str
    driver: tuple[int, int]  # least version of CUDA that the driver supports


_FAMILIES = (
    _Family("sm_90a", "9.0", "9.0 (Hopper)", (12, 0)),
    _Family("sm_100f", "10.", "10.x (Blackwell)", (12, 9)),
)


@functools.cache
def unavailable() -> str | None:
    """None if the kernels run on the visible GPUs, else why not, in one sentence.

    Where no GPU is visible, lowering for one is all there is to do, and only the library
    has to exist.
    """
    if not _path().is_file():
        return (
            f"there are no compiled kernels in {_path().parent}: pearl_jax was installed without "
            "them (PEARL_JAX_SKIP_KERNELS was set, there was no C++ compiler, or the system is "
            "not Linux on x86-64), or this is its source folder, which hides the installed package"
        )
    families = [f for f in _FAMILIES if any(f"_{f.arch}_" in name for name in kernel_names())]
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # no such backend
        return None
    for device in devices:
        capability = device.compute_capability
        family = next((f for f in families if capability.startswith(f.capability)), None)
        if family is None:
            return (
                f"GPU {device.id} ({device.device_kind}) has compute capability {capability}, but "
                f"the kernels are for {' and '.join(f.label for f in families) or 'no GPU'}"
            )
        if (version := _driver_version()) < family.driver:
            return (
                f"the driver of GPU {device.id} ({device.device_kind}) supports CUDA "
                f"{_dotted(version)}, but the kernels need a driver for CUDA "
                f"{_dotted(family.driver)} or newer"
            )
    return None


def present_arch() -> str | None:
    """The compilation target of kernels for the first visible GPU; None without one."""
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:  # no such backend
        return None
    return next((f.arch for f in _FAMILIES if capability.startswith(f.capability)), None)


@functools.cache
def kernel_names() -> frozenset[str]:
    """The names of the compiled kernels; needs no GPU."""
    if not _path().is_file():
        return frozenset()
    names = ctypes.c_char_p.in_dll(_load(), "pearl_jax_kernel_names").value or b""
    return frozenset(names.decode().split())


def tiles(arch, form) -> list[tiling.TileConfig]:
    """The tiles of the kernels of one form: those of tiling, and others with some kernel here."""
    others = _tiles_of(kernel_names(), arch, form)
    return list(dict.fromkeys([*tiling.tiles(arch, form), *others]))


@functools.cache
def _tiles_of(names, arch, form):
    pattern = re.compile(rf"{tiling.OPERATIONS.get(form)}_{arch}_\w+?_(?:wide|plain)_(\d.*)")
    found = filter(None, map(pattern.fullmatch, sorted(names)))
    return [tiling.TileConfig.parse(match[1]) for match in found]


def has(spec) -> bool:
    """Whether the kernel is compiled, as all are whose tile tiling has."""
    return spec.tile in tiling.tiles(spec.arch, spec.form) or spec.name in kernel_names()


_lock = threading.Lock()
_registered = False


def ensure_registered():
    """Makes TARGETS known to XLA, once. Raises RuntimeError where there is no library."""
    global _registered
    with _lock:
        if _registered:
            return
        if not _path().is_file():
            raise RuntimeError(f"pearl_jax: {unavailable()}")
        stages = {
            "initialize": jax.ffi.pycapsule(_load().pearl_jax_initialize),
            "execute": jax.ffi.pycapsule(_load().pearl_jax_execute),
        }
        for target in TARGETS.values():
            jax.ffi.register_ffi_target(target, stages, platform="CUDA")
        _registered = True


def _path() -> Path:
    # Not beside this file: an editable install keeps the library elsewhere.
    return Path(str(importlib.resources.files("pearl_jax") / "libpearl_jax.so"))


@functools.cache
def _load() -> ctypes.CDLL:
    return ctypes.CDLL(str(_path()))


def _driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver supports; (0, 0) without a driver."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
