"""The Blackwell kernels beside NVIDIA's: what the compiler made of each.

  python -m benchmarks.blackwell                 needs no GPU, but the extras "emulator" and "test"
  python -m benchmarks.blackwell --gpu           on a B200: checks, tunes, compares with peers

NVIDIA's are those of nvidia-cutlass-operators, compiled in the same run for bfloat16. Of the
matmul, with weights (g, n, k), it is the contiguous-offset grouped kernel. There is none for
the outer product of groups, so the persistent dense kernel stands beside it, with operands
that lie the same way, as for a single group. For each tile: rows and K tiles of weights that
one multiprocessor holds in flight (columns of lhs and of rhs, for the outer product), and
their KiB; KiB of shared memory that stages results; columns of tensor memory; bytes of a
store; instructions of the innermost loops that copy, multiply and store, for each K tile or,
of the last, for each KiB of results of a warp; and their instructions that wait for or signal
a barrier, of which those of the second ring of a stage with two K tiles run for every other K
tile only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ARCH = "sm_100f"
ROOT = Path(__file__).resolve().parents[1]

TITLES = {"dgrad": "grouped_matmul, (g, n, k)", "wgrad": "grouped_outer"}
# By form: NVIDIA's kernel, how operands lie, and its tiles.
_PAIR = {"cluster": (2, 1), "two_cta": True}
NVIDIA = {
    "dgrad": (
        "grouped",
        {},
        {
            "64x128": {"tile": (64, 128)},
            "128x128": {"tile": (128, 128)},
            "256x128 pair": {"tile": (256, 128), **_PAIR},
            "256x256 pair": {"tile": (256, 256), **_PAIR},
        },
    ),
    "wgrad": (
        "dense",
        {"a_mn_major": True, "b_mn_major": True},
        {
            "dense 128x128": {"tile": (128, 128)},
            "dense 256x256 pair": {"tile": (256, 256), **_PAIR},
        },
    ),
}


def start_worker():
    # The DSL reads these when it is imported.
    os.environ |= {"CUTE_DSL_ARCH": ARCH, "CUTE_DSL_NO_CACHE": "1", "CUTE_DSL_KEEP": "ptx,cubin"}
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp()
    sys.path[:0] = [str(ROOT / "tests")]


def compile_ours(form, fields):
    """The GPU binary of one of our tiles, and what it holds in memory."""
    from pearl_jax import TileConfig, tiling
    from pearl_jax.kernels.blackwell import compile_kernel

    tile = TileConfig(*fields)
    spec = tiling.KernelSpec(ARCH, form, "bfloat16", "bfloat16", True, tile)
    weights, rows = tiling.stages(ARCH, tile)
    ratio = tile.k // tiling.K_TILE
    memory = {
        "rows": rows,
        "weights": weights * ratio,
        "weights_kib": weights * tile.n // tile.ctas * tile.k * 2 // 1024,
        "rows_kib": rows * tile.m // tile.ctas * tiling.K_TILE * 2 // 1024,
        "output_kib": 0,
        "columns": tiling.tensor_memory_columns(tile),
    }
    return compile_kernel(spec).__cubin__, memory


def compile_nvidias(form, case):
    """As compile_ours, of NVIDIA's kernel."""
    compile_nvidia = importlib.import_module("emulator.compile_nvidia")  # of tests/
    cute = importlib.import_module("cutlass.cute")
    kernel, layout, _ = NVIDIA[form]
    gemm = compile_nvidia.make_gemm(kernel, **case)
    set_up, staged = gemm._setup_attributes, []

    def note_epilogue_tile():
        set_up()
        # Here, as its parts are layouts that only exist while the kernel is traced.
        staged.extend(int(cute.size(extent)) for extent in gemm.epi_tile)

    gemm._setup_attributes = note_epilogue_tile
    compiled = compile_nvidia.compile_gemm(ARCH, gemm, kernel, 2, **layout)
    ctas = 2 if case.get("two_cta") else 1
    stages, (m, n) = gemm.num_ab_stage, case["tile"]
    memory = {
        "rows": stages,
        "weights": stages,
        "weights_kib": stages * n // ctas * 128 // 1024,
        "rows_kib": stages * m // ctas * 128 // 1024,
        "output_kib": gemm.num_c_stage * math.prod(staged) * 2 // 1024,
        "columns": gemm.num_tmem_alloc_cols,
    }
    return compiled.__cubin__, memory


def disassemble(cubin):
    """(label or instruction) of each line of a GPU binary's code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool("nvdisasm"), "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    lines = re.findall(r"^(\.L_x_\d+):|\*/ +((?:@!?\w+ +)?[A-Z][^;]*?) *;", text, re.MULTILINE)
    return [label + ":" if label else instruction for label, instruction in lines]


def tool(name):
    """A program of the CUDA toolkit, from its package or from the PATH."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or ()
        return next(str(f.locate()) for f in files if f.stem == name and f.parent.name == "bin")
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        found = shutil.which(name)
        if found is None:
            raise SystemExit(f"there is no {name} here: install nvidia-cuda-{name}") from None
        return found


def loops(code):
    """The bodies of all loops, the shortest first: from a label to a branch back to it."""
    at = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    bodies = []
    for i, line in enumerate(code):
        target = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", line)
        if target and at[target[1]] < i:
            body = [x for x in code[at[target[1]] : i + 1] if not x.endswith(":")]
            bodies.append(body)
    return sorted(bodies, key=len)


def count(body, *names):
    return sum(bool(re.search(rf"(^| )({'|'.join(names)})", x)) for x in body)


def innermost(bodies, *names):
    """The shortest loop with an instruction of each name; (), if there is none."""
    return next((body for body in bodies if all(count(body, name) for name in names)), ())


def figures(cubin):
    """What the disassembly says of one kernel."""
    code = disassemble(cubin)
    bodies = loops(code)
    copy = innermost(bodies, "UTMALDG", "SYNCS.ARRIVE")
    multiply = innermost(bodies, "UTCHMMA")
    stored = innermost(bodies, "LDTM")
    width = max(
        (32 for x in code if "STG.E.ENL2.256" in x),
        default="TMA" if count(code, "UTMASTG") else 16,
    )
    barriers = ("SYNCS", "UTCBAR", "UTCATOMSWS.*COMMIT")
    # 32 lanes of 32 bits where the shape is not said; as bfloat16 half of the bytes.
    loads = re.findall(r"LDTM(?:\.(\d+)dp(\d+)bit)?\.x(\d+)", "\n".join(stored))
    kib = sum(int(lanes or 32) * int(bits or 32) * int(x) for lanes, bits, x in loads) / 16 / 1024
    copies = max(count(copy, "SYNCS.ARRIVE"), 1)  # K tiles of an iteration
    products = max(count(multiply, "UTCHMMA") // 4, 1)
    return {
        "store": width,
        "copy": len(copy) / copies,
        "multiply": len(multiply) / products,
        "epilogue": len(stored) / kib if kib else 0,
        "barriers": count(copy, *barriers) / copies + count(multiply, *barriers) / products,
    }


def compare():
    """form -> kernel and tile -> its figures."""
    from pearl_jax import TileConfig, tiling

    ours = {form: tiling.tiles(ARCH, form) for form in NVIDIA}
    ours["dgrad"].append(TileConfig(128, 256, 64, rows_on_m=True))
    with concurrent.futures.ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker
    ) as pool:
        running = {
            form: {
                f"pearl_jax {tile}": pool.submit(compile_ours, form, tuple(vars(tile).values()))
                for tile in ours[form]
            }
            | {f"NVIDIA {n}": pool.submit(compile_nvidias, form, c) for n, c in cases.items()}
            for form, (_, _, cases) in NVIDIA.items()
        }
        found = {form: {} for form in running}
        for form, futures in running.items():
            for name, future in futures.items():
                cubin, memory = future.result()
                found[form][name] = memory | figures(cubin)
    return found


COLUMNS = {
    "rows": "stages rows",
    "weights": "weights",
    "rows_kib": "KiB rows",
    "weights_kib": "weights",
    "output_kib": "output",
    "columns": "TMEM",
    "store": "store",
    "copy": "copy",
    "multiply": "multiply",
    "epilogue": "epilogue",
    "barriers": "barriers",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="run on a Blackwell GPU instead")
    parser.add_argument("--json", metavar="FILE", help="write the table's figures")
    options = parser.parse_args()
    if options.gpu:
        run_on_gpu()
        return
    found = compare()
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    width = max(len(name) for rows in found.values() for name in rows)
    for form, rows in found.items():
        titles = (f"{title:>{max(len(title), 8)}}" for title in COLUMNS.values())
        print(f"{TITLES[form]:<{width}}", *titles)
        for name, row in rows.items():
            cells = (
                f"{x if isinstance(x, str) else format(x, '.4g'):>{max(len(title), 8)}}"
                for x, title in ((row[column], title) for column, title in COLUMNS.items())
            )
            print(f"{name:<{width}}", *cells)
        print()
    print("Compiled, not run: nothing here was measured on a Blackwell GPU.")


def run_on_gpu():
    """Everything that a Blackwell GPU is needed for."""
    from pearl_jax import library
    from pearl_jax.model_shapes import MODELS

    arch = library.present_arch()
    if arch != ARCH:
        raise SystemExit(
            f"there is no Blackwell GPU here ({arch or 'no GPU with kernels'}): nothing was run"
        )
    python = [sys.executable, "-m"]
    times = "benchmarks/results/b200.csv"
    forms = ["--form", "fwd", "dgrad", "wgrad"]
    for command in (
        [*python, "pytest", "-q", "-m", "gpu", "tests/gpu"],  # every kernel among others
        [*python, "pearl_jax.autotune", "--shapes", *MODELS],
        [*python, "benchmarks.grouped_matmul", *forms, "--measure-peaks", "--csv", times],
        [*python, "benchmarks.report", times],
    ):
        print("==", *command[1:], flush=True)
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
