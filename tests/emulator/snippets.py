"""Runs a few lines of PTX, for tests of single instructions and of planted faults."""

import numpy as np

from . import native
from .emulator import MODES, HazardError, Memory, Report, run_launch
from .launch import Launch
from .lower import lower
from .ptx import parse

_TEXT = """.version 8.8
.target sm_100f
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry snippet({params})
{{
  .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>;
  .reg .f32 %f<16>; .reg .f64 %g<8>; .reg .b128 %q<4>;
{body}
  ret;
}}
"""


def run_ptx(
    body: str,
    *arrays: np.ndarray | bytes,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 4096,
    pdl: bool = False,
    mode: str = "in order",
    seed: int = 0,
    entry_registers: int = 0,
    strict_tmem: bool = False,
    check: bool = True,
) -> tuple[list[np.ndarray], Report]:
    """Runs `body` with parameters p0, p1, ...: pointers to arrays, or 128-byte tensor maps.

    A tensor map is given as a function from the addresses of the arrays to its bytes.
    """
    memories = [Memory(a) for a in arrays if isinstance(a, np.ndarray)]
    addresses = [m.address for m in memories]
    given = iter(addresses)
    params, values = [], []
    for i, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            params.append(f".param .u64 p{i}")
            values.append(next(given).to_bytes(8, "little"))
        else:
            params.append(f".param .align 64 .b8 p{i}[128]")
            values.append(array(addresses))
    program = lower(parse(_TEXT.format(params=", ".join(params), body=body)), "snippet")
    launch = Launch("snippet", (grid, 1, 1), (block, 1, 1), (cluster, 1, 1), smem, pdl, values)
    options = native.Options(
        mode=MODES[mode],
        seed=seed,
        resident=1,
        strict_tmem=strict_tmem,
        entry_registers=entry_registers,
        max_instructions=100_000,
    )
    report = run_launch(program, launch, memories, options)
    if check and report.hazards:
        raise HazardError(report)
    return [m.content() for m in memories], report


def tensor_map(array: int, shape, box, bytes_per_element: int, swizzle: int = 0, code: int = 10):
    """For `run_ptx`: a map of the array with that index, contiguous, `shape` fastest first.

    code: the element type in the map's flags; 10 is bfloat16.
    """

    def encode(addresses) -> bytes:
        rank = len(shape)
        strides, step = [], bytes_per_element
        for size in shape[:-1]:
            step *= size
            strides.append(step // 16)
        strides += [0] * (4 - len(strides))
        sizes = [s - 1 for s in shape] + [0] * (5 - rank)
        boxes = [b - 1 for b in box] + [0] * (5 - rank)
        span = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
        words = [0] * 16
        words[0] = addresses[array]
        words[1] = 2 | (rank - 1) << 4 | code << 7 | span << 13 | strides[0] << 32
        words[2] = strides[1] | strides[2] << 32
        words[3] = strides[3]
        words[4] = sizes[0] | sizes[1] << 32
        words[5] = sizes[2] | sizes[3] << 32
        words[6] = sizes[4] | boxes[0] << 56
        words[7] = sum(b << (8 * i) for i, b in enumerate(boxes[1:]))
        return b"".join(w.to_bytes(8, "little") for w in words)

    return encode
