"""Each fault that the emulator detects, planted in a few lines of PTX; and the lines without it."""

import numpy as np
import pytest

from emulator import HazardError
from emulator.emulator import Memory
from emulator.snippets import run_ptx, tensor_map

MODES = ["in order", "random", "adversarial"]
TILE = np.arange(64 * 8, dtype=np.uint16).reshape(8, 64)  # 1024 bytes
OUT = np.zeros((8, 64), np.uint16)
LOAD_MAP = tensor_map(0, (64, 8), (64, 8), 2)
STORE_MAP = tensor_map(1, (64, 8), (64, 8), 2)

SETUP = """
  mov.u32 %r0, smem; add.u32 %r1, %r0, 2048; add.u32 %r20, %r0, 2056;
  mov.u32 %r2, %tid.x; shr.u32 %r3, %r2, 5; mov.u32 %r30, %cluster_ctarank;
  setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r3, 0;
"""
INIT = """
  @%p1 mbarrier.init.shared.b64 [%r1], 1;
  @%p1 mbarrier.init.shared.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
  { .reg .pred done;
  AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%r1], 0;
  @!done bra AGAIN; }
"""
LOAD = """
  mov.b64 %d1, p2; cvta.param.u64 %d1, %d1;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
       [%r0], [%d1, {0, 0}], [%r1];
"""
READ = "shl.b32 %r9, %r2, 2; add.u32 %r9, %r9, %r0; ld.shared.b32 %r10, [%r9];"
STORE = """
  mov.b64 %d2, p3; cvta.param.u64 %d2, %d2;
  @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {0, 0}], [%r0];
  @%p1 cp.async.bulk.commit_group;
"""
FINISH = "@%p1 cp.async.bulk.wait_group 0;"
COPY = SETUP + INIT + LOAD + WAIT + STORE + FINISH


def found(body: str, mode="in order", seed=0, **more) -> set[str]:
    """The kinds of hazards of a body whose parameters are an input, an output and their maps."""
    _, report = run_ptx(
        body, TILE, OUT, LOAD_MAP, STORE_MAP, mode=mode, seed=seed, check=False, **more
    )
    return {kind for kind, _ in report.hazards}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_a_correct_copy(mode, seed):
    outputs, _ = run_ptx(COPY, TILE, OUT, LOAD_MAP, STORE_MAP, mode=mode, seed=seed, block=64)
    np.testing.assert_array_equal(outputs[1], TILE)


FILL = "shl.b32 %r9, %r2, 2; add.u32 %r9, %r9, %r0; st.shared.b32 [%r9], %r2;"
# Eight rows of 128 bytes, by 256 threads.
FILLED = SETUP + FILL + "fence.proxy.async.shared::cta; bar.sync 0;" + STORE + FINISH


def test_a_correct_store():
    assert not found(FILLED, block=256)


def without(body: str, part: str, instead: str = "") -> str:
    assert part in body
    return body.replace(part, instead, 1)


CLUSTER_INIT = (
    SETUP
    + """
  @%p1 mbarrier.init.shared.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive; barrier.cluster.wait;
"""
)
REMOTE = """
  xor.b32 %r31, %r30, 1; mapa.shared::cluster.u32 %r32, %r1, %r31;
  @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r32];
"""
CLUSTER_END = "barrier.cluster.arrive; barrier.cluster.wait;"
REMOTE_ARRIVE = CLUSTER_INIT + REMOTE + WAIT + CLUSTER_END
MULTICAST = (
    CLUSTER_INIT
    + """
  mov.b64 %d1, p2; cvta.param.u64 %d1, %d1;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;
  setp.eq.u32 %p3, %r30, 0; and.pred %p3, %p3, %p1; mov.b16 %h1, 3;
  @%p3 MULTICAST_COPY [%r0], [%d1, {0, 0}], [%r1], %h1;
"""
    + WAIT
    + READ
).replace(
    "MULTICAST_COPY",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes.multicast::cluster",
)


@pytest.mark.parametrize("mode", MODES)
def test_correct_cluster_programs(mode):
    assert not found(REMOTE_ARRIVE, mode, cluster=2, grid=2)
    assert not found(MULTICAST, mode, cluster=2, grid=2)


# name: (kind, body, what else run_ptx needs)
FAULTS = {
    "shared memory that nothing wrote": ("unwritten", SETUP + READ, {}),
    "store of shared memory that nothing wrote": ("unwritten", SETUP + STORE + FINISH, {}),
    "read without waiting for the copy": ("race", SETUP + INIT + LOAD + READ + WAIT, {}),
    "the wrong parity": (
        "race",
        without(SETUP + INIT + LOAD + WAIT + READ, "[%r1], 0;", "[%r1], 1;"),
        {"mode": "adversarial"},
    ),
    "overwritten while a store reads": (
        "race",
        without(FILLED, FINISH, "bar.sync 0;" + FILL + FINISH),
        {"block": 256},
    ),
    "no barrier between write and read": (
        "race",
        SETUP + FILL + "xor.b32 %r9, %r9, 128; ld.shared.b32 %r10, [%r9];",
        {"block": 64},
    ),
    "no proxy fence before a store": (
        "proxy-fence",
        without(FILLED, "fence.proxy.async.shared::cta;"),
        {"block": 256},
    ),
    "more bytes expected than come": ("deadlock", without(COPY, "1024", "1040"), {}),
    "fewer bytes expected than come": ("deadlock", without(COPY, "1024", "1008"), {}),
    "bytes left when the CTA exits": (
        "transaction",
        SETUP + INIT + "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 16;",
        {},
    ),
    "an arrival too many": (
        "over-arrive",
        SETUP + INIT + "@%p1 mbarrier.arrive.shared.b64 _, [%r1], 2;",
        {},
    ),
    "a whole warp arrives where one thread should": (
        "over-arrive",
        without(COPY, "@%p1 mbarrier.arrive.expect_tx", "@%p2 mbarrier.arrive.expect_tx"),
        {"mode": "adversarial"},
    ),
    "nobody arrives": ("deadlock", SETUP + INIT + WAIT, {}),
    "an mbarrier without init": ("mbarrier", SETUP + WAIT, {}),
    "an mbarrier used before its init is known": (
        "mbarrier",
        without(SETUP + INIT + LOAD + WAIT, "bar.sync 0;").replace("@%p1 mbar", "@%p4 mbar", 2)
        .replace("%r3, 0;", "%r3, 0; setp.eq.u32 %p4, %r2, 32;", 1),
        {"block": 64, "mode": "adversarial", "seed": 3},
    ),
    "no fence after mbarrier.init": (
        "mbarrier",
        without(COPY, "fence.mbarrier_init.release.cluster;"),
        {},
    ),
    "a store into an mbarrier": (
        "mbarrier",
        SETUP + INIT + "@%p1 st.shared.b32 [%r1+4], %r2;",
        {},
    ),
    "a CTA exits before its store has read": ("bulk-group", without(COPY, FINISH), {}),
    "copies that are not committed": (
        "bulk-group",
        without(COPY, "@%p1 cp.async.bulk.commit_group;"),
        {},
    ),
    "a copy issued by 32 lanes": (
        "multi-issue",
        COPY.replace("@%p1 cp.async.bulk.tensor.2d.shared", "@%p2 cp.async.bulk.tensor.2d.shared"),
        {},
    ),
    "lanes that disagree on an address": (
        "divergent",
        COPY.replace("@%p1 cp.async.bulk.tensor.2d.shared", "cp.async.bulk.tensor.2d.shared")
        .replace("[%r0], [%d1", "[%r2], [%d1"),
        {},
    ),
    "past the end of shared memory": (
        "out-of-bounds",
        SETUP + "ld.shared.b32 %r9, [%r0+4096];",
        {},
    ),
    "past the end of an array": (
        "out-of-bounds",
        "ld.param.b64 %d1, [p0]; ld.global.b32 %r1, [%d1+1024];",
        {},
    ),
    "misaligned": ("misaligned", SETUP + "ld.shared.b32 %r9, [%r0+2];", {}),
    "a misaligned vector": (
        "misaligned",
        "ld.param.b64 %d1, [p0]; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1+8];",
        {},
    ),
    "a box at an address that is not a multiple of 128": (
        "misaligned",
        COPY.replace("[%r0], [%d1", "[%r0+64], [%d1"),
        {},
    ),
    "threads at different barriers": (
        "deadlock",
        SETUP + "@%p2 bra FIRST; bar.sync 1, 64; bra.uni END; FIRST: bar.sync 2, 64; END:",
        {"block": 64},
    ),
    "two counts at one barrier": (
        "barrier",
        SETUP + "@%p2 bra FIRST; bar.sync 1, 64; bra.uni END; FIRST: bar.sync 1, 96; END:",
        {"block": 64},
    ),
    "half a warp at a barrier": (
        "convergence",
        SETUP + "setp.lt.u32 %p4, %r2, 16; @%p4 bra END; bar.sync 0; END: bar.sync 0;",
        {},
    ),
    "a shuffle that not all its lanes reach": (
        "convergence",
        SETUP + "@%p1 bra END; shfl.sync.idx.b32 %r9, %r2, 0, 31, -1; END: bar.warp.sync -1;",
        {},
    ),
    "a shuffle of lanes that have exited": (
        "convergence",
        SETUP + "@%p1 ret; shfl.sync.idx.b32 %r9, %r2, 0, 31, -1;",
        {},
    ),
    "an arrival at a CTA that has exited": (
        "exited-cta",
        CLUSTER_INIT + "setp.eq.u32 %p4, %r30, 1; @%p4 bra END;" + 40 * "nanosleep.u32 1;"
        + REMOTE + "END:",
        {"cluster": 2, "grid": 2},
    ),
    "a multicast into a CTA that has exited": (
        "exited-cta",
        without(MULTICAST, "@%p1 mbarrier.arrive.expect",
                "setp.eq.u32 %p4, %r30, 1; @%p4 bra END; @%p1 mbarrier.arrive.expect") + "END:",
        {"cluster": 2, "grid": 2},
    ),
    "a wait on another CTA's mbarrier": (
        "mbarrier",
        CLUSTER_INIT + REMOTE + "mov.b32 %r1, %r32;" + WAIT,
        {"cluster": 2, "grid": 2},
    ),
    "a cluster wait without an arrive": ("barrier", SETUP + "barrier.cluster.wait;", {}),
    "registers that the pool can never hold": (
        "deadlock",
        SETUP + "@%p2 bra LESS; setmaxnreg.inc.sync.aligned.u32 240; bra.uni END;"
        "LESS: setmaxnreg.dec.sync.aligned.u32 40; END:",
        {"block": 64, "entry_registers": 128},
    ),
    "a read before griddepcontrol.wait": (
        "grid-dependency",
        "ld.param.b64 %d1, [p0]; ld.global.b32 %r1, [%d1]; griddepcontrol.wait;",
        {"pdl": True},
    ),
    "an endless loop": ("livelock", "FOREVER: bra.uni FOREVER;", {}),
    "a trap": ("trap", "trap;", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    kind, body, more = FAULTS[name]
    assert kind in found(body, **more)


def test_atomics_of_several_warps_do_not_race():
    add = "red.shared.add.u32 [%r0], 1;"
    body = SETUP + "@%p1 st.shared.b32 [%r0], %r2; bar.sync 0;" + add + "bar.sync 0;"
    assert not found(body + "ld.shared.b32 %r9, [%r0];", block=128)
    assert "race" in found(SETUP + "@%p1 st.shared.b32 [%r0], %r2;" + add, block=64)


def test_lanes_wait_for_different_mbarriers():
    body = (
        SETUP
        + """
      setp.lt.u32 %p3, %r2, 2; mad.lo.u32 %r4, %r2, 8, %r1;
      @%p3 mbarrier.init.shared.b64 [%r4], 1;
      fence.mbarrier_init.release.cluster; bar.sync 0;
      setp.eq.u32 %p4, %r2, 1; @%p4 mbarrier.arrive.shared.b64 _, [%r4];
    FIRST: @%p4 mbarrier.try_wait.parity.shared.b64 %p5, [%r4], 0; and.pred %p6, %p4, %p5;
      vote.sync.any.pred %p6, %p6, -1; @!%p6 bra FIRST;
      @%p1 mbarrier.arrive.shared.b64 _, [%r4];
    SECOND: @%p3 mbarrier.try_wait.parity.shared.b64 %p5, [%r4], 0; and.pred %p6, %p3, %p5;
      vote.sync.ballot.b32 %r5, %p6, -1; setp.ne.u32 %p7, %r5, 3; @%p7 bra SECOND;
    """
    )
    for mode in MODES:
        assert not found(body, mode)


def test_a_block_of_fewer_than_32_threads():
    body = SETUP + INIT + "elect.sync %r9|%p4, -1; shfl.sync.idx.b32 %r9, %r2, 0, 31, -1;"
    assert not found(body, block=1)


def test_registers_within_the_pool():
    fits = FAULTS["registers that the pool can never hold"][1].replace("240", "216")
    assert not found(fits, block=64, entry_registers=128)


def test_grid_dependency_is_passed_on_by_barriers():
    body = (
        SETUP
        + """
      @!%p2 bra READ; griddepcontrol.wait;
    READ: bar.sync 0; ld.param.b64 %d1, [p0]; ld.global.b32 %r1, [%d1];
    """
    )
    assert not found(body, block=64, pdl=True)


def test_a_deadlock_says_who_waits_for_what():
    with pytest.raises(HazardError) as error:
        run_ptx(SETUP + INIT + WAIT, TILE, OUT, LOAD_MAP, STORE_MAP, block=64)
    assert "warp 1 at line" in str(error.value)
    assert "parity 0 (phase 0, pending 1 of 1, 0 bytes)" in str(error.value)


def test_guards_show_writes_outside_an_array():
    memory = Memory(TILE)
    assert memory.guards_whole()
    memory.raw[memory.start - 1] ^= 1
    assert not memory.guards_whole()


# Tensor memory and the tensor core. Operands: 128 rows of 32 bytes of zeros, not swizzled.

TENSOR = (
    SETUP
    + INIT
    + """
  mov.u32 %r5, 0;
  @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+64], 64;
  mad.lo.u32 %r6, %r2, 16, %r0; mov.u32 %r7, 0;
  st.shared.v4.b32 [%r6+4096], {%r7, %r7, %r7, %r7};
  st.shared.v4.b32 [%r6+6144], {%r7, %r7, %r7, %r7};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  ld.shared.b32 %r5, [%r1+64];
  shl.b32 %r8, %r3, 21; add.u32 %r8, %r8, %r5;
"""
)
# 128 x 32, bf16, K-major; no swizzle: 8 rows are 128 bytes, the second half of K 2048 further.
PRODUCT = """
  add.u32 %r11, %r0, 4096; shr.u32 %r11, %r11, 4; cvt.u64.u32 %d5, %r11;
  mov.u64 %d6, 0x0000400800800000; or.b64 %d5, %d5, %d6;
  mov.u32 %r12, 0x08080490;
  setp.ne.u32 %p5, 0, 0;
  @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r5], %d5, %d5, %r12, %p5;
"""
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];"
TMEM_READ = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r13}, [%r8]; tcgen05.wait::ld.sync.aligned;"
TMEM_WRITE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r7};"
FREE = """
  bar.sync 0;
  @%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
  @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;
"""
MULTIPLY = TENSOR + PRODUCT + COMMIT + WAIT + TMEM_READ + FREE
STORED = TENSOR + TMEM_WRITE + "tcgen05.wait::st.sync.aligned;" + TMEM_READ + FREE


def tensor_found(body, mode="in order", seed=0, **more):
    return found(body, mode, seed, **{"block": 128, "smem": 16384} | more)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_correct_tensor_core_programs(mode, seed):
    assert not tensor_found(MULTIPLY, mode, seed, strict_tmem=True)
    assert not tensor_found(STORED, mode, seed, strict_tmem=True)


TENSOR_FAULTS = {
    "tensor memory that nothing wrote": ("unwritten", TENSOR + TMEM_READ + FREE, {}),
    "read before the product is complete": ("race", without(MULTIPLY, WAIT), {}),
    "no commit": ("deadlock", without(MULTIPLY, COMMIT), {}),
    "operand overwritten before the product is complete": (
        "race",
        without(MULTIPLY, WAIT, "st.shared.b32 [%r6+4096], %r7;" + WAIT),
        {},
    ),
    "operand that nothing wrote": (
        "unwritten",
        without(MULTIPLY, "st.shared.v4.b32 [%r6+6144], {%r7, %r7, %r7, %r7};"),
        {},
    ),
    "operand without a proxy fence": (
        "proxy-fence",
        without(MULTIPLY, "fence.proxy.async.shared::cta;"),
        {},
    ),
    "no tcgen05.wait::st": ("race", without(STORED, "tcgen05.wait::st.sync.aligned;"), {}),
    "no tcgen05.wait::ld": (
        "tcgen05-wait",
        without(STORED, "tcgen05.wait::ld.sync.aligned;", "add.u32 %r13, %r13, 1;"),
        {"strict_tmem": True},
    ),
    "columns that are not allocated": ("tmem", MULTIPLY.replace("[%r8]", "[%r8+64]"), {}),
    "a product past the allocation": ("tmem", MULTIPLY.replace("[%r5], %d5", "[%r5+40], %d5"), {}),
    "another warp's lanes": (
        "tmem",
        MULTIPLY.replace("shl.b32 %r8, %r3, 21", "mov.u32 %r8, 0x00200000"),
        {},
    ),
    "allocated and never freed": (
        "tmem",
        without(MULTIPLY, "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;"),
        {},
    ),
    "read after it is freed": (
        "tmem",
        without(MULTIPLY, FREE, FREE.replace("bar.sync 0;", "")),
        {},
    ),
    "freed while others may still read": (
        "race",
        without(MULTIPLY, FREE, FREE.replace("bar.sync 0;", "setp.eq.u32 %p2, %r3, 3;")),
        {},
    ),
    "freed with another size": ("tmem", MULTIPLY.replace("%r5, 64;", "%r5, 32;"), {}),
    "allocated after giving up the permit": (
        "tmem",
        MULTIPLY + "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+64], 64;",
        {},
    ),
    "more columns than there are": (
        "deadlock",
        TENSOR + "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+64], 512;",
        {},
    ),
    "a shape that does not exist": ("descriptor", MULTIPLY.replace("0x08080490", "0x09080490"), {}),
    "a descriptor of the wrong version": (
        "descriptor",
        MULTIPLY.replace("0x0000400800800000", "0x0000000800800000"),
        {},
    ),
    "a product issued by a whole warp": (
        "multi-issue",
        MULTIPLY.replace("@%p1 tcgen05.mma", "@%p2 tcgen05.mma"),
        {},
    ),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_tensor_core_fault(name):
    kind, body, more = TENSOR_FAULTS[name]
    assert kind in tensor_found(body, **more)


# Hopper's tensor core: 64 x 8 x 16, operands as above.
ACCUMULATORS = "{%f1, %f2, %f3, %f4}"
WGMMA = (
    SETUP
    + INIT
    + f"""
  mad.lo.u32 %r6, %r2, 16, %r0; mov.u32 %r7, 0; mov.f32 %f1, 0f00000000;
  mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
  st.shared.v4.b32 [%r6+4096], {{%r7, %r7, %r7, %r7}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  add.u32 %r11, %r0, 4096; shr.u32 %r11, %r11, 4; cvt.u64.u32 %d5, %r11;
  mov.u64 %d6, 0x0000000800400000; or.b64 %d5, %d5, %d6;
  setp.ne.u32 %p5, 0, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACCUMULATORS}, %d5, %d5, %p5, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  add.f32 %f5, %f1, %f2;
"""
)
WGMMA_FAULTS = {
    "accumulators read without wait_group": (
        "wgmma",
        without(WGMMA, "wgmma.wait_group.sync.aligned 0;"),
    ),
    "wait for all but the last group": ("wgmma", WGMMA.replace("aligned 0;", "aligned 1;")),
    "not committed": ("wgmma", without(WGMMA, "wgmma.commit_group.sync.aligned;")),
    "operand without a proxy fence": (
        "proxy-fence",
        without(WGMMA, "fence.proxy.async.shared::cta;"),
    ),
    "operand overwritten before the wait": (
        "race",
        without(WGMMA, "wgmma.wait", "st.shared.b32 [%r6+4096], %r7; wgmma.wait"),
    ),
    "one warp goes another way": (
        "deadlock",
        without(WGMMA, "wgmma.fence", "@%p2 bra END; wgmma.fence") + "END:",
    ),
}


def test_a_correct_wgmma():
    for mode in MODES:
        assert not tensor_found(WGMMA, mode)


@pytest.mark.parametrize("name", WGMMA_FAULTS)
def test_wgmma_fault(name):
    kind, body = WGMMA_FAULTS[name]
    assert kind in tensor_found(body)
