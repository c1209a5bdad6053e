"""Barriers, copies and the tensor core: what each instruction means to the machine."""

import re

from .encode import ALIGNED, SINK
from .instructions import drop_hints, instruction, space_of, take, unknown
from .ptx import PtxError, split_operands

REDUCE = ["add", "min", "max", "inc", "dec", "and", "or", "xor"]
KINDS = {"f16": 0, "tf32": 1, "f8f6f4": 2, "i8": 3}
TMEM_SHAPES = ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]
ELEMENTS = {"f16": "F16", "bf16": "BF16", "tf32": "TF32", "e4m3": "E4M3", "e5m2": "E5M2"}


# Barriers of threads


@instruction("bar", "barrier", "bar.cta", "barrier.cta")
def _bar(low, s, mods):
    what = take(mods, "sync", "arrive")
    aligned = bool(take(mods, "aligned")) or s.opcode.startswith("bar.")
    if not what:
        raise unknown(s)
    operands = [low.src(s, t, 32) for t in s.operands]
    flags = ALIGNED if aligned else 0
    low.emit(s, "BAR_SYNC" if what == "sync" else "BAR_ARRIVE", "b32", operands, flags=flags)


@instruction("barrier.cluster")
def _cluster_barrier(low, s, mods):
    what = take(mods, "arrive", "wait")
    relaxed = bool(take(mods, "relaxed"))
    take(mods, "acquire"), take(mods, "release")
    flags = ALIGNED if take(mods, "aligned") else 0
    op = "CLUSTER_ARRIVE" if what == "arrive" else "CLUSTER_WAIT"
    low.emit(s, op, "b32", [], (relaxed,), flags=flags)


@instruction("fence", "membar")
def _fence(low, s, mods):
    if take(mods, "mbarrier_init"):
        op = "FENCE_MBARRIER_INIT"
    elif take(mods, "proxy"):
        kind = take(mods, "async", "async::generic", "tensormap::generic", "alias")
        if not kind:
            raise unknown(s)
        op = "FENCE_PROXY_ASYNC" if kind == "async" else "FENCE"
        space_of(mods), take(mods, "sync_restrict::shared::cta")
    else:
        op = "FENCE"
    drop_hints(mods)
    low.emit(s, op, "b32", [])


@instruction("mbarrier.init")
def _mbarrier_init(low, s, mods):
    take(mods, "b64"), space_of(mods)
    operands = [low.encoder.address(s, s.operands[0]), low.src(s, s.operands[1], 32)]
    low.emit(s, "MBAR_INIT", "b64", operands)


@instruction("mbarrier.inval")
def _mbarrier_inval(low, s, mods):
    take(mods, "b64"), space_of(mods)
    low.emit(s, "MBAR_INVAL", "b64", [low.encoder.address(s, s.operands[0])])


@instruction("mbarrier.arrive")
def _mbarrier_arrive(low, s, mods):
    take(mods, "b64"), space_of(mods), drop_hints(mods)
    transaction = bool(take(mods, "expect_tx"))
    tokens = list(s.operands)
    state = SINK
    if not tokens[0].startswith("["):
        state = low.encoder.dest(s, tokens.pop(0), 64)
    operands = [state, low.encoder.address(s, tokens.pop(0))]
    operands += [low.src(s, t, 32) for t in tokens]
    if transaction and len(operands) != 3:
        raise PtxError(f"{s.text}: expect_tx without bytes")
    low.emit(s, "MBAR_ARRIVE_TX" if transaction else "MBAR_ARRIVE", "b64", operands)


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def _mbarrier_tx(low, s, mods):
    take(mods, "b64"), space_of(mods), drop_hints(mods)
    op = "MBAR_EXPECT_TX" if "expect" in s.opcode else "MBAR_COMPLETE_TX"
    operands = [low.encoder.address(s, s.operands[0]), low.src(s, s.operands[1], 32)]
    low.emit(s, op, "b64", operands)


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def _mbarrier_wait(low, s, mods):
    take(mods, "b64"), space_of(mods), drop_hints(mods)
    parity = bool(take(mods, "parity"))
    op = "MBAR_TRY" if "try" in s.opcode else "MBAR_TEST"
    done, address, phase = s.operands[:3]
    operands = [low.encoder.dest(s, done, 1), low.encoder.address(s, address)]
    operands.append(low.src(s, phase, 32 if parity else 64))
    low.emit(s, op + ("_PARITY" if parity else ""), "b64", operands)


# Copies


def _cache_hint(mods: list[str], tokens: list[str]) -> None:
    if take(mods, "L2::cache_hint"):
        tokens.pop()


@instruction("cp.async.bulk.tensor", "cp.reduce.async")
def _tensor_copy(low, s, mods):
    if s.opcode.startswith("cp.reduce"):
        take(mods, "bulk")
        if not take(mods, "tensor"):
            raise unknown(s)
    tokens = list(s.operands)
    dims = int(take(mods, "1d", "2d", "3d", "4d", "5d")[0])
    _cache_hint(mods, tokens)
    take(mods, "tile")
    encoder = low.encoder
    if take(mods, "bulk_group"):
        take(mods, "global"), take(mods, "shared::cta")
        reduction = take(mods, *REDUCE)
        tensor, source = tokens
        operands = [encoder.address(s, source), *_tensor(low, s, tensor, dims)]
        op = "TMA_REDUCE" if s.opcode.startswith("cp.reduce") else "TMA_STORE"
        low.emit(s, op, "b32", operands, (dims, REDUCE.index(reduction or "add")))
        return
    cluster = bool(take(mods, "shared::cluster", "shared::cta") == "shared::cluster")
    take(mods, "global"), take(mods, "mbarrier::complete_tx::bytes")
    multicast = bool(take(mods, "multicast::cluster"))
    pair = take(mods, "cta_group::1", "cta_group::2") == "cta_group::2"
    destination, tensor, barrier, *rest = tokens
    operands = [encoder.address(s, destination), encoder.address(s, barrier)]
    operands += _tensor(low, s, tensor, dims)
    operands += [low.src(s, t, 16) for t in rest]
    if len(rest) != multicast:
        raise PtxError(f"{s.text}: cannot read the operands")
    low.emit(s, "TMA_LOAD", "b32", operands, (dims, multicast, pair, cluster))


def _tensor(low, s, token: str, dims: int) -> list:
    """`[map, {c0, c1}]`: the address of the tensor map and its coordinates."""
    parts = split_operands(token[1:-1])
    coordinates = split_operands(parts[1][1:-1])
    if len(parts) != 2 or len(coordinates) != dims:
        raise PtxError(f"{s.text}: cannot read the tensor operand {token}")
    base = low.encoder.address(s, f"[{parts[0]}]")
    return [base, *(low.src(s, c, 32) for c in coordinates)]


@instruction("cp.async.bulk")
def _bulk_copy(low, s, mods):
    tokens = list(s.operands)
    if take(mods, "commit_group"):
        low.emit(s, "BULK_COMMIT", "b32", [])
        return
    if take(mods, "wait_group"):
        read = bool(take(mods, "read"))
        count = int(tokens[0])
        low.emit(s, "BULK_WAIT_READ" if read else "BULK_WAIT", "b32", [], (count,))
        return
    _cache_hint(mods, tokens)
    encoder = low.encoder
    if take(mods, "bulk_group"):
        if [take(mods, "global"), take(mods, "shared::cta")] != ["global", "shared::cta"]:
            raise unknown(s)
        destination, source, size = tokens
        operands = [encoder.address(s, source), encoder.address(s, destination)]
        low.emit(s, "BULK_STORE", "b32", [*operands, low.src(s, size, 32)])
        return
    take(mods, "mbarrier::complete_tx::bytes")
    multicast = bool(take(mods, "multicast::cluster"))
    from_global = bool(take(mods, "global"))
    take(mods, "shared::cluster"), take(mods, "shared::cta")
    destination, source, size, barrier, *rest = tokens
    operands = [encoder.address(s, destination), encoder.address(s, barrier)]
    operands += [encoder.address(s, source), low.src(s, size, 32)]
    operands += [low.src(s, t, 16) for t in rest]
    low.emit(s, "BULK_LOAD" if from_global else "BULK_COPY_CLUSTER", "b32", operands, (multicast,))


# Launch


@instruction("setmaxnreg")
def _max_registers(low, s, mods):
    what = take(mods, "inc", "dec")
    take(mods, "sync"), take(mods, "aligned"), take(mods, "u32")
    count = int(s.operands[0])
    low.emit(s, f"SETMAXNREG_{what.upper()}", "b32", [], (count,), flags=ALIGNED)


@instruction("griddepcontrol")
def _grid_dependency(low, s, mods):
    what = take(mods, "wait", "launch_dependents")
    low.emit(s, "GRID_WAIT" if what == "wait" else "GRID_LAUNCH", "b32", [])


@instruction("clusterlaunchcontrol.try_cancel")
def _try_cancel(low, s, mods):
    take(mods, "async"), take(mods, "mbarrier::complete_tx::bytes"), take(mods, "b128")
    space_of(mods)
    multicast = bool(take(mods, "multicast::cluster::all"))
    operands = [low.encoder.address(s, t) for t in s.operands]
    low.emit(s, "CLC_TRY_CANCEL", "b128", operands, (multicast,))


@instruction("clusterlaunchcontrol.query_cancel")
def _query_cancel(low, s, mods):
    take(mods, "b128")
    dest, handle = s.operands
    if take(mods, "is_canceled"):
        take(mods, "pred")
        operands = [low.encoder.dest(s, dest, 1), low.src(s, handle, 128)]
        low.emit(s, "CLC_IS_CANCELED", "b128", operands)
        return
    if mods == ["get_first_ctaid", "v4", "b32"]:
        mods.clear()
        dests = low.vector(s, dest, 32, dest=True)
    else:
        which = take(mods, *(f"get_first_ctaid::{axis}" for axis in "xyz"))
        take(mods, "b32")
        if not which:
            raise unknown(s)
        dests = [SINK] * 4
        dests["xyz".index(which[-1])] = low.encoder.dest(s, dest, 32)
    low.emit(s, "CLC_FIRST_CTAID", "b128", [low.src(s, handle, 128), *dests])


# Hopper's tensor core


@instruction("wgmma.fence")
def _wgmma_fence(low, s, mods):
    take(mods, "sync"), take(mods, "aligned")
    low.emit(s, "WGMMA_FENCE", "b32", [], flags=ALIGNED)


@instruction("wgmma.commit_group")
def _wgmma_commit(low, s, mods):
    take(mods, "sync"), take(mods, "aligned")
    low.emit(s, "WGMMA_COMMIT", "b32", [], flags=ALIGNED)


@instruction("wgmma.wait_group")
def _wgmma_wait(low, s, mods):
    take(mods, "sync"), take(mods, "aligned")
    low.emit(s, "WGMMA_WAIT", "b32", [], (int(s.operands[0]),), flags=ALIGNED)


@instruction("wgmma.mma_async.sync")
def _wgmma(low, s, mods):
    take(mods, "aligned")
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", mods.pop(0)) if mods else None
    if not shape or len(mods) != 3 or mods[0] != "f32" or not {*mods[1:]} <= {*ELEMENTS}:
        raise unknown(s)
    _, a_type, b_type = mods
    mods.clear()
    n = int(shape[1])
    d, a, b, *rest = s.operands
    encoder = low.encoder
    accumulators = low.vector(s, d, 32, dest=True)
    if len(accumulators) != n // 2:
        raise PtxError(f"{s.text}: {len(accumulators)} accumulators for n = {n}")
    a_operands = low.vector(s, a, 32, dest=False) if a.startswith("{") else [low.src(s, a, 64)]
    scale_d, scale_a, scale_b, *major = rest
    if not encoder.register(s, scale_d):
        raise PtxError(f"{s.text}: scale-d is not a predicate")
    majors = [int(m) for m in major]
    majors = majors if len(a_operands) == 1 else [0, *majors]
    transpose = sum(m << i for i, m in enumerate(majors))
    negate = (int(scale_a) < 0) | (int(scale_b) < 0) << 1
    operands = [low.src(s, scale_d, 1), low.src(s, b, 64), *a_operands, *accumulators]
    mod = (n, len(a_operands), transpose, negate)
    types = {"type2": ELEMENTS[b_type], "flags": ALIGNED}
    low.emit(s, "WGMMA", ELEMENTS[a_type], operands, mod, **types)


# Blackwell's tensor core and its memory


def _pair(mods: list[str]) -> bool:
    return take(mods, "cta_group::1", "cta_group::2") == "cta_group::2"


@instruction("tcgen05.alloc")
def _tmem_alloc(low, s, mods):
    pair = _pair(mods)
    take(mods, "sync"), take(mods, "aligned"), take(mods, "b32"), space_of(mods)
    operands = [low.encoder.address(s, s.operands[0]), low.src(s, s.operands[1], 32)]
    low.emit(s, "TMEM_ALLOC", "b32", operands, (pair,), flags=ALIGNED)


@instruction("tcgen05.dealloc")
def _tmem_dealloc(low, s, mods):
    pair = _pair(mods)
    take(mods, "sync"), take(mods, "aligned"), take(mods, "b32")
    operands = [low.src(s, t, 32) for t in s.operands]
    low.emit(s, "TMEM_DEALLOC", "b32", operands, (pair,), flags=ALIGNED)


@instruction("tcgen05.relinquish_alloc_permit")
def _tmem_relinquish(low, s, mods):
    pair = _pair(mods)
    take(mods, "sync"), take(mods, "aligned")
    low.emit(s, "TMEM_RELINQUISH", "b32", [], (pair,), flags=ALIGNED)


@instruction("tcgen05.ld", "tcgen05.st")
def _tmem_load_store(low, s, mods):
    take(mods, "sync"), take(mods, "aligned"), take(mods, "b32")
    shape = take(mods, *TMEM_SHAPES)
    count = int(take(mods, *(f"x{1 << i}" for i in range(8)))[1:])
    packed = bool(take(mods, "pack::16b", "unpack::16b"))
    load = s.opcode.startswith("tcgen05.ld")
    tokens = list(s.operands)
    value = tokens.pop(0) if load else tokens.pop()
    address = tokens.pop(0)
    split = int(tokens.pop()) if shape == "16x32bx2" else 0
    registers = low.vector(s, value, 32, dest=load)
    each = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
    if tokens or len(registers) != each * count:
        raise PtxError(f"{s.text}: {len(registers)} registers for .{shape}.x{count}")
    operands = [low.encoder.address(s, address), *registers]
    mod = (TMEM_SHAPES.index(shape), count, packed, split)
    low.emit(s, "TMEM_LD" if load else "TMEM_ST", "b32", operands, mod, flags=ALIGNED)


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _tmem_wait(low, s, mods):
    take(mods, "sync"), take(mods, "aligned")
    op = "TMEM_WAIT_LD" if "wait::ld" in s.opcode else "TMEM_WAIT_ST"
    low.emit(s, op, "b32", [], flags=ALIGNED)


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _tmem_fence(low, s, mods):
    low.emit(s, "TMEM_FENCE", "b32", [], ("after" in s.opcode,))


@instruction("tcgen05.commit")
def _tmem_commit(low, s, mods):
    pair = _pair(mods)
    take(mods, "mbarrier::arrive::one"), take(mods, "b64"), space_of(mods)
    multicast = bool(take(mods, "multicast::cluster"))
    operands = [low.encoder.address(s, s.operands[0])]
    operands += [low.src(s, t, 16) for t in s.operands[1:]]
    if len(operands) != 1 + multicast:
        raise PtxError(f"{s.text}: cannot read the operands")
    low.emit(s, "TMEM_COMMIT", "b64", operands, (pair, multicast))


@instruction("tcgen05.mma")
def _tmem_mma(low, s, mods):
    pair = _pair(mods)
    kind = take(mods, *(f"kind::{k}" for k in KINDS))
    for collector in ("discard", "lastuse", "fill", "use"):
        take(mods, f"collector::a::{collector}")
    if not kind:
        raise unknown(s)
    d, a, b, idesc, *rest = s.operands
    encoder = low.encoder
    lanes = low.vector(s, rest.pop(0), 32, dest=False) if rest[0].startswith("{") else []
    accumulate = low.src(s, rest.pop(0), 1)
    scale = int(rest.pop(0)) if rest else 0
    a_in_tmem = a.startswith("[")
    a_operand = encoder.address(s, a) if a_in_tmem else low.src(s, a, 64)
    operands = [encoder.address(s, d), a_operand, low.src(s, b, 64), low.src(s, idesc, 32)]
    mod = (KINDS[kind[6:]], pair, a_in_tmem, scale)
    low.emit(s, "TMEM_MMA", "b32", [*operands, accumulate, *lanes], mod)
