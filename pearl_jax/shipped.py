"""Tiles that were measured and come with the package.

The fastest for even, random and Zipf-distributed group sizes together (the least geometric
mean), as `python -m pearl_jax.autotune` has them.
"""

_FEW, _MORE, _SHARED = "64x256x128c1", "128x256x128c1", "192x128x64c2"
_MANY = "256x128x64c2_staged"

# NVIDIA H200, 2026-11-30: (form, g, k, n), {mean rows of a group: tile}
_H200 = (
    # GLM-5.3 gate_up on one of 8 devices
    (
        ("fwd", 32, 6144, 4096),
        {4: _FEW, 16: _FEW, 32: _SHARED, 64: _MANY, 128: _MANY, 256: _MANY, 512: _MANY},
    ),
    (
        ("dgrad", 32, 6144, 4096),
        {4: _FEW, 16: _FEW, 32: _FEW, 64: _MORE, 128: _MANY, 256: _MANY, 512: _MANY},
    ),
    # GLM-5.3 down on one of 8 devices
    (
        ("fwd", 32, 2048, 6144),
        {4: _FEW, 16: _FEW, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY, 512: _MANY},
    ),
    (
        ("dgrad", 32, 2048, 6144),
        {4: _FEW, 16: _FEW, 32: _MORE, 64: _MORE, 128: _MANY, 256: _MANY, 512: _MANY},
    ),
    # DeepSeek-V4-Pro gate_up on one of 8 devices
    (
        ("fwd", 48, 7168, 6144),
        {4: _FEW, 16: _FEW, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY, 512: _MANY},
    ),
    (
        ("dgrad", 48, 7168, 6144),
        {4: _FEW, 16: _FEW, 32: _FEW, 64: _MORE, 128: _MANY, 256: _MANY, 512: _MANY},
    ),
    # DeepSeek-V4-Pro down on one of 8 devices
    (("fwd", 48, 3072, 7168), {16: _SHARED, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (
        ("dgrad", 48, 3072, 7168),
        {4: _FEW, 16: _FEW, 32: _FEW, 64: _MORE, 128: _MANY, 256: _MANY, 512: _MANY},
    ),
    # Kimi-K3 gate_up on one of 8 devices
    (("fwd", 112, 3584, 6144), {16: _SHARED, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (("dgrad", 112, 3584, 6144), {16: _FEW, 32: _FEW, 64: _MORE, 128: _MANY, 256: _MANY}),
    # Kimi-K3 down on one of 8 devices
    (("fwd", 112, 3072, 3584), {16: _SHARED, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (("dgrad", 112, 3072, 3584), {16: _MORE, 32: _MORE, 64: _MANY, 128: _MANY, 256: _MANY}),
    # Qwen3-235B gate_up on one of 8 devices
    (("fwd", 16, 4096, 3072), {16: _SHARED, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _SHARED}),
    (("dgrad", 16, 4096, 3072), {16: _FEW, 32: _FEW, 64: _MANY, 128: _MANY, 256: _MANY}),
    # Qwen3-235B down on one of 8 devices
    (("fwd", 16, 1536, 4096), {16: _SHARED, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (("dgrad", 16, 1536, 4096), {16: _FEW, 32: _FEW, 64: _FEW, 128: _MANY, 256: _MANY}),
    # gpt-oss-120b gate_up on one of 8 devices
    (("fwd", 16, 2880, 5760), {16: _FEW, 32: _FEW, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (("dgrad", 16, 2880, 5760), {16: _FEW, 32: _FEW, 64: _MANY, 128: _MANY, 256: _MANY}),
    # gpt-oss-120b down on one of 8 devices
    (("fwd", 16, 2880, 2880), {16: _SHARED, 32: _FEW, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (("dgrad", 16, 2880, 2880), {16: _FEW, 32: _FEW, 64: _MANY, 128: _MANY, 256: _MANY}),
    # Mixtral-8x7B gate_up
    (("fwd", 8, 4096, 28672), {32: _FEW, 64: _SHARED, 128: _SHARED}),
    (("dgrad", 8, 4096, 28672), {32: _FEW, 64: _MORE, 128: _MORE}),
    # Mixtral-8x7B down
    (("fwd", 8, 14336, 4096), {32: _SHARED, 64: _SHARED, 128: _SHARED}),
    (("dgrad", 8, 14336, 4096), {32: _MORE, 64: _MANY, 128: _MANY}),
    # Qwen3-30B-A3B gate_up
    (("fwd", 128, 2048, 1536), {16: _FEW, 32: _SHARED, 64: _SHARED, 128: _SHARED, 256: _MANY}),
    (("dgrad", 128, 2048, 1536), {16: _FEW, 32: _FEW, 64: _MORE, 128: _MANY, 256: _MANY}),
)

# arch -> (form, g, k, n, rows) -> (tile, when it was measured)
TILES = {
    "sm_90a": {
        (*shape, rows): (tile, "2026-11-30")
        for shape, tiles in _H200
        for rows, tile in tiles.items()
    }
}
