"""The routed experts of a layer over the devices of one host: every strategy, and its exchanges.

  python -m benchmarks.expert_parallel --csv layers.csv
  python -m benchmarks.expert_parallel --tokens 64 512 --strategies gather all_to_all,capacity=1
  python -m benchmarks.expert_parallel --cpu     # scaled down: shows that it runs

GLM-5.3 in bfloat16, its experts spread over all devices, random tokens and routing. A strategy
may have options of ExpertParallel after commas. Columns, for each number of tokens of a device and
each strategy: microseconds of the forward pass and of a step (forward, with gradients for tokens
and experts); GiB of operands, results and scratch that each of them needs at once on a device, as
compiled; microseconds of the exchanges of a forward pass alone, compiled without what lies
between them, and their share of it; how many times longer these take than two dense all_to_all
of one device's tokens, the same bytes as slots without a capacity; how many times longer the
forward pass takes than on one device with all experts and its own tokens (1: the devices together
are as fast as that many alone). A strategy with options has no exchanges of its own.

A strategy whose result differs from that of one device is not timed, and said so; but with a
capacity as many tokens may differ as choices of experts were left out, and it says how many.
Files are those of benchmarks.grouped_matmul, and may be the same one.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import forms, moe_layer, report, results, shapes
from pearl_jax import moe, routing
from pearl_jax.expert_parallel import ExpertParallel

TOKENS = (64, 512, 4096, 32768)
STRATEGIES = (
    "replicate",
    "gather",
    "all_to_all",
    "all_to_all,capacity=1.25",
    "all_to_all,micro_batches=2",
    "ragged",
)
ALONE, DENSE = "alone", "dense"  # one device; two dense all_to_all
FORMS = report.EXPERT_PARALLEL


def parse(strategy, mesh) -> ExpertParallel:
    """ "all_to_all,capacity=1.25" -> ExpertParallel(mesh, strategy="all_to_all", capacity=1.25)."""
    name, *options = strategy.split(",")
    values = {key: ast.literal_eval(value) for key, value in (o.split("=") for o in options)}
    return ExpertParallel(mesh, strategy=name, **values)


def forward(apply_experts, tokens, routed, experts):
    """The sums of the experts' outputs, and how many choices of experts were left out."""
    out, _, dropped = apply_experts(tokens, routed, experts)
    return out.astype(tokens.dtype), dropped


def step(apply_experts, tokens, routed, experts):
    def loss(tokens, experts):
        out, _ = forward(apply_experts, tokens, routed, experts)
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


@jax.jit
def num_wrong(got, want):
    """How many tokens of got differ by more than what rounding does."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    difference, norm = (jnp.linalg.norm(x, axis=1) for x in (got - want, want))
    return jnp.sum(~(difference <= moe_layer.TOLERANCE * norm))


def compile_strategy(strategy, ep, operands, want):
    """Its programs by form and candidate, and a note of what it left out.

    operands: tokens, routing and experts, placed for ep; want: what one device makes of the
    first tokens. Absent is raised where more tokens differ from it than choices were left out.
    """
    name, choices = strategy.replace(",", " "), operands[1].experts.size
    programs = {
        (form, name): moe_layer.compile_calls(functools.partial(function, ep), operands)
        for form, function in zip(FORMS, (forward, step))
    }
    [(got, dropped)] = programs[FORMS[0], name].burst.start(1)
    wrong = int(num_wrong(jax.device_put(got[: len(want)], want.device), want))
    left_out = f"{int(dropped)} of {choices} choices left out" if dropped else ""
    if wrong > dropped:
        differ = f"{wrong} of {len(want)} tokens differ from one device, not timed"
        raise forms.Absent(", ".join(filter(None, (differ, left_out))))
    return programs, left_out


def run_point(blank, model, mesh, experts, strategies, rounds) -> list[results.Row]:
    """Prints the lines of one number of tokens of a device."""
    alone, sharded = experts
    tokens, routed = make_problem(model, mesh.size * blank.rows)
    own = *jax.tree.map(lambda x: x[: blank.rows], (tokens, routed)), alone
    one = moe_layer.compile_calls(functools.partial(forward, moe.apply_experts), own)
    [(want, _)] = one.burst.start(1)
    programs, notes = {(FORMS[0], ALONE): one}, {}
    for strategy in (DENSE, *strategies):
        ep = parse("all_to_all" if strategy == DENSE else strategy, mesh)
        spec = NamedSharding(mesh, ep.token_spec)
        operands = *jax.device_put((tokens, routed), spec), sharded
        try:
            if strategy in (DENSE, "replicate", "gather", "all_to_all"):
                moved = moe_layer.compile_calls(functools.partial(exchanges, ep), operands[:1])
                programs[FORMS[2], strategy] = moved
            if strategy != DENSE:
                found, note = compile_strategy(strategy, ep, operands, want)
                programs |= found
                notes |= {key: note for key in found if note}
        except Exception as error:  # out of memory, or not implemented: the others go on
            name = strategy.replace(",", " ")
            notes |= {(form, name): forms.reason(error) for form in FORMS[:2]}
    rows = [
        row._replace(note=notes.pop((row.form, row.candidate), ""))
        for row in moe_layer.measure(programs, rounds, blank)
    ]
    rows += [
        blank._replace(form=form, candidate=name, note=note) for (form, name), note in notes.items()
    ]
    print(*lines(rows), sep="\n", flush=True)
    return rows


HEADER = (
    "tokens  strategy                      forward     GiB      step     GiB"
    " exchanges  share  of dense  of alone"
)


def lines(rows):
    """Text for the lines of a number of tokens, which were timed in turn."""
    timed = {(row.form, row.candidate): row for row in rows if row.timed}
    one, dense = timed[FORMS[0], ALONE].us, timed[FORMS[2], DENSE].us
    for (form, name), whole in timed.items():
        if form != FORMS[0]:
            continue
        step, moved = (timed.get((form, name)) for form in FORMS[1:])
        yield (
            f"{whole.rows:>6}  {name:<27}{whole.us:>10.0f}{whole.gib:>8.2f}"
            + (f"{step.us:>10.0f}{step.gib:>8.2f}" if step else " " * 18)
            + (
                f"{moved.us:>10.0f}{100 * moved.us / whole.us:>6.0f}%{moved.us / dense:>9.2f}x"
                if moved
                else " " * 27
            )
            + f"{whole.us / one:>9.2f}x"
        )
    for row in rows:
        if row.note and row.form == FORMS[0]:
            yield f"# {row.candidate}, {row.rows} tokens: {row.note}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="scaled down, on 4 CPU devices")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"of a device, by default {TOKENS}")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME[,OPTION=X]")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each strategy")
    parser.add_argument("--csv", metavar="FILE", help="add what is found, and skip what is there")
    options = parser.parse_args(argv)
    token_counts = options.tokens or ((16,) if options.cpu else TOKENS)
    if options.rounds < 1 or min(token_counts) < 1:
        parser.error("--rounds and --tokens must be at least 1")
    label = "GLM-5.3"
    model = shapes.MODELS[label]
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        model = moe_layer.scale_down(model)
    n = jax.device_count()
    if n < 2:
        parser.error("needs two devices or more; give --cpu")
    mesh = jax.make_mesh((n,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    for strategy in options.strategies:
        try:
            parse(strategy, mesh)
        except (TypeError, ValueError, SyntaxError) as error:
            parser.error(f"--strategies {strategy}: {error}")

    print(f"jax {jax.__version__}, {n} x {jax.devices()[0].device_kind}, {model}")
    print(f"\n{HEADER}", flush=True)
    model = dataclasses.replace(model, expert_parallel=n)
    blanks = [moe_layer.describe(label, model, t)._replace(form=FORMS[0]) for t in token_counts]
    wanted = {ALONE, *(strategy.replace(",", " ") for strategy in options.strategies)}
    found = results.so_far(options.csv)
    todo = [b for b in blanks if not wanted <= {r.candidate for r in found if r.cell == b.cell}]
    if not todo:
        return
    alone = moe_layer.random_layer(dataclasses.replace(model, expert_parallel=1)).experts
    experts = alone, jax.device_put(alone, NamedSharding(mesh, P("expert")))
    for blank in todo:
        blank = blank._replace(date=results.now())
        rows = run_point(blank, model, mesh, experts, options.strategies, options.rounds)
        if options.csv:
            results.append(options.csv, rows)


if __name__ == "__main__":
    main()
