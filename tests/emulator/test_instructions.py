"""Single instructions against numpy."""

import numpy as np
import pytest

from emulator.problems import to_bf16
from emulator.ptx import PtxError
from emulator.snippets import run_ptx

LANES = np.arange(32)
RNG = np.random.default_rng(0)
EDGES = np.array([0, 1, 2, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF8000], np.uint32)
A = np.concatenate([EDGES, RNG.integers(0, 2**32, 22, np.uint32)])
B = np.concatenate([EDGES[::-1], RNG.integers(0, 2**32, 22, np.uint32)])
C = RNG.integers(0, 2**32, 32, np.uint32)
FA = np.concatenate([[0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 1e-40], RNG.normal(size=24)])
FA = FA.astype(np.float32)
FB = RNG.normal(size=32).astype(np.float32)

LOAD = """
  mov.u32 %r0, %tid.x; cvt.u64.u32 %d0, %r0;
  ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; ld.param.b64 %d3, [p2]; ld.param.b64 %d4, [p3];
  mad.lo.u64 %d1, %d0, 4, %d1; mad.lo.u64 %d2, %d0, 4, %d2; mad.lo.u64 %d3, %d0, 4, %d3;
  mad.lo.u64 %d4, %d0, 8, %d4;
  ld.global.b32 %r1, [%d1]; ld.global.b32 %r2, [%d2]; ld.global.b32 %r3, [%d3];
  mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3;
  mov.b64 %d9, 0; mov.b32 %r9, 0;
"""


def lanewise(text: str, a=A, b=B, c=C, wide=False, dtype=np.uint32) -> np.ndarray:
    """Runs `text` in 32 lanes: r1, r2, r3 (or f1, f2, f3) are inputs, r9 or d9 the result."""
    store = "st.global.b64 [%d4], %d9;" if wide else "st.global.b32 [%d4], %r9;"
    inputs = [x.view(np.uint32) for x in (a, b, c)]
    outputs, _ = run_ptx(LOAD + text + store, *inputs, np.zeros(32, np.uint64))
    return outputs[3] if wide else outputs[3].astype(np.uint32).view(dtype)


S = lambda x: x.astype(np.uint32).view(np.int32)
U64 = lambda x: x.astype(np.uint64)


def s64(x):
    return S(x).astype(np.int64)


INTEGER = {
    "add.s32 %r9, %r1, %r2;": lambda a, b, c: a + b,
    "sub.u32 %r9, %r1, %r2;": lambda a, b, c: a - b,
    "mul.lo.s32 %r9, %r1, %r2;": lambda a, b, c: a * b,
    "mul.hi.u32 %r9, %r1, %r2;": lambda a, b, c: (U64(a) * U64(b)) >> 32,
    "mul.hi.s32 %r9, %r1, %r2;": lambda a, b, c: (s64(a) * s64(b)) >> 32,
    "mad.lo.s32 %r9, %r1, %r2, %r3;": lambda a, b, c: a * b + c,
    "div.u32 %r9, %r1, 7;": lambda a, b, c: a // 7,
    "rem.s32 %r9, %r1, 7;": lambda a, b, c: np.fmod(S(a), 7),
    "div.s32 %r9, %r1, -3;": lambda a, b, c: np.trunc(s64(a) / -3),
    "min.s32 %r9, %r1, %r2;": lambda a, b, c: np.minimum(S(a), S(b)),
    "max.u32 %r9, %r1, %r2;": lambda a, b, c: np.maximum(a, b),
    "and.b32 %r9, %r1, %r2;": lambda a, b, c: a & b,
    "or.b32 %r9, %r1, %r2;": lambda a, b, c: a | b,
    "xor.b32 %r9, %r1, %r2;": lambda a, b, c: a ^ b,
    "not.b32 %r9, %r1;": lambda a, b, c: ~a,
    "neg.s32 %r9, %r1;": lambda a, b, c: -a,
    "abs.s32 %r9, %r1;": lambda a, b, c: np.abs(s64(a)),
    "shl.b32 %r9, %r1, %r0;": lambda a, b, c: a << LANES.astype(np.uint32),
    "shl.b32 %r9, %r1, 32;": lambda a, b, c: 0 * a,
    "shr.u32 %r9, %r1, 5;": lambda a, b, c: a >> 5,
    "shr.s32 %r9, %r1, 40;": lambda a, b, c: S(a) >> 31,
    "shf.l.wrap.b32 %r9, %r1, %r2, 8;": lambda a, b, c: b << 8 | a >> 24,
    "shf.r.clamp.b32 %r9, %r1, %r2, 32;": lambda a, b, c: b,
    "prmt.b32 %r9, %r1, %r2, 0x5410;": lambda a, b, c: (b & 0xFFFF) << 16 | a & 0xFFFF,
    "prmt.b32 %r9, %r1, %r2, 0x7632;": lambda a, b, c: (b >> 16) << 16 | a >> 16,
    "prmt.b32 %r9, %r1, 0, 0x8888;": lambda a, b, c: np.where(a & 0x80, 0xFFFFFFFF, 0),
    "lop3.b32 %r9, %r1, %r2, %r3, 0xea;": lambda a, b, c: a & b | c,
    "lop3.b32 %r9, %r1, %r2, %r3, 0x96;": lambda a, b, c: a ^ b ^ c,
    "bfe.u32 %r9, %r1, 4, 8;": lambda a, b, c: a >> 4 & 0xFF,
    "bfe.s32 %r9, %r1, 24, 8;": lambda a, b, c: S(a) >> 24,
    "bfi.b32 %r9, %r1, %r2, 8, 4;": lambda a, b, c: b & ~np.uint32(0xF00) | (a & 15) << 8,
    "popc.b32 %r9, %r1;": lambda a, b, c: [bin(x).count("1") for x in a],
    "clz.b32 %r9, %r1;": lambda a, b, c: [32 - int(x).bit_length() for x in a],
    "brev.b32 %r9, %r1;": lambda a, b, c: [int(f"{x:032b}"[::-1], 2) for x in a],
    "bfind.u32 %r9, %r1;": lambda a, b, c: [int(x).bit_length() - 1 for x in a],
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, %r1, %r2, %p1;": lambda a, b, c: np.where(
        S(a) < S(b), a, b
    ),
    "setp.hi.u32 %p1|%p2, %r1, %r2; selp.b32 %r9, 1, 0, %p2;": lambda a, b, c: a <= b,
    "setp.eq.u32 %p1, %r1, 0; setp.ne.or.u32 %p2, %r2, 0, %p1; selp.b32 %r9, 1, 0, %p2;": (
        lambda a, b, c: (b != 0) | (a == 0)
    ),
    "setp.ge.s32 %p1, %r1, 0; @!%p1 mov.b32 %r9, 7;": lambda a, b, c: np.where(S(a) < 0, 7, 0),
    "mov.b64 %d5, {%r1, %r2}; mov.b64 {_, %r9}, %d5;": lambda a, b, c: b,
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r9, {%h2, %h1};": lambda a, b, c: a << 16 | a >> 16,
    "cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r9, %h1;": lambda a, b, c: a.astype(np.int16),
    "cvt.sat.u8.s32 %r9, %r1;": lambda a, b, c: np.clip(S(a), 0, 255),
}


@pytest.mark.parametrize("text", INTEGER)
def test_integer(text):
    with np.errstate(over="ignore"):
        expected = np.asarray(INTEGER[text](A, B, C)).astype(np.int64).astype(np.uint32)
    np.testing.assert_array_equal(lanewise(text), expected)


WIDE = {
    "mul.wide.s32 %d9, %r1, %r2;": lambda a, b: s64(a) * s64(b),
    "mad.wide.u32 %d9, %r1, %r2, %d9;": lambda a, b: U64(a) * U64(b),
    "cvt.s64.s32 %d9, %r1;": lambda a, b: s64(a),
    "cvt.u64.u32 %d9, %r1; shl.b64 %d9, %d9, 40;": lambda a, b: U64(a) << np.uint64(40),
    "mov.b64 %d9, {%r1, %r2};": lambda a, b: U64(b) << np.uint64(32) | U64(a),
    "mov.b64 %d5, {%r1, %r2}; mov.b128 %q1, {%d5, %d0}; mov.b128 {%d9, %d6}, %q1;": (
        lambda a, b: U64(b) << np.uint64(32) | U64(a)
    ),
}


@pytest.mark.parametrize("text", WIDE)
def test_wide(text):
    expected = WIDE[text](A, B).view(np.uint64)
    np.testing.assert_array_equal(lanewise(text, wide=True), expected)


FLOAT = {
    "add.f32 %f9, %f1, %f2;": lambda a, b: a + b,
    "mul.rn.f32 %f9, %f1, %f2;": lambda a, b: a * b,
    "fma.rn.f32 %f9, %f1, %f2, %f1;": lambda a, b: (a.astype(float) * b + a.astype(float)).astype(
        np.float32
    ),
    "neg.f32 %f9, %f1;": lambda a, b: -a,
    "max.f32 %f9, %f1, %f2;": lambda a, b: np.fmax(a, b),
    "rcp.rn.f32 %f9, %f2;": lambda a, b: 1 / b,
    "sqrt.rn.f32 %f9, %f1;": lambda a, b: np.sqrt(a),
    "setp.gt.f32 %p1, %f1, %f2; selp.f32 %f9, %f1, %f2, %p1;": lambda a, b: np.where(a > b, a, b),
    "cvt.rni.f32.f32 %f9, %f1;": lambda a, b: np.rint(a),
    "cvt.rn.f32.s32 %f9, %r0;": lambda a, b: LANES.astype(np.float32),
}


@pytest.mark.parametrize("text", FLOAT)
def test_float(text):
    with np.errstate(all="ignore"):
        expected = FLOAT[text](FA, FB).astype(np.float32)
    got = lanewise(text + "mov.b32 %r9, %f9;", FA, FB, dtype=np.float32)
    np.testing.assert_array_equal(got, expected)


def test_to_narrow_floats():
    packed = lanewise("cvt.rn.bf16x2.f32 %r9, %f1, %f2;", FA, FB)
    nan = np.isnan(FA)
    np.testing.assert_array_equal((packed >> 16)[~nan], to_bf16(FA)[~nan])
    np.testing.assert_array_equal(packed & 0xFFFF, to_bf16(FB))
    half = lanewise("cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 %r9, %h1;", FA)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half[~nan], FA.astype(np.float16).view(np.uint16)[~nan])
    eighths = (LANES - 16).astype(np.float32) / 8
    e4m3 = lanewise(
        "cvt.rn.satfinite.e4m3x2.f32 %h1, 0f43E00000, %f1; cvt.u32.u16 %r9, %h1;", eighths
    )
    assert (e4m3 >> 8 == 0x7E).all()  # 448, the largest
    assert e4m3[0] & 0xFF == 0xC0  # -2
    assert e4m3[17] & 0xFF == 0x20  # 1/8


def test_narrow_conversions_agree_with_numpy_on_every_half():
    halves = np.arange(65536, dtype=np.uint16).reshape(2048, 32)
    good = halves[::97]
    for row in good:
        got = lanewise(
            "cvt.u16.u32 %h1, %r1; cvt.f32.f16 %f9, %h1; mov.b32 %r9, %f9;",
            row.astype(np.uint32),
            dtype=np.float32,
        )
        np.testing.assert_array_equal(got, row.view(np.float16).astype(np.float32))


SHUFFLES = {
    "idx.b32 %r9, %r1, 3, 31, -1;": lambda i: np.full(32, 3),
    "up.b32 %r9, %r1, 2, 0, -1;": lambda i: np.where(i >= 2, i - 2, i),
    "down.b32 %r9, %r1, 5, 31, -1;": lambda i: np.where(i + 5 < 32, i + 5, i),
    "bfly.b32 %r9, %r1, 4, 31, -1;": lambda i: i ^ 4,
    # Segments of 8 lanes: the mask of the segment is in bits 8 to 12.
    "up.b32 %r9, %r1, 3, 0x1800, -1;": lambda i: np.where(i % 8 >= 3, i - 3, i),
    "idx.b32 %r9, %r1, 1, 0x181f, -1;": lambda i: i // 8 * 8 + 1,
}


@pytest.mark.parametrize("text", SHUFFLES)
def test_shuffle(text):
    np.testing.assert_array_equal(lanewise("shfl.sync." + text), A[SHUFFLES[text](LANES)])


def test_votes_and_reductions():
    odd = "and.b32 %r4, %r0, 1; setp.eq.u32 %p1, %r4, 1;"
    assert (lanewise(odd + "vote.sync.ballot.b32 %r9, %p1, -1;") == 0xAAAAAAAA).all()
    any_odd = odd + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;"
    assert (lanewise(any_odd) == 1).all()
    assert (lanewise("redux.sync.add.s32 %r9, %r0, -1;") == 496).all()
    assert (lanewise("redux.sync.max.u32 %r9, %r1, -1;") == A.max()).all()
    match = lanewise("shr.u32 %r4, %r0, 4; match.any.sync.b32 %r9, %r4, -1;")
    np.testing.assert_array_equal(match, np.where(LANES < 16, 0xFFFF, 0xFFFF0000))
    only = "elect.sync %r4|%p1, -1; selp.b32 %r9, 1, 0, %p1;"
    assert lanewise(only).sum() == 1


def test_divergent_lanes_meet_again():
    text = """
      setp.lt.u32 %p1, %r0, 10;
      @%p1 bra LOW;
      add.u32 %r9, %r9, 5;
      bra.uni JOIN;
    LOW:
      add.u32 %r9, %r9, 1;
      setp.lt.u32 %p2, %r9, %r0;
      @%p2 bra LOW;
    JOIN:
      redux.sync.add.u32 %r9, %r9, -1;
    """
    expected = sum(max(1, i) for i in range(10)) + 22 * 5
    assert (lanewise(text) == expected).all()


def test_matrices_of_16_bits():
    halves = np.arange(64, dtype=np.uint16).reshape(8, 8)
    packed = halves.reshape(32, 2).copy().view(np.uint32).ravel()
    moved = lanewise("movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r1;", packed)
    np.testing.assert_array_equal(moved.view(np.uint16).reshape(8, 8), halves.T)
    rows = "mov.u32 %r5, smem; and.b32 %r6, %r0, 7; mad.lo.u32 %r5, %r6, 16, %r5;"
    stored = rows + (
        "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r5], {%r1};"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r5];"
    )
    through = lanewise(stored, packed)
    np.testing.assert_array_equal(through.view(np.uint16).reshape(8, 8), halves.T)


def test_atomics_and_vectors():
    counter = np.zeros(4, np.uint32)
    body = """
      ld.param.b64 %d1, [p0];
      mov.u32 %r1, %tid.x;
      atom.global.add.u32 %r2, [%d1], 1;
      red.global.max.u32 [%d1+4], %r1;
      setp.ne.u32 %p1, %r1, 0;
      @%p1 bra DONE;
      mov.b32 %r3, 0x01020304;
      st.global.v2.b32 [%d1+8], {%r3, %r1};
    DONE:
    """
    outputs, _ = run_ptx(body, counter, block=64)
    np.testing.assert_array_equal(outputs[0], [64, 63, 0x01020304, 0])


@pytest.mark.parametrize(
    "text",
    ["tcgen05.shift.cta_group::1.down [%r1];", "add.cc.u32 %r1, %r2, %r3;", "frobnicate.b32 %r1;"],
)
def test_unknown_instructions_are_named(text):
    with pytest.raises(PtxError, match=text.split()[0].replace(".", r"\.")):
        run_ptx(text)
