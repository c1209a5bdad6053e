"""Tiles that were measured and come with the package.

The fastest for even, random and Zipf-distributed group sizes together (the least geometric
mean), as `python -m pearl_jax.autotune` has them. None for outer products, whose tiles differ
less than runs do.
"""

_FEW, _SOME, _SHORT, _MORE = "64x256x128c1", "128x256x128c1", "128x256x64c1", "192x128x64c1"
_MANY = "256x128x64c2_staged"

# NVIDIA H200, when it was measured: (form, g, k, n), {mean rows of a group: tile}
_H200 = {
    "2026-11-30": (
        # GLM-5.3 gate_up on one of 8 devices
        (
            ("fwd", 32, 6144, 4096),
            {
                1: _SHORT,
                4: _SHORT,
                16: _SHORT,
                32: _MANY,
                64: _MANY,
                128: _MORE,
                256: _MANY,
                512: _MANY,
                1024: _MANY,
            },
        ),
        (("dgrad", 32, 6144, 4096), {64: _SOME, 128: _SOME, 256: _MANY, 512: _MANY, 1024: _MANY}),
        # GLM-5.3 down on one of 8 devices
        (
            ("fwd", 32, 2048, 6144),
            {16: _SHORT, 32: _SHORT, 64: _MORE, 128: _MANY, 256: _MANY, 512: _MANY, 1024: _MANY},
        ),
        (("dgrad", 32, 2048, 6144), {64: _SOME, 128: _MANY, 256: _MANY, 512: _MANY, 1024: _MANY}),
        # DeepSeek-V4-Pro gate_up on one of 8 devices
        (
            ("fwd", 48, 7168, 6144),
            {16: _MORE, 32: _MORE, 64: _MANY, 128: _MANY, 256: _MANY, 512: _MANY},
        ),
        (("dgrad", 48, 7168, 6144), {64: _SOME, 128: _SOME, 256: _MANY, 512: _MANY, 1024: _MANY}),
        # DeepSeek-V4-Pro down on one of 8 devices
        (
            ("fwd", 48, 3072, 7168),
            {1: _SHORT, 4: _SHORT, 16: _SHORT, 32: _SHORT, 64: _MANY, 128: _MANY, 256: _MANY},
        ),
        (("dgrad", 48, 3072, 7168), {64: _SOME, 128: _SOME, 256: _MANY, 512: _MANY, 1024: _MANY}),
        # Kimi-K3 gate_up on one of 8 devices
        (("fwd", 112, 3584, 6144), {16: _SHORT, 32: _MORE, 64: _MANY, 128: _MANY, 256: _MANY}),
        (("dgrad", 112, 3584, 6144), {64: _SOME, 128: _SOME, 256: _MANY, 512: _MANY, 1024: _MANY}),
        # Kimi-K3 down on one of 8 devices
        (("fwd", 112, 3072, 3584), {16: _SHORT, 32: _MANY, 64: _MORE, 128: _MANY, 256: _MANY}),
        (("dgrad", 112, 3072, 3584), {64: _SOME, 128: _SOME, 256: _MANY, 512: _MANY, 1024: _MANY}),
        # Qwen3-235B gate_up on one of 8 devices
        (("fwd", 16, 4096, 3072), {16: _MORE, 32: _MORE, 64: _MANY, 128: _MORE, 256: _MANY}),
        (("dgrad", 16, 4096, 3072), {64: _SOME, 128: _MANY, 256: _MANY, 512: _MANY}),
        # Qwen3-235B down on one of 8 devices
        (("fwd", 16, 1536, 4096), {16: _MORE, 32: _SHORT, 64: _SHORT, 128: _MANY, 256: _MANY}),
        (("dgrad", 16, 1536, 4096), {64: _FEW, 128: _MANY, 256: _MANY, 512: _MANY}),
        # gpt-oss-120b gate_up on one of 8 devices
        (("fwd", 16, 2880, 5760), {16: _SHORT, 32: _SHORT, 64: _MANY, 128: _MANY, 256: _MANY}),
        (("dgrad", 16, 2880, 5760), {64: _MANY, 128: _MANY, 256: _MANY, 512: _MANY}),
        # gpt-oss-120b down on one of 8 devices
        (("fwd", 16, 2880, 2880), {16: _MORE, 32: _MORE, 64: _MORE, 128: _MANY, 256: _MANY}),
        (("dgrad", 16, 2880, 2880), {64: _SOME, 128: _MANY, 256: _MANY, 512: _MANY}),
        # Mixtral-8x7B gate_up
        (("fwd", 8, 4096, 28672), {16: _SHORT, 32: _SHORT, 64: _SHORT, 128: _MANY, 256: _MANY}),
        (("dgrad", 8, 4096, 28672), {64: _SOME, 128: _MANY, 256: _MANY, 512: _MANY}),
        # Mixtral-8x7B down
        (("fwd", 8, 14336, 4096), {16: _SHORT, 32: _SHORT, 64: _MANY, 128: _MORE, 256: _MANY}),
        (("dgrad", 8, 14336, 4096), {64: _MANY, 128: _MANY, 256: _MANY, 512: _MANY}),
        # Qwen3-30B-A3B gate_up
        (
            ("fwd", 128, 2048, 1536),
            {1: _SHORT, 4: _MORE, 16: _MORE, 32: _MORE, 64: _MANY, 128: _MANY, 256: _MANY},
        ),
        (("dgrad", 128, 2048, 1536), {64: _SOME, 128: _MANY, 256: _MANY, 512: _MANY}),
    ),
    "2026-12-01": (
        # GLM-5.3 gate_up on one of 8 devices
        (("dgrad", 32, 6144, 4096), {16: _SOME, 32: _SOME}),
        # GLM-5.3 down on one of 8 devices
        (("dgrad", 32, 2048, 6144), {16: _SOME, 32: _SOME}),
        # DeepSeek-V4-Pro gate_up on one of 8 devices
        (("dgrad", 48, 7168, 6144), {16: _SOME, 32: _SOME}),
        # DeepSeek-V4-Pro down on one of 8 devices
        (("dgrad", 48, 3072, 7168), {16: _SOME, 32: _SOME}),
        # Kimi-K3 gate_up on one of 8 devices
        (("dgrad", 112, 3584, 6144), {16: _SOME, 32: _SOME}),
        # Kimi-K3 down on one of 8 devices
        (("dgrad", 112, 3072, 3584), {16: _FEW, 32: _SOME}),
        # Qwen3-235B gate_up on one of 8 devices
        (("dgrad", 16, 4096, 3072), {16: _FEW, 32: _FEW}),
        # Qwen3-235B down on one of 8 devices
        (("dgrad", 16, 1536, 4096), {16: _SOME, 32: _FEW}),
        # gpt-oss-120b gate_up on one of 8 devices
        (("dgrad", 16, 2880, 5760), {16: _FEW, 32: _FEW}),
        # gpt-oss-120b down on one of 8 devices
        (("dgrad", 16, 2880, 2880), {16: _FEW, 32: _FEW}),
        # Mixtral-8x7B gate_up
        (("dgrad", 8, 4096, 28672), {16: _SOME, 32: _SOME}),
        # Mixtral-8x7B down
        (("dgrad", 8, 14336, 4096), {16: _SOME, 32: _SOME}),
        # Qwen3-30B-A3B gate_up
        (("dgrad", 128, 2048, 1536), {16: _SOME, 32: _SOME}),
        # Qwen3-30B-A3B down
        (("dgrad", 128, 768, 2048), {16: _FEW, 32: _FEW}),
    ),
}

# arch -> (form, g, k, n, rows) -> (tile, when it was measured)
TILES = {
    "sm_90a": {
        (*shape, rows): (tile, date)
        for date, table in _H200.items()
        for shape, tiles in table
        for rows, tile in tiles.items()
    }
}
