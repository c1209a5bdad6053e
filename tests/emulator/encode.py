"""Statements to the machine's instruction stream: registers get places, constants a pool."""

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

from .ptx import Kernel, Module, PtxError, Statement

CORE = Path(__file__).parent / "core"


def _names(file: str, macro: str) -> dict[str, int]:
    names = re.findall(rf"\b{macro}\((\w+)", (CORE / file).read_text())
    return {name: i for i, name in enumerate(names)}


OPS = _names("ops.inc", "OP")
TYPES = _names("types.inc", "TYPE")
TYPE_BITS = {
    name: int(bits)
    for name, bits in re.findall(r"TYPE\((\w+), (\d+)\)", (CORE / "types.inc").read_text())
}
_SPECIAL_KINDS = re.search(
    r"enum SpecialKind : u32 \{(.*?)\}", (CORE / "program.h").read_text(), re.DOTALL
)[1]
SPECIAL_KINDS = {name: i for i, name in enumerate(re.findall(r"\bk\w+", _SPECIAL_KINDS))}

ALIGNED, MEMBERS = 1, 2

_SPECIALS = {
    **{
        f"%{name}.{axis}": f"k{kind}{axis.upper()}"
        for name, kind in {
            "tid": "Tid",
            "ntid": "Ntid",
            "ctaid": "Ctaid",
            "nctaid": "Nctaid",
            "clusterid": "ClusterId",
            "nclusterid": "NClusterId",
            "cluster_ctaid": "ClusterCtaid",
            "cluster_nctaid": "ClusterNctaid",
        }.items()
        for axis in "xyz"
    },
    "%cluster_ctarank": "kClusterCtarank",
    "%cluster_nctarank": "kClusterNctarank",
    "%laneid": "kLaneid",
    "%warpid": "kWarpid",
    "%nwarpid": "kNwarpid",
    "%smid": "kSmid",
    "%nsmid": "kNsmid",
    "%gridid": "kGridid",
    "%lanemask_eq": "kLanemaskEq",
    "%lanemask_lt": "kLanemaskLt",
    "%lanemask_le": "kLanemaskLe",
    "%lanemask_gt": "kLanemaskGt",
    "%lanemask_ge": "kLanemaskGe",
    "%dynamic_smem_size": "kDynamicSmemSize",
    "%total_smem_size": "kTotalSmemSize",
    "%is_explicit_cluster": "kIsExplicitCluster",
}

# The first KiB of a CTA's shared memory belongs to the system.
RESERVED_SMEM = 1024


@dataclass(frozen=True)
class Operand:
    offset: int
    bits: int
    is_const: bool = False
    negate: bool = False
    displace: int = 0

    def packed(self) -> bytes:
        return struct.pack(
            "<IiBBBB", self.offset, self.displace, self.is_const, self.bits, self.negate, 0
        )


SINK = Operand(0, 0)


@dataclass
class Program:
    """What the machine runs: see core/program.h for the layout of each part."""

    name: str
    code: bytes
    operands: bytes
    constants: bytes
    specials: bytes
    register_bytes: int
    local_bytes: int
    static_smem: int
    param_offsets: list[int]
    reqntid: tuple[int, ...] | None
    lines: dict[int, str]
    globals: bytearray


@dataclass
class Encoder:
    """Places of names and the growing instruction stream of one kernel."""

    module: Module
    kernel: Kernel
    code: list[bytes] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    constants: bytearray = field(default_factory=bytearray)
    specials: list[tuple[int, int, int]] = field(default_factory=list)
    globals: bytearray = field(default_factory=bytearray)
    register_bytes: int = 0

    def __post_init__(self):
        self.places: dict = {}
        self.pool: dict[tuple[int, int], int] = {}
        self.symbols: dict[str, tuple[str, int]] = {}
        offset = 0
        self.param_offsets = []
        for param in self.kernel.params:
            offset = -(-offset // param.align) * param.align
            self.symbols[param.name] = ("kParamAddress", offset)
            self.param_offsets.append(offset)
            offset += param.size
        variables = self.module.variables + self.kernel.variables
        shared, local = RESERVED_SMEM, 0
        # Dynamic shared memory, of size 0 here, comes after all static variables.
        for v in sorted(variables, key=lambda v: v.size == 0):
            if v.space == "shared":
                shared = -(-shared // v.align) * v.align
                self.symbols[v.name] = ("kSharedAddress", shared)
                shared += v.size
            elif v.space == "local":
                local = -(-local // v.align) * v.align
                self.symbols[v.name] = ("kLocalAddress", local)
                local += v.size
            elif v.space in ("global", "const"):
                start = -(-len(self.globals) // 256) * 256
                self.globals.extend(bytes(start - len(self.globals)))
                self.globals.extend((v.content or b"").ljust(v.size, b"\0"))
                self.symbols[v.name] = ("kGlobalAddress", start)
        self.static_smem = shared
        self.local_bytes = local

    # Operands

    def place(self, key, bits: int) -> Operand:
        if key not in self.places:
            size = {1: 4, 32: 128, 64: 256, 128: 512}[bits]
            if bits > 1:
                self.register_bytes = -(-self.register_bytes // 128) * 128
            self.places[key] = Operand(self.register_bytes, bits)
            self.register_bytes += size
        return self.places[key]

    def special(self, kind: str, value: int, bits: int) -> Operand:
        fresh = (kind, value) not in self.places
        operand = self.place((kind, value), bits)
        if fresh:
            self.specials.append((operand.offset, SPECIAL_KINDS[kind], value))
        return operand

    def constant(self, value: int, bits: int) -> Operand:
        bits = 1 if bits == 1 else 32 if bits <= 32 else 64
        value %= 1 << (32 if bits < 64 else 64)
        if (value, bits) not in self.pool:
            self.constants.extend(bytes(-len(self.constants) % 128))
            self.pool[value, bits] = len(self.constants)
            if bits == 1:
                self.constants.extend(struct.pack("<I", 0xFFFFFFFF if value else 0))
            else:
                self.constants.extend(value.to_bytes(bits // 8, "little") * 32)
        return Operand(self.pool[value, bits], bits, is_const=True)

    def register(self, s: Statement, name: str) -> Operand | None:
        negate = name.startswith("!")
        found = s.scope.register(name.lstrip("!"))
        if not found:
            return None
        scope, kind = found
        bits = TYPE_BITS[kind.upper()]
        bits = bits if bits in (1, 64, 128) else 32
        operand = self.place((scope, name.lstrip("!")), bits)
        return Operand(operand.offset, bits, negate=negate)

    def source(self, s: Statement, token: str, bits: int) -> Operand:
        """A value of `bits` bits: a register, a constant, a special register or a symbol."""
        want = bits if bits in (1, 64, 128) else 32
        if operand := self.register(s, token):
            # Loads, stores and conversions may use a wider register than the type.
            if (operand.bits == 1) != (want == 1) or operand.bits < want:
                raise PtxError(f"{s.text}: {token} has not the {bits} bits of the operation")
            return operand
        if token in _SPECIALS:
            return self.special(_SPECIALS[token], 0, 32)
        if token in self.symbols:
            kind, value = self.symbols[token]
            wide = kind in ("kParamAddress", "kGlobalAddress", "kLocalAddress")
            return self.special(kind, value, 64 if wide else 32)
        return self.constant(self.number(s, token, bits), bits)

    def number(self, s: Statement, token: str, bits: int) -> int:
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", token):
            return int(match[1], 16)
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", token):
            value = int(match[1], 16)
            if bits == 32:
                value = struct.unpack("<d", value.to_bytes(8, "little"))[0]
                return int.from_bytes(struct.pack("<f", value), "little")
            return value
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", token):
            digits = token.rstrip("U")
            if re.fullmatch(r"-?0[0-7]+", digits):
                return int(digits, 8)
            return int(digits, 0)
        raise PtxError(f"{s.text}: unknown operand {token}")

    def dest(self, s: Statement, token: str, bits: int) -> Operand:
        if token == "_":
            return SINK
        operand = self.register(s, token)
        want = bits if bits in (1, 64, 128) else 32
        if operand is None or operand.negate:
            raise PtxError(f"{s.text}: {token} is not a register")
        if (operand.bits == 1) != (want == 1) or operand.bits < want:
            raise PtxError(f"{s.text}: {token} has not the {bits} bits of the operation")
        return operand

    def address(self, s: Statement, token: str) -> Operand:
        """`[base]`, `[base+4]` or a constant address."""
        match = re.fullmatch(r"\[\s*([\w%$]+)\s*(?:\+\s*(-?\w+))?\s*\]", token)
        if not match:
            raise PtxError(f"{s.text}: cannot read the address {token}")
        displace = int(match[2], 0) if match[2] else 0
        base = self.register(s, match[1])
        if base is None and match[1] in self.symbols:
            kind, value = self.symbols[match[1]]
            base = self.special(kind, value, 32 if kind == "kSharedAddress" else 64)
        if base is None:
            base = self.constant(self.number(s, match[1], 64), 64)
        return Operand(base.offset, base.bits, base.is_const, displace=displace)

    # Instructions

    def emit(
        self, s: Statement, op: str, type: str, operands, mod=(), type2=None, flags=0, target=-1
    ):
        guard, negate = -1, False
        if s.guard:
            predicate = self.register(s, s.guard)
            if predicate is None or predicate.bits != 1:
                raise PtxError(f"{s.text}: {s.guard} is not a predicate")
            guard, negate = predicate.offset, predicate.negate
        mod = (*mod, *(0,) * (4 - len(mod)))
        self.code.append(
            struct.pack(
                "<HBBiIiiHBB4i",
                OPS[op],
                TYPES[type.upper()],
                TYPES[(type2 or type).upper()],
                guard,
                len(self.operands),
                target,
                s.line,
                len(operands),
                negate,
                flags,
                *mod,
            )
        )
        self.operands.extend(operands)

    def label(self, s: Statement, name: str) -> int:
        found = s.scope.find("labels", name)
        if not found:
            raise PtxError(f"{s.text}: no label {name} in this scope")
        return found[1]

    def program(self) -> Program:
        return Program(
            name=self.kernel.name,
            code=b"".join(self.code),
            operands=b"".join(o.packed() for o in self.operands),
            constants=bytes(self.constants),
            specials=b"".join(struct.pack("<IIQ", *special) for special in self.specials),
            register_bytes=self.register_bytes,
            local_bytes=self.local_bytes,
            static_smem=self.static_smem,
            param_offsets=self.param_offsets,
            reqntid=self.kernel.reqntid,
            lines={s.line: s.text for s in self.kernel.statements},
            globals=self.globals,
        )
