"""Bit for bit what an H200 computed: random data, so the order and the rounding of sums count.

`H200` holds digests of the results of the chip, which `on_gpu` got from the same launches. The
inputs come from numpy's generator; a digest shows whether they are still the same.
"""

import hashlib

import numpy as np
import pytest

from emulator import emulate, kernels
from emulator.problems import to_bf16

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")

TILE = {"kernel": "hopper", "tile": [128, 128], "out_dtype": "Float32"}
GEMMS = {
    "bf16": {**TILE, "dtype": "BFloat16"},
    "f16": {**TILE, "dtype": "Float16"},
    "fp8": {**TILE, "dtype": "Float8E4M3FN"},
}
# (element type, spread of exponents, k): digests of a, b and the result.
H200 = {
    ("bf16", "normal", 16): (
        "08be720cc1b0f7613e6dd4c1c0baf388",
        "46b1e5eba161172d3fb1a29c7b0608c0",
        "13a7ecc505dd8137efa5335f304ca0f1",
    ),
    ("bf16", "normal", 32): (
        "9abe63fa9cf5c5bd0a9533191831ee62",
        "3a0c181f351f427abad4cfb898da9f62",
        "9c87c3d628b4bb4416b7535c1fbd4f94",
    ),
    ("bf16", "normal", 64): (
        "f172d06b448df5959e5d58440a54c648",
        "4c0c481b0cc2804777f9204df3ebd641",
        "d47e486d25d40caad4d600d61bd27a43",
    ),
    ("bf16", "normal", 256): (
        "911b09f07283d0c44c50b7f4b7fed6a2",
        "28e0064188711a5ee46a40262e73e4fa",
        "883dea276706ac90ed97afe1ca93bd43",
    ),
    ("bf16", "normal", 1040): (
        "830fe91cc788abdc53ddc4f52841225f",
        "e967b7a13fa037b1fa50a75d611b5312",
        "a0d8062f412678427fd7cc1b510ab592",
    ),
    ("bf16", "wide", 16): (
        "7a1d236986da262fa2ba09d9d022efd7",
        "617c4a2db0247f5b901a31f5a006bd9d",
        "c8b3b4e3af8a7b23f96c088123feec11",
    ),
    ("bf16", "wide", 32): (
        "6232015b6751ce016249e923e05b5103",
        "e59883e938b918240b524781724ac083",
        "23c2d676b8462c1037bc37907257ec2f",
    ),
    ("bf16", "wide", 64): (
        "c5749c19479992c09029a51746ff9ab2",
        "7f3a23208fbfd9467989eba54c3be0bd",
        "ee870f9cdec7f8737abf5e7b72649593",
    ),
    ("bf16", "wide", 256): (
        "39fcb51578bea02fddf7ebd0ef42caf6",
        "f1b211cfb064440e10850e90ed428165",
        "672717348d39930e98cebf70c166df16",
    ),
    ("bf16", "wide", 1040): (
        "c55707b69509b4ed94cb40bff0944247",
        "13334ca67081b7544e50615b6ea6aec9",
        "f9f43d201fbe58287854599667ad5d92",
    ),
    ("f16", "normal", 16): (
        "63ccfb2627df2f826c9a36815a8d5d3e",
        "a09d5f5545230f569f9fc48a4ff5d603",
        "44b232b4ca91ef15b8a3076faf3d6353",
    ),
    ("f16", "normal", 32): (
        "bdf051cdd9c9e0f1a0fca0774ae0d2c4",
        "4179455d0319acb3048d17b8975345f8",
        "722e4f2c18efc9ff0a238fc722f36d73",
    ),
    ("f16", "normal", 64): (
        "24118ca3285946f964cfc43f090531f5",
        "5d3ec7c6ea0710ee229b93aa6afb7bf9",
        "8b519dc5c40109147e3f066b1de84737",
    ),
    ("f16", "normal", 256): (
        "94413969e910c2e172c3d3b01b20d6e6",
        "9e5c00a33866d86dbda83c2292272f1c",
        "8bfab2a0518968c5c2473037ecd8ae77",
    ),
    ("f16", "normal", 1040): (
        "98b62d3f13b85fa9a7da3795649e9afe",
        "938bb1dd005f42ad9eca11c759c5691e",
        "cb675a91f42d7022c12d892299ca3c2e",
    ),
    ("f16", "wide", 16): (
        "d6737369a8fe0b4f58f7273e6eb78c5d",
        "ace0cdb603e8f049245963c3fba30a44",
        "4363f76e7d1d5e24542f90c5f443a944",
    ),
    ("f16", "wide", 32): (
        "cc93e6fe91e875f64e220bcdd6cbf76e",
        "300ee4c93fd26723db492a6936eb6245",
        "0bbf25ca6c4cacd880a55de07f3f81b5",
    ),
    ("f16", "wide", 64): (
        "37913c8d91c1a5e5c50d99dc515bd359",
        "111a14f4d2f1f2356b3cb36208b75cf9",
        "d2a815e0a99209f37e2936e5896a37fa",
    ),
    ("f16", "wide", 256): (
        "662bf44e2372aaf091e06491f3b3f4c7",
        "c94dc71413b1df33a45e5ea85dce9725",
        "1c9c110203704386cc393a4a28d735da",
    ),
    ("f16", "wide", 1040): (
        "4acd13b582151094f710bd509468ec3c",
        "e02ba1166b5125a2e5f910eef3dc8dcd",
        "1b9a067d8d049e43102822f0f62281ad",
    ),
    ("fp8", "normal", 32): (
        "fe9702eac04e3f9445284492b3060d67",
        "ae0ead71a74cac3aec4dc9a6912afca5",
        "fa6e7427d3b852c9add44522c0537378",
    ),
    ("fp8", "normal", 64): (
        "d0ca7b171273b58403698db533ce4bd8",
        "0ecb7af4d276c5b3dda4d68d6d867751",
        "531a160dbfa4d5c8c89e9cb5fc0208d7",
    ),
    ("fp8", "normal", 256): (
        "b93a922dae1249906c2f1dddb6bab36b",
        "b03360a0f75fafe35ce1b24b3cb6fce6",
        "0e28ff72f3f92ef34e335c253010d3c0",
    ),
    ("fp8", "wide", 32): (
        "00d862020648037d7655102d904f1175",
        "b71a747c18a2568dffa54720d436395d",
        "7f9375a344493c234c21d865629a32c6",
    ),
    ("fp8", "wide", 64): (
        "4b8a4a6150702be960acb8b0b4454a12",
        "00975ca73418ba54a14b63e66c0a12a8",
        "15fb7c2f54670620a740494876202560",
    ),
    ("fp8", "wide", 256): (
        "477dabbb423831921c3ccb2b10cb8a67",
        "9ffc4872ce2c40768affa4df512f38f7",
        "0659812a802037a1391053fe91011526",
    ),
}
# The grouped matmul of this project, by the type of its result; every tile gives the same bits.
GROUPED = {
    "bfloat16": "b10c3acf7688727cc2d185b43b119b1f",
    "float32": "528b0a2b51f2bb9a855b86caa879d32e",
}
CASES = [
    ([32, 256], "bfloat16", "gkn"),
    ([128, 256, 64], "float32", "gnk"),
    ([256, 128], "bfloat16", "gnk"),
]


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:32]


def operand(rng, shape, element: str, spread: str) -> np.ndarray:
    if element == "fp8":
        # All values below 2 in magnitude.
        return (rng.integers(0, 256, shape) & 0xBF).astype(np.uint8)
    x = rng.normal(size=shape)
    if spread == "wide":
        x = x * np.exp2(rng.integers(-12, 13, shape))
    x = x.astype(np.float32)
    return to_bf16(x) if element == "bf16" else x.astype(np.float16)


@pytest.fixture(scope="session")
def gemms():
    return kernels.compile_cases("sm_90a", "nvidia", GEMMS)


@pytest.fixture(scope="session")
def grouped():
    cases = {
        f"{tile} {out} {layout}": {
            "form": "dgrad" if layout == "gnk" else "fwd",
            "dtype": "bfloat16",
            "out_dtype": out,
            "wide": True,
            "tile": tile,
        }
        for tile, out, layout in CASES
    }
    return kernels.compile_cases("sm_90a", "pearl_jax", cases)


@pytest.mark.parametrize(("element", "spread", "k"), H200)
def test_gemm(gemms, element, spread, k):
    rng = np.random.default_rng(k)
    if element == "fp8":
        # The chip's run drew, and threw away, normal data first.
        operand(rng, (128, k), "bf16", spread), operand(rng, (128, k), "bf16", spread)
    a, b = (operand(rng, (128, k), element, spread) for _ in range(2))
    a_digest, b_digest, expected = H200[element, spread, k]
    assert (digest(a), digest(b)) == (a_digest, b_digest), "numpy draws other data now"
    c = np.full((128, 128), np.nan, np.float32)
    outputs, _ = emulate(gemms[element], [a, b, c, np.array([128], np.int32), 128, 128, k, 1])
    assert digest(outputs[2]) == expected


@pytest.mark.parametrize(("tile", "out", "layout"), CASES)
def test_grouped_matmul(grouped, tile, out, layout):
    kernel = grouped[f"{tile} {out} {layout}"]
    sizes = np.array([70, 0, 100, 17], np.int32)
    groups, m, n, k = len(sizes), int(sizes.sum()) + 5, 256, 640
    rng = np.random.default_rng(7)
    lhs = to_bf16(rng.normal(size=(m, k)).astype(np.float32))
    rhs = to_bf16(rng.normal(size=(groups, k, n)).astype(np.float32))
    poison = np.float32(np.nan) if out == "float32" else np.uint16(0x7FFF)
    arguments = {
        "lhs": lhs,
        "rhs": rhs.transpose(0, 2, 1) if layout == "gnk" else rhs,
        "group_sizes": sizes,
        "group_offset": np.zeros(1, np.int32),
        "batch_index": np.zeros((1, 4), np.int32),
        "out": np.full((m, n), poison),
        "m": m,
        "n": n,
        "k": k,
        "num_groups": groups,
        "num_sizes": groups,
        "num_batches": 1,
        "lhs_batches": 1,
        "rhs_batches": 1,
        "num_sms": 4,
    }
    names = [name for kind, name in kernel.exported.arguments if kind != "cudaStream_t"]
    for mode, seed in [("in order", 0), ("random", 1), ("adversarial", 2)]:
        values = [arguments[name] for name in names]
        outputs, _ = emulate(kernel, values, mode=mode, seed=seed)
        out_index = [n for n in names if isinstance(arguments[n], np.ndarray)].index("out")
        assert digest(outputs[out_index]) == GROUPED[out]
