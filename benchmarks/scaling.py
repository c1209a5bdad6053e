"""A model of expert parallelism over many GPUs: measured link rates in, tokens per second out.

  python -m benchmarks.scaling --case GLM-5.3 --tokens 4096

For one MoE layer, forward, with all_to_all and the same tokens on every GPU. It assumes

- choices of experts that are even over devices;
- matmuls at the rate that they reach in a layer, but never faster than the weights of the
  experts that tokens chose stream from memory; everything else at memory's bandwidth;
- three exchanges (tokens, routing, results), each with a time to start, whose bytes into a
  GPU come over the links of its node and over its network card side by side, each at its
  full rate: no congestion, and no device that is late;
- slots for capacity times the even share of a device's tokens, as ExpertParallel has them,
  all of which travel, full or not.

Rates are those of one and two H200s, which the model meets within 19 % from 64 to 32768 tokens
(benchmarks/notes/expert_parallel.md); that of the network is the data sheet's (400 Gbit/s for
each GPU), not measured. "alone" is with exchanges after one another and the
arithmetic, "overlapped" with the arithmetic hidden behind them or the other way around: what is
reached lies in between.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

from benchmarks import shapes
from benchmarks.protocol import Peaks

GPUS = (8, 64, 512)
LAYER = Peaks(bandwidth=4.40e12, flops=610e12)  # of an H200, the matmuls of a whole layer


@dataclasses.dataclass(frozen=True)
class Links:
    """Between GPUs.

    Attributes:
      node: GPUs that are linked directly.
      node_bandwidth, network_bandwidth: bytes per second into one GPU, from its node and
        from all others.
      start_seconds: of an exchange, whatever its size.
    """

    node: int = 8
    node_bandwidth: float = 253e9
    network_bandwidth: float = 50e9
    start_seconds: float = 40e-6


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one layer on all GPUs.

    Attributes:
      compute_seconds, exchange_seconds: of a GPU.
      alone, overlapped: tokens per second of all GPUs.
    """

    compute_seconds: float
    exchange_seconds: float
    alone: float
    overlapped: float


def slots(tokens, top_k, devices, capacity) -> int:
    """Tokens that travel from one device to another; each goes there at most once."""
    return min(tokens, math.ceil(capacity * tokens * top_k / devices))


def exchange_seconds(model, tokens, devices, capacity, links=Links(), itemsize=2) -> float:
    """Tokens and their routing to the experts, results back, for `devices` that share them."""
    if devices == 1:
        return 0.0
    token = model.width * itemsize
    num_bytes = slots(tokens, model.top_k, devices, capacity) * (2 * token + 8 * model.top_k)
    near = min(devices, links.node) - 1
    far = devices - 1 - near
    moving = num_bytes * max(near / links.node_bandwidth, far / links.network_bandwidth)
    return 3 * links.start_seconds + moving


def compute_seconds(model, tokens, devices, capacity, peaks, itemsize=2) -> float:
    """The expert matmuls of tokens * top_k rows, and what else happens to the rows with a slot.

    Of num_experts / devices experts those are read that a token chose. Around the matmuls a
    row of d values is read and written as it is sorted, its 2 f of gate and up are written and
    read, f activated ones written, d results written and read.
    """
    weights = 3 * model.width * model.intermediate
    choices = devices * tokens * model.top_k
    chosen = 1 - (1 - 1 / model.num_experts) ** choices
    flops = 2 * tokens * model.top_k * weights
    num_bytes = chosen * model.num_experts / devices * weights * itemsize
    rows = min(capacity, devices) * tokens * model.top_k if devices > 1 else tokens * model.top_k
    row_bytes = (4 * model.width + 5 * model.intermediate) * itemsize
    return (
        max(flops / peaks.flops, num_bytes / peaks.bandwidth) + rows * row_bytes / peaks.bandwidth
    )


def estimate(model, gpus, devices, tokens, capacity, peaks, links=Links()) -> Estimate:
    """For `gpus` in groups of `devices`, each of which holds all experts once."""
    compute = compute_seconds(model, tokens, devices, capacity, peaks)
    exchange = exchange_seconds(model, tokens, devices, capacity, links)
    total = gpus * tokens
    return Estimate(compute, exchange, total / (compute + exchange), total / max(compute, exchange))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=shapes.MODELS, default="GLM-5.3")
    parser.add_argument("--tokens", type=int, default=4096, help="of each GPU")
    parser.add_argument("--capacity", type=float, default=1.25)
    parser.add_argument("--network", type=float, default=50, help="GB/s into each GPU")
    options = parser.parse_args()
    model = shapes.MODELS[options.case]
    links = Links(network_bandwidth=options.network * 1e9)

    print(f"{options.case}, {options.tokens} tokens per GPU, capacity {options.capacity}")
    print("GPUs  experts over  compute us  exchange us  million tokens/s alone  overlapped")
    for gpus in GPUS:
        for devices in (8, 16, 32, 64, 128, 256):
            if devices <= gpus and model.num_experts % devices == 0:
                e = estimate(model, gpus, devices, options.tokens, options.capacity, LAYER, links)
                print(
                    f"{gpus:>4}{devices:>14}{e.compute_seconds * 1e6:>12.0f}"
                    f"{e.exchange_seconds * 1e6:>13.0f}{e.alone / 1e6:>24.2f}"
                    f"{e.overlapped / 1e6:>12.2f}"
                )


if __name__ == "__main__":
    main()
