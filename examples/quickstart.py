"""An MoE layer on real text: routing, expert matmuls and their gradients with pearl_jax.

The text is the source code of Python's own standard library, which every machine has.
Each byte is a token; a router sends it to 2 of 16 experts, which run forward and backward
as grouped matmuls. Every result is checked against plain numpy in float64, and timed
beside the same layer on jax.lax.ragged_dot.

  python examples/quickstart.py --tokens 4096
"""

import argparse
import functools
import pathlib
import statistics
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np

import pearl_jax

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 128, 256, 16, 2
CONTEXT = 4  # bytes that a token sees
MAX_TOKENS, LARGEST_ERROR, ROUNDS = 16384, 1e-5, 5


def read_stdlib(num_bytes):
    """The first num_bytes of the standard library's source files, in the order of their names."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files)[:num_bytes]
    if len(data) < num_bytes:
        sys.exit(f"quickstart: the standard library has {len(data)} bytes, {num_bytes} are needed")
    return np.frombuffer(data, np.uint8)


def embed(data, embedding):
    """data (t + CONTEXT,) bytes -> tokens (t, d), nearer bytes weigh more; next bytes (t, d)."""
    seen = (0.5**i * embedding[data[CONTEXT - 1 - i : -1 - i]] for i in range(CONTEXT))
    return sum(seen), embedding[data[CONTEXT:]]


@jax.jit
def route(tokens, router):
    """tokens (t, d) -> group_sizes (e,); token and weight (2t,) of each row, sorted by expert."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(tokens @ router), TOP_K)
    order = jnp.argsort(experts.ravel())
    group_sizes = jnp.bincount(experts.ravel(), length=NUM_EXPERTS)
    return group_sizes, order // TOP_K, weights.ravel()[order]


def loss(matmul, gate_up, down, tokens, routing, target):
    """The layer with any matmul, (t, d) -> (t, d), as its distance to target; both products."""
    group_sizes, token, weight = routing
    gate_up_out = matmul(tokens[token], gate_up, group_sizes)  # (2t, d) x (e, d, 2f)
    gate, up = jnp.split(gate_up_out, 2, axis=-1)
    down_out = matmul(jax.nn.silu(gate) * up, down, group_sizes)  # (2t, f) x (e, f, d)
    out = jnp.zeros_like(tokens).at[token].add(weight[:, None] * down_out)
    return jnp.sum((out - target) ** 2) / (2 * len(target)), (gate_up_out, down_out)


def numpy_moe(gate_up, down, tokens, target, rows, token, weight):
    """Products and gradients of the same layer in float64; rows lists each expert's rows."""
    gate_up_out = np.concatenate([tokens[token[r]] @ w for r, w in zip(rows, gate_up)])
    gate, up = np.split(gate_up_out, 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    hidden = gate * sigmoid * up
    down_out = np.concatenate([hidden[r] @ w for r, w in zip(rows, down)])
    out, d_tokens = np.zeros_like(tokens), np.zeros_like(tokens)
    np.add.at(out, token, weight[:, None] * down_out)
    d_down_out = weight[:, None] * ((out - target) / len(target))[token]
    d_down = np.stack([hidden[r].T @ d_down_out[r] for r in rows])
    d_hidden = np.concatenate([d_down_out[r] @ w.T for r, w in zip(rows, down)])
    d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_gate_up_out = np.concatenate([d_gate, d_hidden * gate * sigmoid], axis=-1)
    d_gate_up = np.stack([tokens[token[r]].T @ d_gate_up_out[r] for r in rows])
    d_rows = np.concatenate([d_gate_up_out[r] @ w.T for r, w in zip(rows, gate_up)])
    np.add.at(d_tokens, token, d_rows)
    return gate_up_out, down_out, d_gate_up, d_down, d_tokens


def relative_error(got, want):
    """Norm of the difference over the norm of want; where want is 0, got must be exactly 0."""
    difference = np.linalg.norm(got - want)
    return difference / max(np.linalg.norm(want), 1e-300) if difference else 0.0


def print_row(expert, rows, errors):
    print(f"{expert:>6}{rows:>7}" + "".join(f"{error:>11.1e}" for error in errors))


def median_ms(functions, *args):
    """Median time of each function, called in turn so that all see the same machine."""
    times = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, taken in zip(functions, times):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, metavar="N")
    num_tokens = parser.parse_args().tokens
    if not 1 <= num_tokens <= MAX_TOKENS:
        parser.error(f"--tokens must be between 1 and {MAX_TOKENS}, got {num_tokens}")
    jax.config.update("jax_default_matmul_precision", "highest")  # also on a GPU

    keys = jax.random.split(jax.random.key(0), 4)
    embedding = jax.random.normal(keys[0], (256, HIDDEN))
    router = jax.random.normal(keys[1], (HIDDEN, NUM_EXPERTS)) / HIDDEN**0.5
    gate_up = jax.random.normal(keys[2], (NUM_EXPERTS, HIDDEN, 2 * INTERMEDIATE)) / HIDDEN**0.5
    down = jax.random.normal(keys[3], (NUM_EXPERTS, INTERMEDIATE, HIDDEN)) / INTERMEDIATE**0.5
    tokens, target = embed(read_stdlib(num_tokens + CONTEXT), embedding)
    routing = route(tokens, router)
    args = (gate_up, down, tokens, routing, target)
    gradient = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
    forward, forward_backward = (
        [jax.jit(functools.partial(f, m)) for m in (pearl_jax.grouped_matmul, jax.lax.ragged_dot)]
        for f in (loss, gradient)
    )

    (_, products), gradients = forward_backward[0](*args)
    got = [np.asarray(x, np.float64) for x in (*products, *gradients)]
    group_sizes, token, weight = (np.asarray(x) for x in routing)
    rows = np.split(np.arange(len(token)), np.cumsum(group_sizes)[:-1])
    exact = (np.asarray(x, np.float64) for x in (gate_up, down, tokens, target))
    want = numpy_moe(*exact, rows=rows, token=token, weight=weight)
    print(f"{num_tokens} tokens, {TOP_K} of {NUM_EXPERTS} experts each; relative errors:\n")
    print("expert   rows    gate_up       down  d gate_up     d down   d tokens")
    worst = np.zeros(5)
    for e, r in enumerate(rows):
        parts = (r, r, e, e, token[r])  # of the products, of the weights, of the tokens
        errors = [relative_error(g[part], w[part]) for g, w, part in zip(got, want, parts)]
        print_row(e, len(r), errors)
        worst = np.maximum(worst, np.asarray(errors))
    print_row("worst", len(token), worst)
    if not worst.max() <= LARGEST_ERROR:
        sys.exit(f"quickstart: a relative error is {worst.max():.1e}, above {LARGEST_ERROR:.0e}")

    print(f"\n{jax.default_backend()}: XLA reference")
    print("median ms         pearl_jax  ragged_dot   ratio")
    for name, functions in (("forward", forward), ("forward+backward", forward_backward)):
        jax.block_until_ready([function(*args) for function in functions])  # compiles
        ours, theirs = median_ms(functions, *args)
        print(f"{name:<17}{ours:>10.1f}{theirs:>12.1f}{theirs / ours:>7.1f}x")


if __name__ == "__main__":
    main()
