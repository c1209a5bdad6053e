"""Problems with exact answers: small integers, whose sums float32 holds whatever the order."""

from dataclasses import dataclass

import numpy as np


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Small integers to float8 e4m3 bits."""
    values = np.abs(x).astype(int)
    codes = np.array([0x00, 0x38, 0x40, 0x44, 0x48])  # 0 to 4
    return (codes[values] | np.where(x < 0, 0x80, 0)).astype(np.uint8)


ENCODE = {
    "BFloat16": to_bf16,
    "Float16": lambda x: x.astype(np.float16),
    "Float32": lambda x: x.astype(np.float32),
    "TFloat32": lambda x: x.astype(np.float32),
    "Float8E4M3FN": to_e4m3,
}
POISON = {
    "BFloat16": np.uint16(0x7FFF),
    "Float16": np.float16(np.nan),
    "Float32": np.float32(np.nan),
}


@dataclass
class Gemm:
    """a (m, k) times b (n, k) transposed; with groups, rows of group i times b[i]."""

    values: list
    expected: np.ndarray  # as the kernel's output type holds it

    @staticmethod
    def of(
        m,
        n,
        k,
        sizes=None,
        seed=0,
        dtype="BFloat16",
        out_dtype="BFloat16",
        a_mn_major=False,
        b_mn_major=False,
        c_mn_major=False,
    ) -> "Gemm":
        rng = np.random.default_rng(seed)
        groups = len(sizes) if sizes else 1
        a = rng.integers(-2, 3, (m, k))
        b = rng.integers(-2, 3, (groups, n, k))
        ends = np.cumsum(sizes if sizes else [m])
        product = np.zeros((m, n))
        for group, end in enumerate(ends):
            start = ends[group - 1] if group else 0
            product[start:end] = a[start:end] @ b[group].T
        encode = ENCODE[dtype]
        a = encode(a.T if a_mn_major else a)
        b = encode(b.transpose(0, 2, 1) if b_mn_major else b)
        c = np.full((n, m) if c_mn_major else (m, n), POISON[out_dtype])
        values = [a, b, c, ends.astype(np.int32), m, n, k, groups]
        return Gemm(values, ENCODE[out_dtype](product.T if c_mn_major else product))

    def wrong(self, outputs: list[np.ndarray]) -> int:
        """How many elements of the result differ in any bit (but for the sign of zero)."""
        got = outputs[2]
        same = (got == self.expected) | ((got == self._negative_zero) & (self.expected == 0))
        return int((~same).sum())

    @property
    def _negative_zero(self):
        return 0x8000 if self.expected.dtype == np.uint16 else 0
