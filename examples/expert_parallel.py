"""A small MoE layer trained over devices and processes, its loss beside that of one device.

The same program, wherever the devices are:

  python examples/expert_parallel.py                     the GPUs of one process, or one CPU
  python examples/expert_parallel.py --cpu-devices 8     a CPU that poses as 8 devices
  python examples/expert_parallel.py --spawn 4           4 processes on this host, with a
                                                         GPU each if it has that many
  srun python examples/expert_parallel.py --distributed  a process for each task of Slurm

--distributed takes the hosts from the environment of Slurm, Open MPI, Kubernetes or a TPU
pod; under Slurm, `srun --ntasks-per-node=8 --gpus-per-node=8` makes each task take one of the GPUs.
Elsewhere, start every process by hand with --coordinator HOST:PORT (of the first of
them), --num-processes and --process-id.

--mesh names the axes and their sizes, such as data=2,expert=4; by default all devices are
on the axis expert. Others are tensor and fsdp, see pearl_jax.expert_parallel.

A process that dies takes the others with it: JAX's coordination service misses it after
--heartbeat seconds and ends them, with an error that says which task is gone. On a CPU,
who waits for its data sees the connection close, and on any device, who loses the first
process, which hosts that service, stops at once.
"""

import argparse
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pearl_jax import moe, routing
from pearl_jax.expert_parallel import ExpertParallel

HIDDEN, INTERMEDIATE, TOP_K = 32, 64, 2
LEARNING_RATE, LARGEST_ERROR = 1.0, 1e-4


def make_problem(num_tokens, num_experts, seed=0):
    """Tokens, the output they should have, and parameters: the same in every process."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)

    tokens = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    target = np.tanh(tokens @ normal(HIDDEN, HIDDEN))
    gate_up = np.swapaxes(normal(num_experts, 2, HIDDEN, INTERMEDIATE), 1, 2)
    experts = moe.ExpertWeights(gate_up, normal(num_experts, INTERMEDIATE, HIDDEN))
    return tokens, target, (normal(HIDDEN, num_experts), experts)


def make_step(config, apply_experts):
    """(parameters, tokens, target) -> the parameters after a step, the loss before it."""

    def loss(parameters, tokens, target):
        router, experts = parameters
        routed = routing.route(routing.project(tokens, router), config)
        weights = moe.MoEWeights(experts)
        out = moe.moe(tokens, routed, weights, apply_experts=apply_experts)
        return jnp.mean((out.out - target) ** 2) + 0.01 * out.load_balance_loss

    @jax.jit
    def step(parameters, tokens, target):
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, target)
        new = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, gradients)
        return new, value

    return step


def train(args):
    axes = dict(pair.split("=") for pair in args.mesh.split(",")) if args.mesh else {}
    axes = {name: int(size) for name, size in axes.items()} or {"expert": jax.device_count()}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    parallel = ExpertParallel(mesh, strategy=args.strategy)
    num_experts = 2 * axes.get("expert", 1)
    config = routing.RouterConfig(num_experts, TOP_K)
    tokens, target, parameters = make_problem(args.tokens, num_experts)
    main = jax.process_index() == 0

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    router, experts = parameters
    sharded = (
        put(router, P()),
        moe.ExpertWeights(
            put(experts.gate_up, parallel.weight_specs.gate_up),
            put(experts.down, parallel.weight_specs.down),
        ),
    )
    batch = put(tokens, P()), put(target, P())
    step, step_alone = make_step(config, parallel), make_step(config, moe.apply_experts)
    if main:
        kind, processes = jax.devices()[0].device_kind, jax.process_count()
        print(f"{axes} on {mesh.size} x {kind} in {processes} process(es), {args.tokens} tokens")
        print(f"{'step':>4} {'loss':>12} {'one device':>12} {'difference':>11} {'ms':>8}")
    alone, worst = parameters, 0.0
    for i in range(args.steps):
        start = time.perf_counter()
        sharded, value = step(sharded, *batch)
        value = float(value)
        milliseconds = (time.perf_counter() - start) * 1e3
        if main:
            with jax.default_device(jax.local_devices()[0]):
                alone, expected = step_alone(alone, tokens, target)
            expected = float(expected)
            difference = abs(value - expected) / expected
            worst = max(worst, difference)
            print(
                f"{i:>4} {value:>12.6f} {expected:>12.6f} {difference:>11.1e} {milliseconds:>8.1f}",
                flush=True,
            )
    if not worst <= LARGEST_ERROR:
        sys.exit(f"expert_parallel: the losses differ by {worst:.1e}, above {LARGEST_ERROR:.0e}")


def spawn(args):
    """Starts processes of this program on this host and waits for them."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        coordinator = f"localhost:{s.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--spawn=0", f"--coordinator={coordinator}"]
    processes = [
        subprocess.Popen([*command, f"--num-processes={args.spawn}", f"--process-id={i}"])
        for i in range(args.spawn)
    ]
    print("processes:", *(p.pid for p in processes), flush=True)
    codes = [p.wait() for p in processes]
    if any(codes):
        sys.exit(f"expert_parallel: processes ended with {codes}")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=256, metavar="N")
    parser.add_argument("--steps", type=int, default=5, metavar="N")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="of each process")
    parser.add_argument("--spawn", type=int, default=0, metavar="N")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--num-processes", type=int, metavar="N")
    parser.add_argument("--process-id", type=int, metavar="I")
    parser.add_argument("--heartbeat", type=int, default=60, metavar="SECONDS")
    args = parser.parse_args()
    if args.spawn:
        return spawn(args)
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    jax.config.update("jax_default_matmul_precision", "highest")  # also on a GPU
    if args.distributed or args.coordinator:
        here = args.coordinator and "localhost" in args.coordinator
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            # On one host each process would otherwise take all of its GPUs.
            local_device_ids=args.process_id if here else None,
            initialization_timeout=args.heartbeat,
            heartbeat_timeout_seconds=args.heartbeat,
            shutdown_timeout_seconds=args.heartbeat,
        )
    train(args)


if __name__ == "__main__":
    main()
