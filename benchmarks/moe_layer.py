"""A whole MoE layer, forward and as a training step, on other grouped matmuls and by part.

  python -m benchmarks.moe_layer --csv layers.csv
  python -m benchmarks.moe_layer --layer GLM-5.3 --tokens 64 512
  python -m benchmarks.moe_layer --cpu          # scaled down: shows that it runs, times mean little

The layer is that of pearl_jax.moe with a float32 router, in bfloat16: router, sort, gather,
gate and up projection, activation, down projection, combine. A step is the loss with its
gradients for tokens, router and experts. Columns: microseconds with grouped_matmul; how many
times longer the same layer takes with each peer as its contraction, or all of it in torch
(above 1: grouped_matmul is faster); GiB of operands, results and scratch that each of them
needs at once, as compiled, or as torch allocated. Then microseconds of each part, compiled
alone (a part finds its operands in a cache where the whole may not, and its results are
written out, so parts need not add up to the whole).

Experts that are spread over devices are those of one device. With e / p experts and all
top_k choices it gets the rows that it would get from p devices with that many tokens each.

Lines with # say which peers do not run and why; * marks a time that the host may have held up.
Files are those of benchmarks.grouped_matmul, and may be the same one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pearl_jax
from benchmarks import forms, peers, results, shapes, torch_layer
from pearl_jax import library, moe, routing, timing

LAYERS = {name: shapes.MODELS[name] for name in ("GLM-5.3", "Qwen3-30B-A3B", "Mixtral-8x7B")}
TOKENS = (64, 512, 8192)
PASSES = ("forward", "step")
TOLERANCE = 2e-2  # largest relative error of a token or of an expert's weights between candidates
# Logits that differ by less may change places where sums are rounded otherwise: so did those of
# 3 of 8192 tokens of Qwen3-30B, 2e-6 apart.
NEAR = 3e-5
LAX_MAX_SECONDS = 1.0
LAX_MAX_BYTES = 40 * 2**30


class Layer(NamedTuple):
    """Weights: router (d, e) float32, experts bfloat16."""

    router: jax.Array
    experts: moe.ExpertWeights


@functools.partial(jax.jit, static_argnums=0)
def random_layer(model: shapes.Model) -> Layer:
    e, d, f = model.num_experts // model.expert_parallel, model.width, model.intermediate

    def normal(key, shape, fan_in):
        return (jax.random.normal(key, shape) / math.sqrt(fan_in)).astype(jnp.bfloat16)

    def expert(key):
        up, down = jax.random.split(key)
        return moe.ExpertWeights(normal(up, (d, 2, f), d), normal(down, (f, d), f))

    router = jax.random.normal(jax.random.key(1), (d, e)) / math.sqrt(d)
    # Expert by expert: all at once would take several times the memory.
    return Layer(router, jax.lax.map(expert, jax.random.split(jax.random.key(0), e)))


def random_tokens(layer, num_tokens, top_k):
    """bfloat16 tokens, the same in every run, none of which has its experts by rounding alone."""
    shape = num_tokens, len(layer.router)
    tokens = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
    logits = jnp.sort(routing.project(tokens, layer.router), descending=True)
    if top_k < logits.shape[1]:
        near = logits[:, top_k - 1] - logits[:, top_k] < NEAR
        tokens = jnp.where(near[:, None], tokens[jnp.argmin(near)], tokens)
    return tokens


def forward(layer, tokens, target, *, top_k, contraction):
    config = routing.RouterConfig(layer.router.shape[1], top_k)
    routed = routing.route(routing.project(tokens, layer.router), config)
    return moe.moe(tokens, routed, moe.MoEWeights(layer.experts), contraction=contraction).out


def step(layer, tokens, target, **options):
    """The loss, and its gradients for layer and tokens."""

    def loss(layer, tokens):
        out = forward(layer, tokens, target, **options)
        return jnp.vdot(out.astype(jnp.float32), target.astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 1))(layer, tokens)


# Contractions: (model, tokens, factor) -> a function like grouped_matmul, or Absent is raised.


def _lax(model, tokens, factor):
    """factor: how many forward passes the arithmetic makes."""
    e, rows = model.num_experts // model.expert_parallel, tokens * model.top_k
    seconds = factor * e * 6 * rows * model.width * model.intermediate / forms.ASSUMED.flops
    masked_bytes = 2 * e * rows * max(model.width, model.intermediate)
    if seconds > LAX_MAX_SECONDS:
        raise forms.Absent(f"skipped, {e} times the arithmetic would take {seconds:.1f} s")
    if masked_bytes > LAX_MAX_BYTES:
        raise forms.Absent(f"skipped, would need {masked_bytes / 2**30:.0f} GiB")
    return jax.lax.ragged_dot


def _tokamax(model, tokens, factor):
    return forms.import_peer("tokamax").ragged_dot


def _mosaic(model, tokens, factor):
    if factor > 1:
        raise forms.Absent("it has no gradient")
    ragged_dot = forms.import_peer("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu").ragged_dot
    rows = tokens * model.top_k * model.expert_parallel / model.num_experts
    return functools.partial(ragged_dot, **(peers.MOSAIC_FEW if rows <= 64 else peers.MOSAIC_MANY))


CONTRACTIONS = {
    "pearl": lambda model, tokens, factor: pearl_jax.grouped_matmul,
    "lax": _lax,
    "tokamax": _tokamax,
    "mosaic": _mosaic,
}
CANDIDATES = (*CONTRACTIONS, "torch")
PACKAGES = {"pearl": "pearl-jax", "lax": "jax", "mosaic": "jax"}  # else of their own name


@jax.jit
def worst_error(got, want):
    """The largest relative error of an entry of the first axis, in any array of the trees."""

    def worst(got, want):
        got, want = (
            x.astype(jnp.float32).reshape(x.shape[0] if x.ndim else 1, -1) for x in (got, want)
        )
        difference, norm = (jnp.linalg.norm(x, axis=1) for x in (got - want, want))
        return jnp.max(
            jnp.where(norm > 0, difference / norm, jnp.where(difference > 0, jnp.inf, 0))
        )

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(worst, got, want))))


def parts_of(layer, tokens, *, top_k):
    """Name -> (function, operands), the parts of forward on its way from tokens to result."""
    e, d, two, f = layer.experts.gate_up.shape
    config = routing.RouterConfig(e, top_k)
    found = {}

    def part(name, function, *operands):
        found[name] = function, operands
        return jax.jit(function)(*operands)

    def activation(gate_up):
        gate, up = gate_up.astype(jnp.float32)[:, :f], gate_up.astype(jnp.float32)[:, f:]
        return moe.Activation()(gate, up).astype(gate_up.dtype)

    def combine(rows, weights, permutation):
        return routing.combine(rows, weights, permutation).astype(rows.dtype)

    routed = part(
        "router",
        lambda tokens, router: routing.route(routing.project(tokens, router), config),
        tokens,
        layer.router,
    )
    order = part("sort", functools.partial(_sort, num_experts=e), routed.experts)
    rows = part("gather", routing.dispatch, tokens, order)
    weights = layer.experts.gate_up.reshape(e, d, two * f)
    gate_up = part("up", pearl_jax.grouped_matmul, rows, weights, order.group_sizes)
    hidden = part("activation", activation, gate_up)
    rows = part("down", pearl_jax.grouped_matmul, hidden, layer.experts.down, order.group_sizes)
    part("combine", combine, rows, routed.weights, order)
    return found


def _sort(experts, num_experts):
    return routing.sort_by_expert(experts, num_experts)


# Timing.


class Program(NamedTuple):
    """A compiled program of some calls.

    Attributes:
      burst: what is timed.
      result: gives what the first call gives.
      num_bytes: that it needs at once.
    """

    burst: timing.Burst
    result: Callable[[], Any]
    num_bytes: int


def compile_calls(function, operands, calls=1) -> Program:
    """Several calls hide what the start of a program costs the host."""
    # A buffer of its own for each call's first operand, or XLA would make equal calls only once.
    first = [operands[0]] + [jax.tree.map(jnp.copy, operands[0]) for _ in range(calls - 1)]
    program = jax.jit(lambda first, *others: [function(x, *others) for x in first])
    compiled = program.lower(first, *operands[1:]).compile()
    burst = timing.jax_burst(compiled, (first, *operands[1:]), calls)
    burst.wait(burst.start(1))  # what runs first is not timed
    sizes: Any = compiled.memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return Program(burst, lambda: burst.start(1)[0], needed)


def compile_candidates(name, model, operands, candidates, reasons) -> dict[str, Program]:
    """Of "forward" or "step": those that run and agree with pearl, which comes first.

    Why the others do not is added to reasons (candidate -> why).
    """
    function, factor = {"forward": (forward, 1), "step": (step, 3)}[name]
    programs, want = {}, None
    for candidate in candidates:
        try:
            if candidate == "torch":
                program = Program(*torch_layer.compile_pass(name, operands, model.top_k))
            else:
                contraction = CONTRACTIONS[candidate](model, len(operands[1]), factor)
                run = functools.partial(function, top_k=model.top_k, contraction=contraction)
                program = compile_calls(run, operands)
            got = program.result()
            want = got if want is None else want
            error = float(worst_error(got, want))
        except Exception as error:  # a peer may fail in any way, and must not end the run
            if candidate == "pearl":
                raise
            reasons[candidate] = forms.reason(error)
            continue
        if error <= TOLERANCE:
            programs[candidate] = program
        else:
            reasons[candidate] = f"differs from pearl by {error:.1e}, not timed"
    return programs


def measure(programs, rounds, layer) -> list[results.Row]:
    """programs: (form, candidate) -> Program; layer: a line with what they have in common."""
    timings = timing.measure({key: p.burst for key, p in programs.items()}, rounds)
    return [
        results.with_times(layer, timing)._replace(
            form=form,
            candidate=candidate,
            version=results.version(PACKAGES.get(candidate, candidate)),
            gib=round(programs[form, candidate].num_bytes / 2**30, 6),
        )
        for (form, candidate), timing in timings.items()
    ]


def describe(label, model, num_tokens) -> results.Row:
    """What the lines of one layer and number of tokens have in common."""
    return results.start(
        dtype="bfloat16",
        form="forward",
        case=label,
        ep=model.expert_parallel,
        g=model.num_experts // model.expert_parallel,
        k=model.width,
        n=model.intermediate,
        rows=num_tokens,
        grouping="routed",
        layout="gkn",
    )


def run_point(blank, model, layer, candidates, rounds) -> list[results.Row]:
    """Prints the lines of one layer and number of tokens."""
    tokens = random_tokens(layer, blank.rows, model.top_k)
    target = jax.random.normal(jax.random.key(3), tokens.shape, tokens.dtype)
    notes, rows = [], []
    for name in PASSES:
        reasons = {}
        programs = compile_candidates(name, model, (layer, tokens, target), candidates, reasons)
        found = measure({(name, c): p for c, p in programs.items()}, rounds, blank)
        print(line(found, candidates), flush=True)
        notes += [f"# {candidate}, {name}: {why}" for candidate, why in reasons.items()]
        rows += found
        rows += [
            blank._replace(form=name, candidate=candidate, note=why)
            for candidate, why in reasons.items()
        ]
    parts = {
        (name, "pearl"): compile_calls(function, operands, forms.MAX_CALLS)
        for name, (function, operands) in parts_of(layer, tokens, top_k=model.top_k).items()
    }
    found = measure(parts, rounds, blank)
    print("  parts, us: " + ", ".join(f"{r.form} {r.us:.1f}{'*' * r.host_bound}" for r in found))
    print(*notes, sep="\n", end="\n" * bool(notes))
    return rows + found


def header(candidates) -> str:
    ratios = "".join(f"{name + ' x':>11}" for name in candidates[1:])
    gib = "".join(f"{name + ' GiB':>13}" for name in candidates)
    return f"{'layer':<15}{'tokens':>7}  {'pass':<8}{'pearl us':>10}{ratios}{gib}"


def line(rows, candidates) -> str:
    found = {row.candidate: row for row in rows}
    pearl = found["pearl"]
    us = f"{pearl.us:.0f}" + "*" * pearl.host_bound
    ratios = "".join(
        f"{f'{found[c].us / pearl.us:.2f}' + '*' * found[c].host_bound if c in found else '-':>11}"
        for c in candidates[1:]
    )
    gib = "".join(f"{f'{found[c].gib:.2f}' if c in found else '-':>13}" for c in candidates)
    return f"{pearl.case:<15}{pearl.rows:>7}  {pearl.form:<8}{us:>10}{ratios}{gib}"


def scale_down(model) -> shapes.Model:
    """At most 8 experts and 128 columns: a CPU computes it in milliseconds."""
    return dataclasses.replace(
        model,
        width=min(model.width, 128),
        intermediate=min(model.intermediate, 64),
        num_experts=8,
        top_k=min(model.top_k, 4),
        expert_parallel=1,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="scaled down, on the CPU")
    parser.add_argument("--layer", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", help=f"by default {TOKENS}")
    parser.add_argument("--peers", nargs="*", choices=CANDIDATES, default=CANDIDATES)
    parser.add_argument("--rounds", type=int, default=5, help="samples of each candidate")
    parser.add_argument("--csv", metavar="FILE", help="add what is found, and skip what is there")
    options = parser.parse_args(argv)
    token_counts = options.tokens or ((16,) if options.cpu else TOKENS)
    if options.rounds < 1 or min(token_counts) < 1:
        parser.error("--rounds and --tokens must be at least 1")
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        parser.error(f"runs on cpu and gpu, not on {platform}; give --cpu")
    if platform == "cpu" and not options.cpu:
        parser.error("there is no GPU; --cpu runs it scaled down")

    candidates = list(dict.fromkeys(["pearl", *options.peers]))
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, bfloat16, {options.rounds} rounds"
    )
    if platform == "gpu" and (obstacle := library.unavailable()):
        print(f"# pearl runs in plain XLA: {obstacle}")
    print(f"\n{header(candidates)}", flush=True)
    found = results.so_far(options.csv)
    for label in options.layer:
        model = scale_down(LAYERS[label]) if options.cpu else LAYERS[label]
        blanks = [describe(label, model, num_tokens) for num_tokens in token_counts]
        cells = [[b._replace(form=name) for name in PASSES] for b in blanks]
        todo = [c[0] for c in cells if not all(results.holds(found, x, candidates) for x in c)]
        if not todo:
            continue
        layer = random_layer(model)
        for blank in todo:
            blank = blank._replace(date=results.now())
            rows = run_point(blank, model, layer, candidates, options.rounds)
            if options.csv:
                results.append(options.csv, rows)


if __name__ == "__main__":
    main()
