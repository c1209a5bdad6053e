"""How calls are timed.

Candidates are timed in turn, round after round in one process, so that whatever else the
machine does hits all of them; what counts is the median of each.

On a CPU (measure_waited) a sample is as many calls as take MIN_SAMPLE_SECONDS, each waited
for, as independent calls would run side by side.

On a GPU (measure_bursts) a sample is two bursts of back-to-back calls, one three times as
long as the other; their difference is GPU time without the host's fixed cost. Bursts are
short and start after a pause, so that the power limit meets all candidates alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

MIN_SAMPLE_SECONDS = 0.01
BURST_SECONDS = 0.004  # of the shorter burst: far longer than the host's jitter
PAUSE_SECONDS = 0.02
HOST_BOUND = 0.9  # share of a call's time that starting it may take


@dataclasses.dataclass(frozen=True)
class Burst:
    """A program of one or more independent calls, to be run many times.

    Attributes:
      start: starts that many programs one after the other, waits for none, and returns
        what wait takes.
      wait: waits for them.
      calls: calls in one program.
    """

    start: Callable[[int], Any]
    wait: Callable[[Any], Any]
    calls: int = 1


def jax_burst(program, operands, calls=1) -> Burst:
    """A burst of a compiled JAX function."""

    def start(count):
        out = None
        for _ in range(count):
            out = program(*operands)
        return out

    return Burst(start, jax.block_until_ready, calls)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
      samples: one of each round.
      host_bound: whether starting calls took so long that the GPU may have waited.
    """

    samples: list[float]
    host_bound: bool = False

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)


def slope(short, long, count, calls) -> float:
    """Seconds of one call, from those of count and of 3 * count programs of several calls."""
    return (long - short) / (2 * count * calls)


def measure(bursts, rounds) -> dict[Any, Timing]:
    """Times bursts (name -> Burst) that have run before, as the platform asks for."""
    on_gpu = jax.default_backend() == "gpu"
    return (measure_bursts if on_gpu else measure_waited)(bursts, rounds)


def measure_waited(bursts, rounds) -> dict[Any, Timing]:
    """Times bursts by waiting for each program."""
    counts = {
        name: max(1, math.ceil(MIN_SAMPLE_SECONDS / _time_burst(burst, 1)[0]))
        for name, burst in bursts.items()
    }

    def sample(name):
        begin = time.perf_counter()
        for _ in range(counts[name]):
            bursts[name].wait(bursts[name].start(1))
        return (time.perf_counter() - begin) / (counts[name] * bursts[name].calls)

    return {name: Timing(taken) for name, taken in _in_turn(sample, bursts, rounds).items()}


def measure_bursts(bursts, rounds) -> dict[Any, Timing]:
    """Times bursts by the difference of a long and a short one."""
    counts, starting = {}, {}
    for name, burst in bursts.items():
        one = min(_time_burst(burst, 1)[0] for _ in range(2))
        counts[name] = max(1, round(BURST_SECONDS / one))
        # Few programs: with many in flight, starting one waits for another to end.
        few = min(counts[name], 8)
        starting[name] = _time_burst(burst, few)[1] / (few * burst.calls)

    def sample(name):
        burst, count = bursts[name], counts[name]
        time.sleep(PAUSE_SECONDS)
        short, _ = _time_burst(burst, count)
        time.sleep(PAUSE_SECONDS)
        long, _ = _time_burst(burst, 3 * count)
        return slope(short, long, count, burst.calls)

    found = {name: Timing(taken) for name, taken in _in_turn(sample, bursts, rounds).items()}
    return {
        name: dataclasses.replace(t, host_bound=starting[name] > HOST_BOUND * t.seconds)
        for name, t in found.items()
    }


def _in_turn(sample, names, rounds):
    """name -> sample(name) of each round. The order rotates: none always follows the same one."""
    names = list(names)
    if not names or rounds < 1:
        raise ValueError(f"measure: needs a burst and a round, got {len(names)}, {rounds=}")
    samples = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            samples[name].append(sample(name))
    return samples


def _time_burst(burst, count):
    """Seconds until count programs are done, and until they were started."""
    begin = time.perf_counter()
    out = burst.start(count)
    started = time.perf_counter()
    burst.wait(out)
    return time.perf_counter() - begin, started - begin
