"""Runs the exported host code of a kernel against a recording driver.

The host code is what ships: it computes the grid, the launch attributes, the parameter bytes and
the tensor maps. Nothing of that is written by hand here.
"""

import ctypes
import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import native

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6


class Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    ]


class LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t; also CUlaunchConfig, whose 4 bytes of shared memory have 4 of padding."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


_LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(LaunchConfig), ctypes.POINTER(ctypes.c_void_p)
)


@dataclass
class Launch:
    """One kernel launch as the driver would see it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    pdl: bool
    params: list[bytes]


@dataclass
class Exported:
    """The host code of one compiled function: an object file, and what its header says."""

    object_file: bytes
    entry: str
    prefix: str
    arguments: list[tuple[str, str]]

    @staticmethod
    def of(compiled) -> "Exported":
        """Exports the result of `cute.compile`."""
        with tempfile.TemporaryDirectory() as folder:
            compiled.export_to_c(folder, "kernel", function_prefix="kernel")
            return Exported.read(Path(folder) / "kernel.o", Path(folder) / "kernel.h")

    @staticmethod
    def read(object_file: Path, header: Path) -> "Exported":
        text = header.read_text()
        entry = re.search(r"void (_mlir_(\w+?)__mlir_ciface_\w+)\(void \*\*args", text)
        wrapper = re.search(r"_wrapper\((.*?)\) \{", text, re.DOTALL)
        parts = [p.strip() for p in wrapper[1].split(",")][1:]
        arguments = [re.fullmatch(r"(.*?)(\w+)", p).groups() for p in parts]
        arguments = [(kind.strip(), name) for kind, name in arguments]
        return Exported(object_file.read_bytes(), entry[1], entry[2], arguments)

    def record(self, values: list, sm_count: int, parameter_sizes) -> "tuple[list[Launch], bytes]":
        """The launches that a call makes, and the cubin that the host code loads.

        values: addresses and integers, one for each argument but the stream.
        parameter_sizes: from a kernel's name to the sizes in bytes of its parameters.
        """
        library = _link(self.object_file)
        launches: list[Launch] = []

        def launched(kernel, config, arguments):
            launches.append(_launch(kernel.decode(), config[0], arguments, parameter_sizes))
            return 0

        callback = _LAUNCHED(launched)
        library.recorder_reset(callback, sm_count)
        _load(library, self.prefix)
        kinds = [(kind, name) for kind, name in self.arguments if kind != "cudaStream_t"]
        if len(kinds) != len(values):
            names = [name for _, name in kinds]
            raise TypeError(f"the kernel takes {names}, but got {len(values)} values")
        given = iter(values)
        cells = [_cell(kind, name, given) for kind, name in self.arguments]
        result = ctypes.c_int32(0)
        cells.append(result)
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        getattr(library, self.entry)(pointers, ctypes.c_int32(len(cells)))
        if result.value:
            raise RuntimeError(f"the host code returned the CUDA error {result.value}")
        library.recorder_image.restype = ctypes.c_void_p
        return launches, _cubin(library.recorder_image())


def _link(object_file: bytes) -> ctypes.CDLL:
    flags = ["-std=c++20", "-O1", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(object_file)
        inputs = [native.CORE / "driver.cc", path]
        return ctypes.CDLL(str(native.compile_shared("kernel", inputs, flags)))


def _load(library, prefix: str) -> None:
    module = ctypes.c_void_p()
    module_at = ctypes.pointer(module)
    error, device = ctypes.c_int32(0), ctypes.c_int32(0)
    for step, cells in {
        "cuda_init": [module_at, error],
        "cuda_load_to_device": [module_at, device, error],
    }.items():
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        getattr(library, f"_mlir_{prefix}_{step}")(pointers)
        if error.value:
            raise RuntimeError(f"{step} returned the CUDA error {error.value}")


def _cell(kind: str, name: str, given):
    if kind == "cudaStream_t":
        return ctypes.c_void_p(0)
    value = next(given)
    if kind.replace(" ", "") == "void*":
        return ctypes.c_void_p(value)
    integers = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32}
    if kind in integers:
        return integers[kind](value)
    raise TypeError(f"argument {name} of type {kind}: only pointers and integers are supported")


def _launch(kernel: str, config: LaunchConfig, arguments, parameter_sizes) -> Launch:
    cluster, pdl = (1, 1, 1), False
    for i in range(config.attribute_count):
        attribute = config.attributes[i]
        if attribute.id == CLUSTER_DIMENSION:
            cluster = tuple(attribute.value[:3])
        elif attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION:
            pdl = bool(attribute.value[0])
    params = [
        ctypes.string_at(arguments[i], size) for i, size in enumerate(parameter_sizes(kernel))
    ]
    return Launch(
        kernel,
        tuple(config.grid),
        tuple(config.block),
        cluster,
        config.dynamic_smem,
        pdl,
        params,
    )


def _cubin(address: int) -> bytes:
    """The cubin in a fat binary in memory: one header, then one entry with an ELF image."""
    magic, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != 0xBA55ED50:
        raise RuntimeError("the host code loads no fat binary")
    entry = ctypes.string_at(address + header, size)
    kind, _, entry_header, payload = struct.unpack_from("<HHIQ", entry)
    image = entry[entry_header : entry_header + payload]
    if kind != 2 or not image.startswith(b"\x7fELF"):
        raise RuntimeError("the fat binary holds no plain cubin")
    return image


def registers_per_thread(cubin: bytes) -> dict[str, int]:
    """By kernel: the registers of a thread at entry, as the cubin's .nv.info section says."""
    sections, entry_size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    rows = [struct.unpack_from("<IIQQQQII", cubin, sections + i * entry_size) for i in range(count)]
    content = lambda row: cubin[row[4] : row[4] + row[5]]
    text = lambda strings, at: strings[at:].split(b"\0", 1)[0].decode()
    by_name = {text(content(rows[names]), row[0]): row for row in rows}
    symbols, strings = content(by_name[".symtab"]), content(by_name[".strtab"])
    info = content(by_name[".nv.info"])
    found, at = {}, 0
    register_count, sized = 0x2F, 4
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == sized and attribute == register_count:
            symbol, registers = struct.unpack_from("<II", info, at)
            (name,) = struct.unpack_from("<I", symbols, 24 * symbol)
            # The hardware allocates them by eights.
            found[text(strings, name)] = -(-registers // 8) * 8
        at += size if form == sized else 0
    return found
