"""Edits of correct kernels: one statement of the PTX, or one launch, at a time."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .emulator import HazardError, Kernel, emulate
from .launch import Exported
from .ptx import Statement

SCHEDULES = [
    ("in order", 0),
    *[("random", seed) for seed in range(6)],
    *[("adversarial", seed) for seed in range(4)],
]


def edit_ptx(
    kernel: Kernel, pattern: str, nth: int, edit: Callable[[Statement], Statement]
) -> Kernel:
    """The kernel with `edit` applied to the nth statement whose text begins like `pattern`."""
    (name,) = kernel.module.kernels
    original = kernel.module.kernels[name]
    text = lambda s: f"{s.opcode} {', '.join(s.operands)}"
    found = [i for i, s in enumerate(original.statements) if re.match(pattern, text(s))]
    if nth >= len(found):
        raise LookupError(f"{len(found)} statements match {pattern}")
    statements = list(original.statements)
    statements[found[nth]] = edit(statements[found[nth]])
    changed = replace(original, statements=statements)
    return Kernel(replace(kernel.module, kernels={name: changed}), kernel.exported)


def drop(s: Statement) -> Statement:
    """Nothing instead; a wait is passed at once."""
    if ".try_wait" in s.opcode:
        return replace(s, opcode="setp.eq.u32", operands=(s.operands[0], "0", "0"))
    return replace(s, opcode="nanosleep.u32", operands=("0",))


def unguarded(s: Statement) -> Statement:
    """Without its predicate; a conditional branch is never taken."""
    return drop(s) if s.opcode.startswith("bra") else replace(s, guard=None)


def operand(index: int, new: str | Callable[[str], str]) -> Callable[[Statement], Statement]:
    """Another operand in one place."""

    def edit(s: Statement) -> Statement:
        operands = list(s.operands)
        operands[index] = new(operands[index]) if callable(new) else new
        return replace(s, operands=tuple(operands))

    return edit


def displaced(index: int, by: int) -> Callable[[Statement], Statement]:
    """An address operand further on."""

    def move(token: str) -> str:
        base, _, old = token.strip("[]").partition("+")
        return f"[{base}+{int(old or 0) + by}]"

    return operand(index, move)


def added(index: int, by: int) -> Callable[[Statement], Statement]:
    """An immediate operand plus `by`."""
    return operand(index, lambda token: str(int(token, 0) + by))


def opcode(old: str, new: str) -> Callable[[Statement], Statement]:
    """Another modifier."""
    return lambda s: replace(s, opcode=s.opcode.replace(old, new))


@dataclass
class _EditedHost(Exported):
    edit: Callable = None

    def record(self, *arguments):
        launches, cubin = super().record(*arguments)
        for launch in launches:
            self.edit(launch)
        return launches, cubin


def edit_launch(kernel: Kernel, edit: Callable) -> Kernel:
    """The kernel with `edit` applied to each launch before it runs."""
    host = _EditedHost(**vars(kernel.exported), edit=edit)
    return Kernel(kernel.module, host)


def edit_tensor_map(nth: int, word: int, change: Callable[[int], int]) -> Callable:
    """Changes one of the 16 words of 8 bytes of the nth tensor map of a launch."""

    def edit(launch):
        maps = [i for i, p in enumerate(launch.params) if len(p) == 128]
        data = bytearray(launch.params[maps[nth]])
        old = int.from_bytes(data[8 * word : 8 * word + 8], "little")
        data[8 * word : 8 * word + 8] = change(old).to_bytes(8, "little")
        launch.params[maps[nth]] = bytes(data)

    return edit


def caught_by(kernel: Kernel, gemm, schedules=SCHEDULES, **options) -> str | None:
    """What shows that the kernel is wrong in one of the schedules, or None."""
    for mode, seed in schedules:
        try:
            outputs, _ = emulate(kernel, gemm.values, mode=mode, seed=seed, **options)
        except HazardError as error:
            return f"{error.kinds[0]} ({mode})"
        if wrong := gemm.wrong(outputs):
            return f"{wrong} wrong elements ({mode})"
    return None
