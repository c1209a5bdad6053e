"""How instructions are told apart: handlers by name, and the pieces that they share."""

import re
from collections.abc import Callable

from .encode import TYPE_BITS, Encoder
from .ptx import PtxError, Statement, split_operands

SPACES = {
    "": 0,
    "global": 1,
    "shared": 2,
    "shared::cta": 2,
    "shared::cluster": 3,
    "local": 4,
    "param": 5,
    "param::entry": 5,
    "const": 6,
}
# Modifiers that say nothing to an emulator that models no caches and no scopes narrower
# than the whole device.
_MEMORY_HINTS = re.compile(
    r"weak|relaxed|acquire|release|acq_rel|sc|volatile|cta|cluster|gpu|sys|nc|ca|cg|cs|lu|cv|wb|wt|"
    r"L1::\w+|L2::\w+"
)

HANDLERS: dict[str, Callable[["Lowering", Statement, list[str]], None]] = {}


def instruction(*names: str):
    def register(handler):
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


class Lowering:
    def __init__(self, encoder: Encoder):
        self.encoder = encoder

    def statement(self, s: Statement) -> None:
        parts = s.opcode.split(".")
        # The longest registered name wins: "mbarrier.init" before "mbarrier".
        for n in range(min(4, len(parts)), 0, -1):
            if handler := HANDLERS.get(".".join(parts[:n])):
                mods = parts[n:]
                handler(self, s, mods)
                if mods:
                    raise PtxError(f"{s.text}: unknown modifier .{mods[0]}")
                return
        raise unknown(s)

    # Pieces of instructions

    def type(self, s: Statement, mods: list[str]) -> str:
        if not mods or mods[-1].upper() not in TYPE_BITS:
            raise PtxError(f"{s.text}: unknown type in {s.opcode}")
        return mods.pop()

    def src(self, s: Statement, token: str, bits: int):
        return self.encoder.source(s, token, bits)

    def vector(self, s: Statement, token: str, bits: int, dest: bool) -> list:
        tokens = split_operands(token[1:-1]) if token.startswith("{") else (token,)
        one = self.encoder.dest if dest else self.encoder.source
        return [one(s, t, bits) for t in tokens]

    def emit(self, s: Statement, op: str, type: str, operands, mod=(), **more) -> None:
        self.encoder.emit(s, op, type, operands, mod, **more)

    def expect(self, s: Statement, count: int | tuple[int, ...]) -> None:
        if len(s.operands) not in (count if isinstance(count, tuple) else (count,)):
            raise PtxError(f"{s.text}: {len(s.operands)} operands, not {count}")


def take(mods: list[str], *names: str) -> str:
    """Removes and returns the one of `names` that is among the modifiers, or ""."""
    for name in names:
        if name in mods:
            mods.remove(name)
            return name
    return ""


def drop_hints(mods: list[str]) -> None:
    mods[:] = [m for m in mods if not _MEMORY_HINTS.fullmatch(m)]


def space_of(mods: list[str]) -> int:
    for name in list(mods):
        if name in SPACES:
            mods.remove(name)
            return SPACES[name]
    return SPACES[""]


def unknown(s: Statement) -> PtxError:
    return PtxError(f"{s.text}: unknown instruction {s.opcode}")
