"""Arithmetic, memory, control and warp-wide instructions: what each means to the machine."""

from .encode import ALIGNED, MEMBERS, SINK, TYPE_BITS
from .instructions import HANDLERS, Lowering, drop_hints, instruction, space_of, take, unknown
from .ptx import PtxError, Statement, split_operands

COMPARE = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs",
    "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
]  # fmt: skip
COMBINE = ["", "and", "or", "xor"]
ROUND = ["", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna", "rs"]
ATOMIC = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]
SHUFFLE = ["idx", "up", "down", "bfly"]
VOTE = ["all", "any", "uni", "ballot"]


# Arithmetic


def _arithmetic(op: str, sources: int):
    def handler(low: Lowering, s: Statement, mods: list[str]) -> None:
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
    HANDLERS[_name] = _arithmetic(_name.upper(), _sources)


@instruction("mul", "mad")
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


@instruction("shl", "shr")
def _shift(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    low.expect(s, 3)
    dest, value, count = s.operands
    operands = [low.encoder.dest(s, dest, bits), low.src(s, value, bits), low.src(s, count, 32)]
    low.emit(s, s.opcode.split(".")[0].upper(), type, operands)


@instruction("shf")
def _funnel(low, s, mods):
    low.type(s, mods)
    right = take(mods, "l", "r") == "r"
    wrap = take(mods, "wrap", "clamp") == "wrap"
    low.expect(s, 4)
    operands = [low.encoder.dest(s, s.operands[0], 32)]
    low.emit(s, "SHF", "u32", operands + [low.src(s, t, 32) for t in s.operands[1:]], (right, wrap))


@instruction("prmt", "lop3")
def _bits32(low, s, mods):
    low.type(s, mods)
    op = s.opcode.split(".")[0].upper()
    low.expect(s, 4 if op == "PRMT" else 5)
    table = int(s.operands[4], 0) if op == "LOP3" else 0
    operands = [low.encoder.dest(s, s.operands[0], 32)]
    low.emit(s, op, "u32", operands + [low.src(s, t, 32) for t in s.operands[1:4]], (table,))


@instruction("bfe", "bfi")
def _field(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    op = s.opcode.split(".")[0].upper()
    values = 1 if op == "BFE" else 2
    low.expect(s, values + 3)
    operands = [low.encoder.dest(s, s.operands[0], bits)]
    operands += [low.src(s, t, bits) for t in s.operands[1 : 1 + values]]
    low.emit(s, op, type, operands + [low.src(s, t, 32) for t in s.operands[1 + values :]])


@instruction("popc", "clz", "bfind")
def _count(low, s, mods):
    type = low.type(s, mods)
    shift = bool(take(mods, "shiftamt"))
    low.expect(s, 2)
    dest = low.encoder.dest(s, s.operands[0], 32)
    source = low.src(s, s.operands[1], TYPE_BITS[type.upper()])
    low.emit(s, s.opcode.split(".")[0].upper(), type, [dest, source], (shift,))


@instruction("selp")
def _select(low, s, mods):
    type = low.type(s, mods)
    bits = TYPE_BITS[type.upper()]
    low.expect(s, 4)
    operands = [low.encoder.dest(s, s.operands[0], bits)]
    operands += [low.src(s, t, bits) for t in s.operands[1:3]]
    low.emit(s, "SELP", type, [*operands, low.src(s, s.operands[3], 1)])


@instruction("setp")
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


@instruction("cvt")
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


@instruction("mov")
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


@instruction("bra")
def _branch(low, s, mods):
    take(mods, "uni")
    low.expect(s, 1)
    low.emit(s, "BRA", "b32", [], target=low.encoder.label(s, s.operands[0]))


@instruction("ret", "exit")
def _exit(low, s, mods):
    take(mods, "uni")
    low.emit(s, "EXIT", "b32", [])


@instruction("trap", "brkpt")
def _trap(low, s, mods):
    low.emit(s, "TRAP", "b32", [])


@instruction("nanosleep", "prefetchu", "discard", "applypriority", "pmevent")
def _nothing(low, s, mods):
    mods.clear()
    low.emit(s, "NOP", "b32", [])


# Memory


@instruction("ld", "ldu", "st")
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


@instruction("atom", "red")
def _atomic(low, s, mods):
    if mods[:1] == ["async"]:
        raise unknown(s)
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


@instruction("prefetch", "cp.async.bulk.prefetch")
def _prefetch(low, s, mods):
    mods.clear()
    low.emit(s, "PREFETCH", "b32", [])


@instruction("cvta", "cvta.to")
def _cvta(low, s, mods):
    type = low.type(s, mods)
    space = space_of(mods)
    low.expect(s, 2)
    op = "CVTA_TO" if s.opcode.startswith("cvta.to") else "CVTA"
    bits = TYPE_BITS[type.upper()]
    operands = [low.encoder.dest(s, s.operands[0], bits), low.src(s, s.operands[1], bits)]
    low.emit(s, op, type, operands, (space,))


@instruction("isspacep")
def _is_space(low, s, mods):
    operands = [low.encoder.dest(s, s.operands[0], 1), low.src(s, s.operands[1], 64)]
    low.emit(s, "ISSPACEP", "b64", operands, (space_of(mods),))


@instruction("mapa")
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


@instruction("elect.sync")
def _elect(low, s, mods):
    dest, predicate = s.operands[0].split("|")
    operands = [low.encoder.dest(s, dest.strip(), 32), low.encoder.dest(s, predicate.strip(), 1)]
    low.emit(s, "ELECT", "b32", [*operands, _members(low, s, s.operands[1])], flags=MEMBERS)


@instruction("shfl.sync")
def _shuffle(low, s, mods):
    low.type(s, mods)
    mode = take(mods, *SHUFFLE)
    low.expect(s, 5)
    dests = s.operands[0].split("|")
    operands = [low.encoder.dest(s, dests[0].strip(), 32)]
    operands.append(low.encoder.dest(s, dests[1].strip(), 1) if len(dests) > 1 else SINK)
    operands += [low.src(s, t, 32) for t in s.operands[1:]]
    low.emit(s, "SHFL", "b32", operands, (SHUFFLE.index(mode),), flags=MEMBERS)


@instruction("vote.sync")
def _vote(low, s, mods):
    low.type(s, mods)
    mode = take(mods, *VOTE)
    dest = low.encoder.dest(s, s.operands[0], 32 if mode == "ballot" else 1)
    operands = [dest, low.src(s, s.operands[1], 1), _members(low, s, s.operands[2])]
    low.emit(s, "VOTE", "b32", operands, (VOTE.index(mode),), flags=MEMBERS)


@instruction("match.any.sync", "match.all.sync")
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


@instruction("redux.sync")
def _reduce(low, s, mods):
    type = low.type(s, mods)
    what = take(mods, *ATOMIC)
    operands = [low.encoder.dest(s, s.operands[0], 32), low.src(s, s.operands[1], 32)]
    operands.append(_members(low, s, s.operands[2]))
    low.emit(s, "REDUX", type, operands, (ATOMIC.index(what),), flags=MEMBERS)


@instruction("activemask")
def _active(low, s, mods):
    low.type(s, mods)
    low.emit(s, "ACTIVEMASK", "b32", [low.encoder.dest(s, s.operands[0], 32)])


@instruction("bar.warp.sync")
def _warp_sync(low, s, mods):
    low.emit(s, "WARP_SYNC", "b32", [_members(low, s, s.operands[0])], flags=MEMBERS)


@instruction("ldmatrix.sync", "stmatrix.sync")
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


@instruction("movmatrix.sync")
def _move_matrix(low, s, mods):
    take(mods, "aligned"), take(mods, "m8n8"), take(mods, "trans"), take(mods, "b16")
    operands = [low.encoder.dest(s, s.operands[0], 32), low.src(s, s.operands[1], 32)]
    low.emit(s, "MOVMATRIX", "b16", operands, flags=ALIGNED)
