"""Compiles the kernels of one architecture ahead of time; needs no GPU.

    python ffi/aot.py --arch sm_90a --out DIR            one object per kernel, and kernels.inc
    python ffi/aot.py --arch sm_90a --out DIR --list     prints the objects that makes

kernels.inc has one row per kernel: KERNEL(name, form, dtype, out_dtype, load_library,
load_to_device, launch), the last three being symbols of the object. What DIR holds of an earlier
run is kept where its sources are the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import hashlib
import importlib
import importlib.metadata
import inspect
import multiprocessing
import os
import re
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORMS = {"fwd": "kFwd", "dgrad": "kDgrad", "wgrad": "kWgrad"}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

# What the launchers of each form take, of LaunchArguments in kernels.h.
POINTERS = ("lhs", "rhs", "group_sizes", "group_offset", "batch_index", "out")
SIZES = ("m", "n", "k", "num_groups", "num_sizes", "num_batches", "lhs_batches", "rhs_batches")
ARGUMENTS = {
    "fwd": [*POINTERS, *SIZES, "num_sms", "stream"],
    "wgrad": [*POINTERS, "partial", *SIZES, "reduced", "accumulate", "num_sms", "stream"],
}
ARGUMENTS["dgrad"] = ARGUMENTS["fwd"]

# Without it the launchers have instructions of the building machine's CPU, such as AVX-512.
HOST_TARGET = "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64"

# The module of each architecture: compile_kernel(spec) gives the result of cute.compile.
MODULES = {"sm_90a": "pearl_jax.kernels.hopper", "sm_100f": "pearl_jax.kernels.blackwell"}

# tiling and kernels are read without the package's __init__, which needs JAX.
_package = types.ModuleType("pearl_jax")
_package.__path__ = [str(ROOT / "pearl_jax")]
sys.modules["pearl_jax"] = _package

from pearl_jax import tiling  # noqa: E402


def kernels(arch, extra_tiles):
    """Those of tiling, and of "arch:form:tile,..." those for arch: bfloat16, wide."""
    specs = tiling.kernels(arch)
    for text in filter(None, extra_tiles.split(",")):
        try:
            of_arch, form, tile = text.split(":")
            tile = tiling.TileConfig.parse(tile)
        except ValueError:
            form = ""
        if form not in FORMS:
            raise SystemExit(f"extra tiles are written arch:form:tile, got {text!r}")
        if of_arch == arch:
            valid, reason = tiling.is_valid(arch, tile, form)
            if not valid:
                raise SystemExit(f"extra tile {text}: {reason}")
            specs.append(tiling.KernelSpec(arch, form, "bfloat16", "bfloat16", True, tile))
    return list(dict.fromkeys(specs))


def start_worker(arch):
    # The DSL reads these when it is imported. Without a GPU, and without the first, it takes
    # the target for sm_100 and can export nothing else.
    os.environ |= {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    import cutlass

    # The CUDA 13 flavor's binaries do not load on a CUDA 12 driver.
    if cutlass.CUDA_VERSION.major != 12:
        raise RuntimeError(
            f"kernels are built with the CUDA 12 flavor of nvidia-cutlass-dsl, but "
            f"{cutlass.CUDA_VERSION} is installed: remove nvidia-cutlass-dsl-libs-cu13"
        )


def fingerprint():
    """Hash of all that goes into a kernel beside its spec.

    The tables of tiling do not: changing a choice compiles nothing anew.
    """
    sources = [Path(__file__), *sorted((ROOT / "pearl_jax/kernels").glob("*.py"))]
    constants = {name: x for name, x in vars(tiling).items() if isinstance(x, int)}
    parts = (
        *(path.read_text() for path in sources),
        *(inspect.getsource(x) for x in (tiling.TileConfig, tiling.KernelSpec)),
        repr(constants),
        importlib.metadata.version("nvidia-cutlass-dsl"),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_to(out, key, spec):
    """Writes spec's object into the folder out, unless it is there, and returns its row."""
    record = out / f"{spec.name}.row"
    if record.exists():
        old_key, row = record.read_text().split(maxsplit=1)
        if old_key == key:
            (out / f"{spec.name}.o").touch()  # newer than the sources again, for the build tool
            return row
        record.unlink()
    row = compile_anew(out, spec)
    record.write_text(f"{key} {row}")
    return row


def compile_anew(out, spec):
    from cutlass.base_dsl.compiler import HostTarget

    compiled = importlib.import_module(MODULES[spec.arch]).compile_kernel(spec)
    compiled.host_target = HostTarget(HOST_TARGET)
    compiled.export_to_c(str(out), spec.name, function_prefix=spec.name)
    header = out / f"{spec.name}.h"
    text = header.read_text()
    header.unlink()
    # The name of the entry point has the types of its arguments in it.
    launch = re.search(r"void (_mlir_\w+)\(void \*\*args, int32_t num_args\)", text)
    wrapper = re.search(r"_wrapper\(\w+ \*module, (.*)\) {", text)
    arguments = re.findall(r"(\w+)(?:,|$)", wrapper[1])
    if arguments != ARGUMENTS[spec.form]:
        expected = ARGUMENTS[spec.form]
        raise TypeError(f"{spec.name}: the launcher takes {arguments}, not {expected}")
    fields = (
        f'"{spec.name}"',
        FORMS[spec.form],
        DTYPES[spec.dtype],
        DTYPES[spec.out_dtype],
        f"_mlir_{spec.name}_cuda_init",
        f"_mlir_{spec.name}_cuda_load_to_device",
        launch[1],
    )
    return f"KERNEL({', '.join(fields)})\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", choices=MODULES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the objects")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the kernels' names")
    parser.add_argument("--extra-tiles", default="", help="arch:form:tile,... beside the table's")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="print the objects and stop")
    args = parser.parse_args()
    specs = kernels(args.arch, args.extra_tiles)
    specs = [s for s in specs if fnmatch.fnmatch(s.name, args.only)]
    if args.list:
        print(*(args.out / f"{s.name}.o" for s in specs), sep="\n")
        return

    args.out.mkdir(parents=True, exist_ok=True)
    key = fingerprint()
    rows, start = {}, time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(
        max(1, min(args.jobs, len(specs))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(args.arch,),
    ) as pool:
        futures = {pool.submit(compile_to, args.out, key, spec): spec.name for spec in specs}
        try:
            for done in concurrent.futures.as_completed(futures):
                name = futures[done]
                if error := done.exception():
                    error.add_note(f"while compiling {name}")
                    raise error
                rows[name] = done.result()
                seconds = time.monotonic() - start
                print(f"[{len(rows)}/{len(specs)}] {seconds:.0f} s  {name}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    (args.out / "kernels.inc").write_text("".join(rows[s.name] for s in specs))


if __name__ == "__main__":
    main()
