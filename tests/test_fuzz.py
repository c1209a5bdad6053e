"""2,000 random problems against the oracle, the same in every run; see fuzz.py for more."""

import fuzz
import pytest


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    count = 0

    def progress():
        nonlocal count
        count += 1

    fuzz.run(500, seed, configs=24, progress=progress, derandomize=True)
    assert count >= 500
