"""Right numbers, and no hazards, on GEMM kernels that NVIDIA wrote and ships."""

import pytest

from emulator import emulate, kernels
from emulator.problems import Gemm

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")

TWO_CTA = {"cluster": [2, 1], "two_cta": True}
# Run in every mode with 20 seeds.
MANY_SCHEDULES = {
    "sm_100f": {
        "dense_1cta": {"kernel": "dense", "tile": [128, 128]},
        "dense_2cta": {"kernel": "dense", "tile": [256, 128], "clusters": 1, **TWO_CTA},
        "grouped_1cta": {"kernel": "grouped", "tile": [128, 128]},
        "grouped_2cta": {"kernel": "grouped", "tile": [256, 128], "clusters": 1, **TWO_CTA},
    },
    "sm_90a": {
        "hopper": {"kernel": "hopper", "tile": [128, 128]},
        "hopper_cluster": {"kernel": "hopper", "tile": [128, 128], "cluster": [2, 1]},
    },
}
# Run once in every mode: layouts, element types, shapes, schedulers.
FEW_SCHEDULES = {
    "sm_100f": {
        "float16": {
            "kernel": "dense",
            "tile": [128, 128],
            "dtype": "Float16",
            "out_dtype": "Float16",
        },
        "float8": {"kernel": "dense", "tile": [128, 128], "dtype": "Float8E4M3FN"},
        "tfloat32_2cta": {
            "kernel": "dense",
            "tile": [256, 256],
            "dtype": "TFloat32",
            "out_dtype": "Float32",
            **TWO_CTA,
        },
        "mn_major_64": {
            "kernel": "dense",
            "tile": [64, 64],
            "a_mn_major": True,
            "b_mn_major": True,
            "c_mn_major": True,
        },
        "mn_major_2cta": {
            "kernel": "dense",
            "tile": [256, 128],
            "a_mn_major": True,
            "b_mn_major": True,
            **TWO_CTA,
        },
        "pair_of_64": {"kernel": "dense", "tile": [128, 64], "c_mn_major": True, **TWO_CTA},
        "wide_192": {"kernel": "dense", "tile": [128, 192]},
        "multicast": {"kernel": "dense", "tile": [128, 64], "cluster": [2, 2], "clusters": 1},
        "multicast_2cta": {
            "kernel": "dense",
            "tile": [256, 256],
            "cluster": [4, 2],
            "two_cta": True,
            "clusters": 1,
        },
        "dynamic": {"kernel": "dense", "tile": [128, 128], "dynamic": True},
        "dynamic_2cta": {"kernel": "dense", "tile": [256, 128], "dynamic": True, **TWO_CTA},
        "grouped_64": {"kernel": "grouped", "tile": [64, 128]},
    },
    "sm_90a": {
        "hopper_64": {"kernel": "hopper", "tile": [64, 128]},
        "hopper_float16_to_float32": {
            "kernel": "hopper",
            "tile": [128, 256],
            "dtype": "Float16",
            "out_dtype": "Float32",
        },
        "hopper_float8": {"kernel": "hopper", "tile": [128, 128], "dtype": "Float8E4M3FN"},
        "hopper_mn_major": {
            "kernel": "hopper",
            "tile": [128, 128],
            "a_mn_major": True,
            "b_mn_major": True,
            "c_mn_major": True,
        },
        "hopper_multicast": {
            "kernel": "hopper",
            "tile": [128, 64],
            "cluster": [2, 2],
            "clusters": 1,
        },
    },
}
ARCH = {name: arch for t in (MANY_SCHEDULES, FEW_SCHEDULES) for arch, c in t.items() for name in c}
CASES = {arch: {**MANY_SCHEDULES[arch], **FEW_SCHEDULES[arch]} for arch in ("sm_100f", "sm_90a")}
SIZES = [40, 0, 64, 9]  # uneven, and an empty group


@pytest.fixture(scope="session")
def compiled():
    return {arch: kernels.compile_cases(arch, "nvidia", cases) for arch, cases in CASES.items()}


def problem(name: str, seed: int) -> Gemm:
    case = CASES[ARCH[name]][name]
    layout = {key: case[key] for key in case if key.endswith(("dtype", "_mn_major"))}
    if case["kernel"] == "grouped":
        return Gemm.of(sum(SIZES), 144, 208, sizes=SIZES, seed=seed, **layout)
    return Gemm.of(272, 144, 208, seed=seed, **layout)


def check(kernel, gemm: Gemm, mode: str, seed: int) -> None:
    outputs, _ = emulate(kernel, gemm.values, mode=mode, seed=seed)
    assert gemm.wrong(outputs) == 0, f"{mode}, seed {seed}"


@pytest.mark.parametrize("mode", ["in order", "random", "adversarial"])
@pytest.mark.parametrize("name", [n for cases in MANY_SCHEDULES.values() for n in cases])
def test_20_seeds(compiled, name, mode):
    # In order, the seed only chooses the data.
    for seed in range(3 if mode == "in order" else 20):
        check(compiled[ARCH[name]][name], problem(name, seed), mode, seed)


@pytest.mark.parametrize("name", [n for cases in FEW_SCHEDULES.values() for n in cases])
def test_every_mode(compiled, name):
    for mode, seed in [("in order", 0), ("random", 1), ("adversarial", 2)]:
        check(compiled[ARCH[name]][name], problem(name, seed), mode, seed)


def test_wrong_numbers_are_seen(compiled):
    gemm = problem("dense_1cta", 0)
    gemm.values[0] = gemm.values[0].copy()
    gemm.values[0][5, 7] ^= 0x8000 if gemm.values[0][5, 7] else 0x3F80
    outputs, _ = emulate(compiled["sm_100f"]["dense_1cta"], gemm.values)
    assert 0 < gemm.wrong(outputs) <= 144
