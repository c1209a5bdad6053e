"""What each PTX instruction means to the machine. One that is not here is an error."""

import re
from collections.abc import Callable

from .encode import ALIGNED, MEMBERS, SINK, TYPE_BITS, Encoder, Program
from .ptx import Module, PtxError, Statement, split_operands

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
COMPARE = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs",
    "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
]  # fmt: skip
COMBINE = ["", "and", "or", "xor"]
ROUND = ["", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna", "rs"]
ATOMIC = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]
SHUFFLE = ["idx", "up", "down", "bfly"]
VOTE = ["all", "any", "uni", "ballot"]

# Modifiers that say nothing to an emulator that models no caches and no scopes narrower
# than the whole device.
_MEMORY_HINTS = re.compile(
    r"weak|relaxed|acquire|release|acq_rel|sc|volatile|cta|cluster|gpu|sys|nc|ca|cg|cs|lu|cv|wb|wt|"
    r"L1::\w+|L2::\w+"
)

_HANDLERS: dict[str, Callable[["_Lowering", Statement, list[str]], None]] = {}


def lower(module: Module, name: str) -> Program:
    """The program of one kernel of a module."""
    kernel = module.kernels[name]
    lowering = _Lowering(Encoder(module, kernel))
    for statement in kernel.statements:
        before = len(lowering.encoder.code)
        lowering.statement(statement)
        assert len(lowering.encoder.code) == before + 1, statement.text
    return lowering.encoder.program()


def _op(*names: str):
    def register(handler):
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


class _Lowering:
    def __init__(self, encoder: Encoder):
        self.encoder = encoder

    def statement(self, s: Statement) -> None:
        parts = s.opcode.split(".")
        # The longest registered name wins: "mbarrier.init" before "mbarrier".
        for n in range(min(4, len(parts)), 0, -1):
            if handler := _HANDLERS.get(".".join(parts[:n])):
                mods = parts[n:]
                handler(self, s, mods)
                if mods:
                    raise PtxError(f"{s.text}: unknown modifier .{mods[0]}")
                return
        raise PtxError(f"{s.text}: unknown instruction {s.opcode}")

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


# Arithmetic


def _arithmetic(op: str, sources: int):
    def handler(low: _Lowering, s: Statement, mods: list[str]) -> None:
        type = low.type(s, mods)
        rounding = take(mods, "rn", "rz", "rm", "rp")
        if rounding and rounding != "rn" and op not in ("RCP",):
            raise PtxError(f"{s.text}: rounding .{rounding} is not modelled")
        take(mods, "ftz"), take(mods, "approx"), take(mods, "full")
        saturate = bool(take(mods, "sat"))
        low.expect(s, sources + 1)
        bits = TYPE_BITS[type.upper()]
        dest = low.encoder.dest(s, s.operands[0], bits)
        low.emit(s, op, type, [dest, *(low.src(s, t, bits) for t in s.operands[1:])], (saturate,))

    return handler


for _name, _sources in {
    "add": 2, "sub": 2, "div": 2, "rem": 2, "min": 2, "max": 2, "and": 2, "or": 2, "xor": 2,
    "not": 1, "neg": 1, "abs": 1, "fma": 3, "brev": 1, "sqrt": 1, "rsqrt": 1, "rcp": 1,
    "ex2": 1, "lg2": 1, "tanh": 1, "sin": 1, "cos": 1,
}.items():  # fmt: skip
    _HANDLERS[_name] = _arithmetic(_name.upper(), _sources)


@_op("mul", "mad")
def _mul(low, s, mods):
    type = low.type(s, mods)
    part = take(mods, "lo", "hi", "wide")
    take(mods, "rn"), take(mods, "ftz")
    bits = TYPE_BITS[type.upper()]
    wide = 2 * bits if part == "wide" else bits
    op = s.opcode.split(".")[0].upper()
    op += {"hi": "_HI", "wide": "_WIDE"}.get(part, "")
    op = "FMA" if op == "MAD" and type.startswith(("f", "bf")) else op
    operands = [low.encoder.dest(s, s.operands[0], wide)]
    operands += [low.src(s, t, bits) for t in s.operands[1:3]]
    operands += [low.src(s, t, wide) for t in s.operands[3:]]
    low.expect(s, 4 if op.startswith(("MAD", "FMA")) else 3)
    low.emit(s, op, type, operands)


@_op("shl", "shr")
def _shift(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    low.expect(s, 3)
    dest, value, count = s.operands
    operands = [low.encoder.dest(s, dest, bits), low.src(s, value, bits), low.src(s, count, 32)]
    low.emit(s, s.opcode.split(".")[0].upper(), type, operands)


@_op("shf")
def _funnel(low, s, mods):
    low.type(s, mods)
    right = take(mods, "l", "r") == "r"
    wrap = take(mods, "wrap", "clamp") == "wrap"
    low.expect(s, 4)
    operands = [low.encoder.dest(s, s.operands[0], 32)]
    low.emit(s, "SHF", "u32", operands + [low.src(s, t, 32) for t in s.operands[1:]], (right, wrap))


@_op("prmt", "lop3")
def _bits32(low, s, mods):
    low.type(s, mods)
    op = s.opcode.split(".")[0].upper()
    low.expect(s, 4 if op == "PRMT" else 5)
    table = int(s.operands[4], 0) if op == "LOP3" else 0
    operands = [low.encoder.dest(s, s.operands[0], 32)]
    low.emit(s, op, "u32", operands + [low.src(s, t, 32) for t in s.operands[1:4]], (table,))


@_op("bfe", "bfi")
def _field(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    op = s.opcode.split(".")[0].upper()
    values = 1 if op == "BFE" else 2
    low.expect(s, values + 3)
    operands = [low.encoder.dest(s, s.operands[0], bits)]
    operands += [low.src(s, t, bits) for t in s.operands[1 : 1 + values]]
    low.emit(s, op, type, operands + [low.src(s, t, 32) for t in s.operands[1 + values :]])


@_op("popc", "clz", "bfind")
def _count(low, s, mods):
    type = low.type(s, mods)
    shift = bool(take(mods, "shiftamt"))
    low.expect(s, 2)
    dest = low.encoder.dest(s, s.operands[0], 32)
    source = low.src(s, s.operands[1], TYPE_BITS[type.upper()])
    low.emit(s, s.opcode.split(".")[0].upper(), type, [dest, source], (shift,))


@_op("selp")
def _select(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    low.expect(s, 4)
    operands = [low.encoder.dest(s, s.operands[0], bits)]
    operands += [low.src(s, t, bits) for t in s.operands[1:3]]
    low.emit(s, "SELP", type, [*operands, low.src(s, s.operands[3], 1)])


@_op("setp")
def _compare(low, s, mods):
    type = low.type(s, mods)
    compare = take(mods, *COMPARE)
    combine = take(mods, "and", "or", "xor")
    take(mods, "ftz")
    low.expect(s, 4 if combine else 3)
    bits = TYPE_BITS[type.upper()]
    dests = [low.encoder.dest(s, t, 1) for t in s.operands[0].split("|")]
    operands = [dests[0], dests[1] if len(dests) > 1 else SINK]
    operands += [low.src(s, t, bits) for t in s.operands[1:3]]
    operands += [low.src(s, s.operands[3], 1)] if combine else []
    low.emit(s, "SETP", type, operands, (COMPARE.index(compare), COMBINE.index(combine)))


@_op("cvt")
def _convert(low, s, mods):
    source, dest = low.type(s, mods), None
    dest = low.type(s, mods)
    rounding = take(mods, *ROUND[1:])
    take(mods, "ftz")
    saturate = bool(take(mods, "sat", "satfinite"))
    relu = bool(take(mods, "relu"))
    packed = dest in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2") and source == "f32"
    low.expect(s, 3 if packed else 2)
    operands = [low.encoder.dest(s, s.operands[0], TYPE_BITS[dest.upper()])]
    operands += [low.src(s, t, TYPE_BITS[source.upper()]) for t in s.operands[1:]]
    mod = (ROUND.index(rounding), saturate, relu)
    low.emit(s, "CVT_PACK" if packed else "CVT", dest, operands, mod, type2=source)


@_op("mov")
def _move(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    low.expect(s, 2)
    dest, source = s.operands
    if source in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo", "%clock_hi"):
        low.emit(s, "CLOCK", type, [low.encoder.dest(s, dest, bits)])
    elif source.startswith("{"):
        count = len(split_operands(source[1:-1]))
        parts = low.vector(s, source, bits // count, dest=False)
        low.emit(s, "PACK", type, [low.encoder.dest(s, dest, bits), *parts], (bits // count,))
    elif dest.startswith("{"):
        count = len(split_operands(dest[1:-1]))
        parts = low.vector(s, dest, bits // count, dest=True)
        low.emit(s, "UNPACK", type, [low.src(s, source, bits), *parts], (bits // count,))
    else:
        low.emit(s, "MOV", type, [low.encoder.dest(s, dest, bits), low.src(s, source, bits)])


# Control


@_op("bra")
def _branch(low, s, mods):
    take(mods, "uni")
    low.expect(s, 1)
    low.emit(s, "BRA", "b32", [], target=low.encoder.label(s, s.operands[0]))


@_op("ret", "exit")
def _exit(low, s, mods):
    take(mods, "uni")
    low.emit(s, "EXIT", "b32", [])


@_op("trap", "brkpt")
def _trap(low, s, mods):
    low.emit(s, "TRAP", "b32", [])


@_op("nanosleep", "prefetchu", "discard", "applypriority", "pmevent")
def _nothing(low, s, mods):
    mods.clear()
    low.emit(s, "NOP", "b32", [])


# Memory


@_op("ld", "ldu", "st")
def _load_store(low, s, mods):
    if mods[:1] == ["async"]:
        return _store_async(low, s, mods)
    type = low.type(s, mods)
    hinted = "L2::cache_hint" in mods
    space = space_of(mods)
    vector = take(mods, "v2", "v4", "v8")
    drop_hints(mods)
    low.expect(s, 3 if hinted else 2)
    load = not s.opcode.startswith("st")
    value, address = s.operands[:2] if load else s.operands[1::-1]
    operands = [low.encoder.address(s, address)]
    operands += low.vector(s, value, TYPE_BITS[type.upper()], dest=load)
    if len(operands) - 1 != int(vector[1:] or 1 if vector else 1):
        raise PtxError(f"{s.text}: {len(operands) - 1} values for .{vector}")
    low.emit(s, "LD" if load else "ST", type, operands, (space,))


def _store_async(low, s, mods):
    mods.remove("async")
    type = low.type(s, mods)
    take(mods, "mbarrier::complete_tx::bytes")
    space_of(mods), take(mods, "v2", "v4"), drop_hints(mods)
    low.expect(s, 3)
    address, value, barrier = s.operands
    values = low.vector(s, value, TYPE_BITS[type.upper()], dest=False)
    operands = [low.encoder.address(s, address), low.encoder.address(s, barrier), *values]
    low.emit(s, "ST_ASYNC", type, operands)


@_op("atom", "red")
def _atomic(low, s, mods):
    if mods[:1] == ["async"]:
        raise PtxError(f"{s.text}: unknown instruction {s.opcode}")
    type = low.type(s, mods)
    space = space_of(mods)
    what = take(mods, *ATOMIC)
    take(mods, "noftz"), drop_hints(mods)
    bits = TYPE_BITS[type.upper()]
    atom = s.opcode.startswith("atom")
    tokens = list(s.operands)
    dest = low.encoder.dest(s, tokens.pop(0), bits) if atom else SINK
    operands = [dest, low.encoder.address(s, tokens.pop(0))]
    operands += [low.src(s, t, bits) for t in tokens]
    low.emit(s, "ATOM", type, operands, (space, ATOMIC.index(what)))


@_op("prefetch", "cp.async.bulk.prefetch")
def _prefetch(low, s, mods):
    mods.clear()
    low.emit(s, "PREFETCH", "b32", [])


@_op("cvta", "cvta.to")
def _cvta(low, s, mods):
    type = low.type(s, mods)
    space = space_of(mods)
    low.expect(s, 2)
    op = "CVTA_TO" if s.opcode.startswith("cvta.to") else "CVTA"
    bits = TYPE_BITS[type.upper()]
    operands = [low.encoder.dest(s, s.operands[0], bits), low.src(s, s.operands[1], bits)]
    low.emit(s, op, type, operands, (space,))


@_op("isspacep")
def _is_space(low, s, mods):
    operands = [low.encoder.dest(s, s.operands[0], 1), low.src(s, s.operands[1], 64)]
    low.emit(s, "ISSPACEP", "b64", operands, (space_of(mods),))


@_op("mapa")
def _map_address(low, s, mods):
    type = low.type(s, mods)
    shared = space_of(mods)
    bits = TYPE_BITS[type.upper()]
    dest, address, rank = s.operands
    operands = [low.encoder.dest(s, dest, bits), low.src(s, address, bits), low.src(s, rank, 32)]
    low.emit(s, "MAPA", type, operands, (shared,))


# Warp-wide


def _members(low, s, token):
    return low.src(s, token, 32)


@_op("elect.sync")
def _elect(low, s, mods):
    dest, predicate = s.operands[0].split("|")
    operands = [low.encoder.dest(s, dest.strip(), 32), low.encoder.dest(s, predicate.strip(), 1)]
    low.emit(s, "ELECT", "b32", [*operands, _members(low, s, s.operands[1])], flags=MEMBERS)


@_op("shfl.sync")
def _shuffle(low, s, mods):
    low.type(s, mods)
    mode = take(mods, *SHUFFLE)
    low.expect(s, 5)
    dests = s.operands[0].split("|")
    operands = [low.encoder.dest(s, dests[0].strip(), 32)]
    operands.append(low.encoder.dest(s, dests[1].strip(), 1) if len(dests) > 1 else SINK)
    operands += [low.src(s, t, 32) for t in s.operands[1:]]
    low.emit(s, "SHFL", "b32", operands, (SHUFFLE.index(mode),), flags=MEMBERS)


@_op("vote.sync")
def _vote(low, s, mods):
    low.type(s, mods)
    mode = take(mods, *VOTE)
    dest = low.encoder.dest(s, s.operands[0], 32 if mode == "ballot" else 1)
    operands = [dest, low.src(s, s.operands[1], 1), _members(low, s, s.operands[2])]
    low.emit(s, "VOTE", "b32", operands, (VOTE.index(mode),), flags=MEMBERS)


@_op("match.any.sync", "match.all.sync")
def _match(low, s, mods):
    type = low.type(s, mods)
    dests = s.operands[0].split("|")
    operands = [low.encoder.dest(s, dests[0].strip(), 32)]
    operands.append(low.encoder.dest(s, dests[1].strip(), 1) if len(dests) > 1 else SINK)
    operands += [
        low.src(s, s.operands[1], TYPE_BITS[type.upper()]),
        _members(low, s, s.operands[2]),
    ]
    low.emit(s, "MATCH", type, operands, ("all" in s.opcode,), flags=MEMBERS)


@_op("redux.sync")
def _reduce(low, s, mods):
    type = low.type(s, mods)
    what = take(mods, *ATOMIC)
    operands = [low.encoder.dest(s, s.operands[0], 32), low.src(s, s.operands[1], 32)]
    operands.append(_members(low, s, s.operands[2]))
    low.emit(s, "REDUX", type, operands, (ATOMIC.index(what),), flags=MEMBERS)


@_op("activemask")
def _active(low, s, mods):
    low.type(s, mods)
    low.emit(s, "ACTIVEMASK", "b32", [low.encoder.dest(s, s.operands[0], 32)])


@_op("bar.warp.sync")
def _warp_sync(low, s, mods):
    low.emit(s, "WARP_SYNC", "b32", [_members(low, s, s.operands[0])], flags=MEMBERS)


@_op("ldmatrix.sync", "stmatrix.sync")
def _matrix(low, s, mods):
    if take(mods, "b8", "b16") != "b16" or not take(mods, "m8n8"):
        raise PtxError(f"{s.text}: unknown shape of {s.opcode}")
    take(mods, "aligned")
    count = int(take(mods, "x1", "x2", "x4")[1:])
    transpose = bool(take(mods, "trans"))
    space_of(mods)
    load = s.opcode.startswith("ld")
    value, address = s.operands if load else s.operands[::-1]
    operands = [low.encoder.address(s, address), *low.vector(s, value, 32, dest=load)]
    op = "LDMATRIX" if load else "STMATRIX"
    low.expect(s, 2)
    if len(operands) != count + 1:
        raise PtxError(f"{s.text}: {len(operands) - 1} registers for .x{count}")
    low.emit(s, op, "b16", operands, (transpose,), flags=ALIGNED)


@_op("movmatrix.sync")
def _move_matrix(low, s, mods):
    take(mods, "aligned"), take(mods, "m8n8"), take(mods, "trans"), take(mods, "b16")
    operands = [low.encoder.dest(s, s.operands[0], 32), low.src(s, s.operands[1], 32)]
    low.emit(s, "MOVMATRIX", "b16", operands, flags=ALIGNED)


def statement_error(s: Statement) -> PtxError:
    return PtxError(f"{s.text}: unknown instruction {s.opcode}")


from . import lower_async  # noqa: E402, F401  registers the asynchronous instructions
