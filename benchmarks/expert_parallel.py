"""The routed experts of a layer over the devices of one host: every strategy, and its exchanges.

  python -m benchmarks.expert_parallel
  python -m benchmarks.expert_parallel --tokens 64 512 --strategies replicate all_to_all ragged
  python -m benchmarks.expert_parallel --cpu     # scaled down: shows that it runs

GLM-5.3 in bfloat16, its experts spread over all devices, random tokens and routing. Columns, for
each number of tokens of a device and each strategy: microseconds of the forward pass and of a step
(forward, with gradients for tokens and experts); microseconds of the exchanges of a forward
pass alone, compiled without what lies between them, and their share of it; how many times
longer these take than two dense all_to_all of one device's tokens, the same bytes as slots
without a capacity; how many times longer the forward pass takes than on one device with all
experts and its own tokens (1: the devices together are as fast as that many alone).

A strategy whose result differs from that of one device is not timed, and said so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import forms, moe_layer, shapes
from pearl_jax import moe, routing, timing
from pearl_jax.expert_parallel import ExpertParallel

TOKENS = (64, 512, 4096, 32768)
STRATEGIES = ("replicate", "gather", "all_to_all", "ragged")


def forward(apply_experts, tokens, routed, experts):
    return apply_experts(tokens, routed, experts)[0].astype(tokens.dtype)


def step(apply_experts, tokens, routed, experts):
    def loss(tokens, experts):
        out = forward(apply_experts, tokens, routed, experts)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(tokens, experts)


def exchanges(ep, tokens):
    """What ep sends around in a forward pass of tokens, and nothing else: all but ragged."""

    def local(tokens):
        t, d = tokens.shape
        if ep.strategy == "replicate":
            return lax.psum(tokens.astype(jnp.float32), "expert")
        if ep.strategy == "gather":
            everyone = lax.all_gather(tokens, "expert", tiled=True).astype(jnp.float32)
            return lax.psum_scatter(everyone, "expert", scatter_dimension=0, tiled=True)
        slots = jnp.broadcast_to(tokens, (ep.mesh.size, t, d))
        there = lax.all_to_all(slots, "expert", 0, 0)
        return lax.all_to_all(there + 1, "expert", 0, 0)

    spec = P() if ep.strategy == "replicate" else P("expert")
    out = P(None, "expert") if ep.strategy == "all_to_all" else spec
    return jax.shard_map(local, mesh=ep.mesh, in_specs=spec, out_specs=out, check_vma=False)(tokens)


def make_problem(model, num_tokens, seed=0):
    """Tokens (t, d) and their routing, on the first device."""
    keys = jax.random.split(jax.random.key(seed), 2)
    tokens = jax.random.normal(keys[0], (num_tokens, model.width), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (num_tokens, model.num_experts))
    routed = routing.route(logits, routing.RouterConfig(model.num_experts, model.top_k))
    return tokens, routed._replace(scores=routed.scores[:, :0], logits=routed.logits[:, :0])


def compiled_burst(function, *operands):
    program = jax.jit(function).lower(*operands).compile()
    burst = timing.jax_burst(program, operands)
    burst.wait(burst.start(1))
    return burst


def run_point(model, mesh, experts, num_tokens, strategies, rounds):
    """Prints the lines of one number of tokens of a device."""
    alone, sharded = experts
    n = mesh.size
    tokens, routed = make_problem(model, n * num_tokens)
    own = tokens[:num_tokens], jax.tree.map(lambda x: x[:num_tokens], routed)
    bursts = {
        ("one device", "forward"): compiled_burst(
            functools.partial(forward, moe.apply_experts), *own, alone
        )
    }
    want = jax.jit(functools.partial(forward, moe.apply_experts))(*own, alone)

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    for strategy in ("dense", *strategies):
        ep = ExpertParallel(mesh, strategy="all_to_all" if strategy == "dense" else strategy)
        operands = jax.tree.map(lambda x: put(x, ep.token_spec), (tokens, routed))
        try:
            if strategy != "ragged":
                moved = compiled_burst(functools.partial(exchanges, ep), operands[0])
                bursts[strategy, "exchanges"] = moved
            if strategy == "dense":
                continue
            runs = {
                (strategy, f.__name__): compiled_burst(functools.partial(f, ep), *operands, sharded)
                for f in (forward, step)
            }
            got = runs[strategy, "forward"].start(1)[:num_tokens]
            error = float(moe_layer.worst_error(jax.device_put(got, jax.devices()[0]), want))
        except Exception as error:  # out of memory, or not implemented: the others go on
            print(f"# {strategy}, {num_tokens} tokens: {forms.reason(error)}", flush=True)
            continue
        if error <= moe_layer.TOLERANCE:
            bursts |= runs
        else:
            print(f"# {strategy}: differs from one device by {error:.1e}, not timed", flush=True)

    us = {
        key: 1e6 * timing.seconds for key, timing in timing.measure_bursts(bursts, rounds).items()
    }
    one, dense = us["one device", "forward"], us["dense", "exchanges"]
    print(f"{num_tokens:>6}  {'one device':<11}{one:>11.0f}")
    for strategy in strategies:
        if (strategy, "forward") not in us:
            continue
        whole, moved = us[strategy, "forward"], us.get((strategy, "exchanges"))
        share = (
            "".rjust(34)
            if moved is None
            else (f"{moved:>14.0f}{100 * moved / whole:>8.0f}%{moved / dense:>10.2f}x")
        )
        print(
            f"{num_tokens:>6}  {strategy:<11}{whole:>11.0f}{us[strategy, 'step']:>11.0f}"
            f"{share}{whole / one:>12.2f}x",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="scaled down, on 4 CPU devices")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a device")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = shapes.MODELS["GLM-5.3"]
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        model = moe_layer.scale_down(model)
        options.tokens = tuple(min(t, 64) for t in options.tokens[:1])
    if jax.device_count() < 2:
        raise SystemExit("expert_parallel: needs two devices or more; give --cpu")

    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=types)
    alone = moe_layer.random_layer(dataclasses.replace(model, expert_parallel=1)).experts
    sharded = jax.device_put(alone, NamedSharding(mesh, P("expert")))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {model}")
    print(
        "tokens  strategy    forward us    step us  exchanges us   share   of dense  of one device"
    )
    for num_tokens in options.tokens:
        run_point(model, mesh, (alone, sharded), num_tokens, options.strategies, options.rounds)


if __name__ == "__main__":
    main()
