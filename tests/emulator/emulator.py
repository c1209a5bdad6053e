"""Runs compiled kernels: `outputs, report = emulate(compiled, [x, w, y, m, n, k])`."""

import ctypes
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from . import native
from .encode import SPECIAL_KINDS, Program
from .launch import Exported, Launch, registers_per_thread
from .lower import lower
from .ptx import Module, parse

MODES = {"in order": 0, "random": 1, "adversarial": 2}
_CANARY = 0xA5
_GUARD = 512  # bytes before and after each array; also its alignment


class HazardError(AssertionError):
    """The emulator found hazards. `kinds` names them, the message explains each."""

    def __init__(self, report: "Report"):
        self.report = report
        self.kinds = [kind for kind, _ in report.hazards]
        super().__init__("\n".join(f"{kind}: {what}" for kind, what in report.hazards))


@dataclass
class Report:
    hazards: list[tuple[str, str]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    instructions: int = 0  # executed by warps
    busiest: int = 0  # of these, by the warps of the CTA that executed the most
    async_operations: int = 0
    barrier_phases: int = 0
    seconds: float = 0.0

    def add(self, other: "Report") -> None:
        self.hazards += other.hazards
        self.instructions += other.instructions
        self.busiest = max(self.busiest, other.busiest)
        self.async_operations += other.async_operations
        self.barrier_phases += other.barrier_phases
        self.seconds += other.seconds


class Hold(NamedTuple):
    """Holds warps back: what one statement is for must go on while another waits for it.

    Each of the first `times` times that a warp comes to statement `held`, it waits until its
    cluster has executed statement `awaited` more than `ratio` times for each time it came there.
    Statements are counted as in Module.kernels[...].statements.
    """

    held: int
    awaited: int
    ratio: int
    times: int


class Memory:
    """One array in global memory, between guards that nobody may write."""

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)
        self.size = self.array.nbytes
        self.raw = np.full(self.size + 3 * _GUARD, _CANARY, np.uint8)
        self.start = -self.raw.ctypes.data % _GUARD + _GUARD
        self.address = self.raw.ctypes.data + self.start
        self.raw[self.start : self.start + self.size] = np.frombuffer(
            self.array.tobytes(), np.uint8
        )

    def content(self) -> np.ndarray:
        data = self.raw[self.start : self.start + self.size]
        return data.view(self.array.dtype).reshape(self.array.shape).copy()

    def guards_whole(self) -> bool:
        before, after = self.raw[: self.start], self.raw[self.start + self.size :]
        return bool((before == _CANARY).all() and (after == _CANARY).all())


@dataclass
class Kernel:
    """A compiled function: its PTX, and its exported host code."""

    module: Module
    exported: Exported
    programs: dict[str, Program] = field(default_factory=dict)

    @staticmethod
    def of(compiled) -> "Kernel":
        """From what `cute.compile(..., options="--keep-ptx")` returns."""
        if not compiled.__ptx__:
            raise ValueError('compile with options="... --keep-ptx"')
        return Kernel(parse(compiled.__ptx__), Exported.of(compiled))

    def program(self, name: str) -> Program:
        if name not in self.programs:
            self.programs[name] = lower(self.module, name)
        return self.programs[name]

    def parameter_sizes(self, name: str) -> list[int]:
        return [p.size for p in self.module.kernels[name].params]


def emulate(
    kernel,
    values: list,
    *,
    mode: str = "in order",
    seed: int = 0,
    sm_count: int = 4,
    resident: int = 1,
    strict_tmem: bool = False,
    allow_unwritten: bool = False,
    hold: Hold | None = None,
    check: bool = True,
    max_instructions: int = 200_000_000,
) -> tuple[list[np.ndarray], Report]:
    """Calls the host code with `values` and runs the kernels that it launches.

    kernel: what `cute.compile` returned with the option --keep-ptx, or a `Kernel`.
    values: for each argument but the stream, an array (a pointer to its content in global
      memory) or an integer. The arrays themselves do not change.
    mode: how what is asynchronous is scheduled: "in order", "random" or "adversarial".
    sm_count: the multiprocessors that the driver reports.
    resident: clusters that run at the same time.
    strict_tmem: the registers of tcgen05.ld are free only after tcgen05.wait::ld.
    allow_unwritten: the tensor core may read shared memory that nothing wrote.
    hold: an order of two statements that the kernel must allow, or it deadlocks.
    check: raise HazardError when there is any.

    Returns the arrays after the run, in the order of `values`, and a report.
    """
    kernel = kernel if isinstance(kernel, Kernel) else Kernel.of(kernel)
    memories = [Memory(v) for v in values if isinstance(v, np.ndarray)]
    given = iter(memories)
    raw = [next(given).address if isinstance(v, np.ndarray) else int(v) for v in values]
    launches, cubin = kernel.exported.record(raw, sm_count, kernel.parameter_sizes)
    registers = registers_per_thread(cubin)
    report = Report(launches=launches)
    for launch in launches:
        options = native.Options(
            mode=MODES[mode],
            seed=seed,
            resident=resident,
            strict_tmem=strict_tmem,
            allow_unwritten=allow_unwritten,
            entry_registers=registers.get(launch.kernel, 0),
            max_instructions=max_instructions,
            hold=native.Hold(*(hold or ())),
        )
        report.add(run_launch(kernel.program(launch.kernel), launch, memories, options))
        if report.hazards:
            break
    for i, memory in enumerate(memories):
        if not memory.guards_whole():
            report.hazards.append(("canary", f"written outside array {i}"))
    if check and report.hazards:
        raise HazardError(report)
    return [m.content() for m in memories], report


def run_launch(
    program: Program, launch: Launch, memories: list[Memory], options: native.Options
) -> Report:
    """Runs one launch of one program on the machine."""
    if any(g % c for g, c in zip(launch.grid, launch.cluster)):
        return Report([("launch", f"grid {launch.grid} of clusters {launch.cluster}")])
    if program.reqntid and tuple(launch.block[: len(program.reqntid)]) != program.reqntid:
        return Report([("launch", f"block {launch.block}, but .reqntid {program.reqntid}")])
    if program.static_smem - 1024 + launch.dynamic_smem > 232448:
        return Report([("launch", f"{launch.dynamic_smem} bytes of dynamic shared memory")])
    params = _aligned(_layout(program, launch.params))
    globals_ = _aligned(bytes(program.globals))
    regions = [(m.address, m.address + m.size, True, i) for i, m in enumerate(memories)]
    regions.append((globals_.ctypes.data, globals_.ctypes.data + len(globals_), True, len(regions)))
    view = native.ProgramView(
        program.code,
        len(program.code) // 40,
        program.operands,
        len(program.operands) // 12,
        program.constants,
        len(program.constants),
        _relocated(program.specials, globals_.ctypes.data),
        len(program.specials) // 16,
        program.register_bytes,
        program.local_bytes,
        program.static_smem,
    )
    config = native.LaunchConfig(
        launch.grid, launch.block, launch.cluster, launch.dynamic_smem, launch.pdl
    )
    room = 1 << 16
    text = ctypes.create_string_buffer(room)
    result = native.Result()
    run = native.core().emulator_run
    start = time.perf_counter()
    run(
        ctypes.byref(view),
        ctypes.byref(config),
        ctypes.byref(options),
        ctypes.c_void_p(params.ctypes.data),
        ctypes.c_uint64(len(params)),
        (native.Region * len(regions))(*regions),
        ctypes.c_uint64(len(regions)),
        ctypes.byref(result),
        text,
        ctypes.c_uint64(room),
    )
    seconds = time.perf_counter() - start
    lines = text.raw[: result.report_bytes].decode(errors="replace").split("\0")[:-1]
    hazards = [tuple(line.split("\t", 1)) for line in lines]
    return Report(
        hazards,
        [launch],
        result.instructions,
        result.busiest,
        result.async_operations,
        result.barrier_phases,
        seconds,
    )


def _layout(program: Program, params: list[bytes]) -> bytes:
    data = bytearray()
    for offset, param in zip(program.param_offsets, params):
        data.extend(bytes(offset - len(data)))
        data.extend(param)
    return bytes(data)


def _aligned(data: bytes) -> np.ndarray:
    """A copy of the bytes at an address that is a multiple of 256."""
    raw = np.zeros(len(data) + 256, np.uint8)
    start = -raw.ctypes.data % 256
    raw[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return raw[start : start + len(data)]


def _relocated(specials: bytes, globals_address: int) -> bytes:
    rows = np.frombuffer(specials, np.dtype([("o", "<u4"), ("kind", "<u4"), ("value", "<u8")]))
    rows = rows.copy()
    rows["value"][rows["kind"] == SPECIAL_KINDS["kGlobalAddress"]] += globals_address
    return rows.tobytes()
