"""Builds the C++ parts on demand and calls them."""

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORE = Path(__file__).parent / "core"
# -march=native: what is built here runs here. No contraction: a multiply and an add round twice.
FLAGS = ["-std=c++20", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native"]
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"]


def build_folder() -> Path:
    """Where what is built is kept between runs: build/ of the checkout, which git ignores."""
    folder = Path(__file__).parents[2] / "build" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_shared(name: str, inputs: list[Path], flags: list[str]) -> Path:
    """A shared library of the inputs, compiled unless one of just these bytes is there."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in inputs:
        digest.update(path.name.encode() + path.read_bytes())
    library = build_folder() / f"{name}-{digest.hexdigest()[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        # Of several processes, one compiles.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "out.so"
            compiler = os.environ.get("CXX", "g++")
            objects = [p for p in inputs if p.suffix == ".o"]
            sources = [p for p in inputs if p.suffix == ".cc"]
            compiling = []
            for source in sources:
                objects.append(Path(folder) / f"{source.stem}.o")
                command = [compiler, *flags, "-c", "-o", str(objects[-1]), str(source)]
                compiling.append(command)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, compiling))
            # -Bsymbolic: its own symbols, not those of a CUDA runtime that the process has loaded.
            link = [compiler, "-shared", "-Wl,-Bsymbolic,--no-undefined", "-o", str(built)]
            _run([*link, *map(str, objects), "-lm"])
            os.rename(built, library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


@functools.cache
def core() -> ctypes.CDLL:
    """The machine."""
    inputs = sorted(p for p in CORE.iterdir() if p.name != "driver.cc")
    return ctypes.CDLL(str(compile_shared("core", inputs, FLAGS)))


class ProgramView(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_char_p),
        ("code_count", ctypes.c_uint64),
        ("operands", ctypes.c_char_p),
        ("operand_count", ctypes.c_uint64),
        ("constants", ctypes.c_char_p),
        ("constant_bytes", ctypes.c_uint64),
        ("specials", ctypes.c_char_p),
        ("special_count", ctypes.c_uint64),
        ("register_bytes", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32),
        ("static_smem", ctypes.c_uint32),
    ]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint32),
        ("pdl", ctypes.c_uint32),
    ]


class Hold(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("held", "awaited", "ratio", "times")]


class Options(ctypes.Structure):
    _fields_ = [
        ("mode", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("strict_tmem", ctypes.c_uint32),
        ("allow_unwritten", ctypes.c_uint32),
        ("entry_registers", ctypes.c_uint32),
        ("max_instructions", ctypes.c_uint64),
        ("hold", Hold),
    ]


class Region(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
    ]


class Result(ctypes.Structure):
    _fields_ = [
        ("instructions", ctypes.c_uint64),
        ("busiest", ctypes.c_uint64),
        ("async_operations", ctypes.c_uint64),
        ("barrier_phases", ctypes.c_uint64),
        ("hazards", ctypes.c_uint32),
        ("report_bytes", ctypes.c_uint32),
    ]


class TensorMapView(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64 * 5),
        ("stride", ctypes.c_uint64 * 5),
        ("rank", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("element_stride", ctypes.c_uint32 * 5),
        ("interleave", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("l2", ctypes.c_uint32),
        ("fill_nan", ctypes.c_uint32),
    ]


def decode_tensor_map(map_bytes: bytes) -> TensorMapView:
    """The fields of a 128-byte tensor map, sizes in elements and strides in bytes."""
    view = TensorMapView()
    core().emulator_decode_tensor_map(map_bytes, ctypes.byref(view))
    return view
