"""Correct kernels of NVIDIA's, made wrong in one place: every mutation is caught.

Each row says what shows it: a kind of hazard, or wrong numbers. Several kinds may be listed
where it depends on the schedule which one comes first.
"""

import pytest

from emulator import kernels
from emulator.mutations import (
    added,
    caught_by,
    displaced,
    drop,
    edit_launch,
    edit_ptx,
    edit_tensor_map,
    operand,
    unguarded,
)
from emulator.problems import Gemm

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")

KERNELS = {
    "sm_100f": {
        "dense_1cta": {"kernel": "dense", "tile": [128, 128]},
        "dense_2cta": {
            "kernel": "dense",
            "tile": [256, 128],
            "clusters": 1,
            "cluster": [2, 1],
            "two_cta": True,
        },
        "grouped_1cta": {"kernel": "grouped", "tile": [128, 128]},
        "direct_store": {"kernel": "dense", "tile": [128, 128], "tma_store": False},
    },
    "sm_90a": {"hopper": {"kernel": "hopper", "tile": [128, 128]}},
}
WAIT, LOAD, STORE = (
    "mbarrier.try_wait",
    "cp.async.bulk.tensor.*complete_tx",
    "cp.async.bulk.tensor.*global.shared",
)
MMA, COMMIT = "tcgen05.mma", "tcgen05.commit"


def ptx(pattern, nth, edit):
    return lambda kernel: edit_ptx(kernel, pattern, nth, edit)


def host(edit):
    return lambda kernel: edit_launch(kernel, edit)


def set_smem(by):
    def edit(launch):
        launch.dynamic_smem += by

    return host(edit)


def negated_predicate(s):
    return operand(-1, lambda t: t.removeprefix("!") if t.startswith("!") else f"!{t}")(s)


# kernel, what is changed, how, what shows it
MUTATIONS = [
    ("dense_1cta", "tensor core does not wait for a stage", ptx(WAIT, 12, drop), "race unwritten"),
    ("dense_2cta", "producer does not wait for a free stage", ptx(WAIT, 1, drop), "race"),
    (
        "dense_2cta",
        "epilogue does not wait for the accumulator",
        ptx(WAIT, 20, drop),
        "race unwritten",
    ),
    ("dense_2cta", "accumulator reused before it is drained", ptx(WAIT, 12, drop), "race"),
    ("dense_2cta", "commit that frees a stage dropped", ptx(COMMIT, 0, drop), "deadlock"),
    (
        "dense_2cta",
        "commit that publishes the accumulator dropped",
        ptx(COMMIT, 3, drop),
        "deadlock",
    ),
    (
        "dense_2cta",
        "commit to the next stage's barrier",
        ptx(COMMIT, 0, displaced(0, 8)),
        "over-arrive race deadlock",
    ),
    (
        "dense_2cta",
        "commit to one CTA of the pair",
        ptx("mov.b16 .*3", 0, operand(1, "1")),
        "deadlock",
    ),
    (
        "dense_1cta",
        "16 bytes too many expected",
        ptx("mov.b32 .*32768", 0, added(1, 16)),
        "deadlock",
    ),
    (
        "dense_1cta",
        "16 bytes too few expected",
        ptx("mov.b32 .*32768", 0, added(1, -16)),
        "deadlock",
    ),
    (
        "dense_2cta",
        "bytes of one CTA of the pair",
        ptx("mov.b32 .*49152", 0, operand(1, "24576")),
        "race",
    ),
    (
        "dense_2cta",
        "copies signal their own CTA, not the leader",
        ptx("and.b32 .*-16777224", 0, operand(2, "-1")),
        "mbarrier deadlock",
    ),
    ("hopper", "parity never flips", ptx("xor.b32 %r714", 0, operand(2, "0")), "deadlock race"),
    (
        "dense_1cta",
        "a stage of A loaded to the next one",
        ptx(LOAD, 0, displaced(0, 16384)),
        "race unwritten wrong out-of-bounds",
    ),
    ("dense_1cta", "a copy dropped", ptx(LOAD, 1, drop), "deadlock"),
    ("dense_2cta", "a product dropped", ptx(MMA, 1, drop), "wrong"),
    ("dense_2cta", "accumulate flag inverted", ptx(MMA, 0, negated_predicate), "wrong unwritten"),
    (
        "dense_2cta",
        "operands swapped",
        ptx(MMA, 0, lambda s: operand(1, s.operands[2])(operand(2, s.operands[1])(s))),
        "wrong race",
    ),
    (
        "dense_1cta",
        "descriptor: no swizzle",
        ptx("or.b64 .*4611756662049538048", 0, operand(2, str(4611756662049538048 & ~(7 << 61)))),
        "wrong unwritten",
    ),
    (
        "dense_1cta",
        "descriptor: another stride",
        ptx("or.b64 .*4611756662049538048", 0, operand(2, str(4611756662049538048 + (16 << 32)))),
        "wrong unwritten race",
    ),
    (
        "hopper",
        "descriptor: 64-byte swizzle",
        ptx("or.b64 .*4611686293305360384", 0, operand(2, str(4611686293305360384 ^ (3 << 62)))),
        "wrong unwritten race",
    ),
    (
        "dense_2cta",
        "instruction: A is MN-major",
        ptx(
            "selp.b32 .*270541968",
            0,
            lambda s: operand(1, str(270541968 | 1 << 15))(operand(2, str(270533776 | 1 << 15))(s)),
        ),
        "wrong unwritten race",
    ),
    (
        "dense_2cta",
        "instruction: half of N",
        ptx(
            "selp.b32 .*270541968",
            0,
            lambda s: operand(1, str(270541968 - (8 << 17)))(
                operand(2, str(270533776 - (8 << 17)))(s)
            ),
        ),
        "wrong unwritten",
    ),
    (
        "dense_2cta",
        "instruction: A negated",
        ptx("selp.b32 .*16384", 0, operand(2, "8192")),
        "wrong",
    ),
    (
        "dense_2cta",
        "accumulator read 32 columns further",
        ptx("tcgen05.ld", 0, displaced(1, 32)),
        "race unwritten tmem",
    ),
    (
        "dense_2cta",
        "half of the columns allocated",
        ptx("mov.b32 .*, 256", -1, operand(1, "128")),
        "tmem",
    ),
    ("dense_2cta", "tensor memory not freed", ptx("tcgen05.dealloc", 0, drop), "tmem"),
    (
        "grouped_1cta",
        "no barrier before tensor memory is used",
        ptx("bar.sync 2, 160", 0, drop),
        "unwritten race deadlock barrier",
    ),
    ("dense_2cta", "no proxy fence before the store", ptx("fence.proxy", 0, drop), "proxy-fence"),
    (
        "dense_2cta",
        "no barrier before the store",
        ptx("bar.sync 1, 128", 0, drop),
        "race deadlock over-arrive barrier unwritten proxy-fence",
    ),
    (
        "dense_2cta",
        "barrier for 96 of 128 threads",
        ptx("bar.sync 1, 128", 0, operand(1, "96")),
        "unwritten race barrier",
    ),
    (
        "dense_2cta",
        "store stages reused at once",
        ptx("cp.async.bulk.wait_group.read", 0, drop),
        "race",
    ),
    (
        "dense_2cta",
        "exit before the stores have read",
        ptx("cp.async.bulk.wait_group.read", 1, drop),
        "bulk-group",
    ),
    ("dense_2cta", "a store dropped", ptx(STORE, 0, drop), "wrong"),
    (
        "dense_2cta",
        "no cluster barrier after the barriers' init",
        ptx("barrier.cluster.wait", 0, drop),
        "mbarrier barrier",
    ),
    ("dense_2cta", "a barrier not initialised", ptx("mbarrier.init", 3, drop), "mbarrier"),
    (
        "dense_2cta",
        "a barrier that waits for one arrival more",
        ptx("mbarrier.init", 3, operand(1, "2")),
        "deadlock",
    ),
    (
        "hopper",
        "consumer frees a stage twice",
        ptx("mbarrier.arrive.shared", 1, operand(2, "2")),
        "over-arrive race deadlock",
    ),
    ("hopper", "consumer never frees a stage", ptx("mbarrier.arrive.shared", 1, drop), "deadlock"),
    ("hopper", "wgmma not waited for", ptx("wgmma.wait", 0, drop), "wgmma race"),
    ("hopper", "last wgmma not waited for", ptx("wgmma.wait", -1, drop), "wgmma race"),
    ("hopper", "wgmma not committed", ptx("wgmma.commit", 0, drop), "race wgmma"),
    ("hopper", "B read as MN-major", ptx("wgmma.mma", 0, operand(-1, "1")), "wrong unwritten race"),
    ("hopper", "B negated", ptx("wgmma.mma", 0, operand(-3, "-1")), "wrong"),
    (
        "dense_2cta",
        "a whole warp expects the bytes",
        ptx(r"bra \$L__BB0_27", 1, unguarded),
        "over-arrive",
    ),
    (
        "hopper",
        "more registers than the pool has",
        lambda kernel: edit_ptx(
            edit_ptx(kernel, "setmaxnreg.dec", 0, drop), "setmaxnreg.inc", 0, operand(0, "256")
        ),
        "deadlock",
    ),
    ("direct_store", "stores 64 bytes further", ptx("st.global", 0, displaced(0, 64)), "wrong"),
    (
        "hopper",
        "stmatrix 16 bytes off",
        ptx("stmatrix", 0, displaced(0, 16)),
        "wrong race unwritten",
    ),
    (
        "dense_1cta",
        "tensor map of A: 64-byte swizzle",
        host(edit_tensor_map(0, 1, lambda w: w ^ 1 << 13)),
        "tensor-map",
    ),
    (
        "dense_1cta",
        "tensor map of B: one row more than there is",
        host(edit_tensor_map(1, 4, lambda w: w + (1 << 32))),
        "out-of-bounds",
    ),
    (
        "dense_1cta",
        "tensor map of C: one row more than there is",
        host(edit_tensor_map(2, 4, lambda w: w + (1 << 32))),
        "out-of-bounds",
    ),
    (
        "dense_1cta",
        "tensor map of B: another row stride",
        host(edit_tensor_map(1, 1, lambda w: w + (1 << 32))),
        "wrong out-of-bounds",
    ),
    (
        "dense_1cta",
        "tensor map of A: half of the rows of a box",
        host(edit_tensor_map(0, 7, lambda w: w - 64)),
        "deadlock",
    ),
    ("dense_1cta", "1 KiB less shared memory", set_smem(-1024), "out-of-bounds"),
]


@pytest.fixture(scope="session")
def compiled():
    found = {}
    for arch, cases in KERNELS.items():
        found |= kernels.compile_cases(arch, "nvidia", cases)
    return found


def problem(name: str) -> Gemm:
    """Long enough for every stage to be used twice."""
    if name == "grouped_1cta":
        return Gemm.of(235, 144, 848, sizes=[70, 0, 128, 37])
    if name == "direct_store":
        return Gemm.of(256, 256, 848)
    return Gemm.of(272, 144, 848)


@pytest.mark.parametrize("name", [name for cases in KERNELS.values() for name in cases])
def test_the_kernels_are_right(compiled, name):
    assert caught_by(compiled[name], problem(name)) is None


@pytest.mark.parametrize(
    ("name", "what", "edit", "shows"), MUTATIONS, ids=[f"{m[0]}: {m[1]}" for m in MUTATIONS]
)
def test_mutation(compiled, name, what, edit, shows):
    caught = caught_by(edit(compiled[name]), problem(name), max_instructions=2_000_000)
    assert caught
    assert any(kind in caught for kind in shows.split()), caught
