"""The library's handlers as XLA calls them, on GPUs that only write down what is asked of them.

`with fake_gpu.start(library, capabilities) as gpu:` gives a GPU host in a process of its own,
so that the library is fresh and meets no real driver. Methods may be called from several
threads.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import shutil
import subprocess
import tempfile
from multiprocessing.managers import BaseManager
from pathlib import Path

INITIALIZE, EXECUTE = 2, 3  # stages of XLA's FFI
DTYPES = {"int32": 4, "float16": 10, "float32": 11, "bfloat16": 16}  # as XLA numbers them


class _Array(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class Host:
    """A host with one GPU for each of capabilities (90 is 9.0)."""

    def __init__(self, fake, library, capabilities):
        self._fake = ctypes.CDLL(fake)  # from here on this is libcuda.so.1
        self._fake.fake_calls.restype = ctypes.c_char_p
        self._fake.xla_call.restype = ctypes.c_char_p
        self._fake.fake_devices(
            (ctypes.c_int * len(capabilities))(*capabilities), len(capabilities)
        )
        self._library = ctypes.CDLL(library)

    def call(
        self,
        stage,
        kernel,
        device=0,
        stream=0,
        other="",
        data=1 << 20,
        other_data=None,
        **shapes,
    ):
        """Calls a handler of the target; returns the error as "code message", or None.

        kernel is for Hopper and `other` for Blackwell. shapes: a (dtype, shape) for every
        operand and, last, for the results; by default those of problem(kernel). All buffers are
        at the address data, but the last operand at other_data where it is given.
        """
        shapes = shapes or problem(kernel)
        results = {name: shapes[name] for name in ("out", "partial") if name in shapes}
        operands = {name: x for name, x in shapes.items() if name not in results}
        arrays = [self._array(data, *x) for x in (*operands.values(), *results.values())]
        if other_data is not None:
            arrays[len(operands) - 1].data = other_data
        handler = {INITIALIZE: "initialize", EXECUTE: "execute"}[stage]
        error = self._fake.xla_call(
            getattr(self._library, f"pearl_jax_{handler}"),
            stage,
            ctypes.c_void_p(100 * device + stream),
            kernel.encode(),
            other.encode(),
            (_Array * len(arrays))(*arrays),
            len(operands),
            len(results),
        )
        return error and error.decode()

    def _array(self, data, dtype, shape):
        return _Array(DTYPES[dtype], data, len(shape), (ctypes.c_int64 * len(shape))(*shape))

    def fail(self, function, result):
        """Lets a driver function fail; with result 0, none fails any more."""
        self._fake.fake_failure(function.encode(), result)

    def calls(self, function=None):
        """What was called since the last time: a dict each, "name" and the arguments."""
        calls = []
        for line in self._fake.fake_calls().decode().splitlines():
            name, *fields = line.split()
            calls.append({"name": name} | {k: int(v) for k, v in (f.split("=") for f in fields)})
        return [c for c in calls if function in (None, c["name"])]

    def metadata(self, handler):
        """(major version, minor version, traits) of one handler."""
        values = (ctypes.c_int * 3)()
        self._fake.xla_metadata(getattr(self._library, f"pearl_jax_{handler}"), values)
        return tuple(values)

    def binary(self, kernel):
        """The GPU binary of a kernel for device 0, an ELF file."""
        self.calls()
        assert self.call(INITIALIZE, kernel, other=kernel) is None
        (load,) = self.calls("cuLibraryLoadData")
        # It is the one entry of a "fat binary", whose size stands in bytes 8 to 16 of its header.
        size = int.from_bytes(ctypes.string_at(load["code"] + 8, 8), "little")
        fat_binary = ctypes.string_at(load["code"], 16 + size)
        return fat_binary[fat_binary.index(b"\x7fELF") :]


def problem(kernel, batch=2, m=64, k=128, n=256, g=8):
    """Operands that the kernel of that name takes, as (dtype, shape)."""
    parts = kernel.split("_")
    dtype, out_dtype = (part for part in parts if part in DTYPES)
    outer = "outer" in parts
    rhs = (m, n) if outer else (g, n, k) if "gnk" in parts else (g, k, n)
    return {
        "lhs": (dtype, (batch, m, k)),
        "rhs": (dtype, (1, *rhs)),
        "group_sizes": ("int32", (batch, 2 * g)),
        "group_offset": ("int32", (1,)),
        "batch_index": ("int32", (batch, 4)),
        "out": (out_dtype, (batch, *((g, k, n) if outer else (m, n)))),
        **({"partial": ("float32", (0,))} if outer else {}),
    }


class _Manager(BaseManager):
    pass


_Manager.register("Host", Host)


@functools.cache
def _build(*options):
    """Compiles fake_gpu.cc; None without a C++ compiler."""
    import jaxlib

    compiler = shutil.which("c++")
    if compiler is None:
        return None
    source = Path(__file__).with_name("fake_gpu.cc")
    output = Path(tempfile.mkdtemp()) / "libcuda.so.1"
    headers = Path(jaxlib.__file__).parent / "include"
    flags = ("-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-isystem", headers)
    subprocess.run([compiler, *flags, *options, source, "-o", output], check=True)
    return output


@contextlib.contextmanager
def start(library, capabilities=(90,), options=()):
    """options: more for the compiler of fake_gpu.cc."""
    import pytest

    fake = _build(*options)
    if fake is None:
        pytest.skip("no C++ compiler here: the handlers were not run")
    with _Manager(ctx=multiprocessing.get_context("spawn")) as manager:
        yield manager.Host(str(fake), str(library), capabilities)
