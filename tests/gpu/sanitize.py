"""A few small calls of kernels, to be run under NVIDIA's compute-sanitizer."""

import jax
import numpy as np

from gpu import test_outer as outer
from gpu.problems import TILES, check, int32, on_gpu, problem
from pearl_jax import library, tiling


def main():
    calls = 0
    for i, (name, options) in enumerate(TILES.items()):
        # Rows of no group, an empty group, groups of an odd size, k and n inside of a tile.
        p = problem(150, 136, 264, 3)
        lhs, rhs = p.operands("bfloat16", options["transpose_rhs"])
        run = on_gpu(**options, preferred_element_type="float32" if i % 3 == 2 else "bfloat16")
        for sizes in ([17, 0, 126], [0, 1, 0]):
            check(run(lhs, rhs, int32(*sizes), np.int32(0)), p.want(sizes), name)
            calls += 1
    for tile in tiling.tiles(library.present_arch(), "wgrad"):
        p = outer.problem(150, 136, 264)
        operands = p.operands("bfloat16")
        run = outer.on_gpu(3, tile=tile, preferred_element_type="float32")
        for sizes in ([17, 0, 126], [0, 1, 0]):
            args = *operands, int32(*sizes), np.int32(0)
            check(run(*args, run(*args)), 2 * p.want(sizes), tile)
            calls += 2
    assert jax.default_backend() == "gpu"
    print(f"{calls} calls, all right")


if __name__ == "__main__":
    main()
