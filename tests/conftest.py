"""Eight CPU devices for the sharding tests; the GPU suite is skipped where there is no GPU."""

import os

# Without a GPU little is optimised: problems are small, and what takes the time is compiling.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    + ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    * (not os.path.exists("/dev/nvidiactl"))
)

import jax
import numpy as np
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here: the GPU suite did not run"))


@pytest.fixture
def rng(request):
    """Random data, another for each test but the same in every run."""
    return np.random.default_rng(sum(request.node.name.encode()))
