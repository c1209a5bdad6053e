"""Trains a Mixture-of-Experts language model on the source code of Python's standard library.

Each byte is a token, and takes 2 of 8 experts in every block. Experts are kept busy alike by
a bias on their selection, which the load of each step moves. Checkpoints, a log of every
step and a picture of the loss and of the load of each expert land in a folder.

  python examples/train_moe.py                  # minutes on two cores of a CPU
  python examples/train_moe.py --quick          # less than a minute
  python examples/train_moe.py --resume         # goes on after an interrupted run

On a GPU activations are bfloat16 and the expert matmuls run as kernels. The model is in
moe_lm.py; serve_moe.py generates text from the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import matplotlib
import moe_lm
import numpy as np
import optax
import serve_moe
from flax import nnx
from tqdm import tqdm

STEPS, QUICK_STEPS = 600, 100
# What a run with default settings must reach: steps -> nats per byte of held-out text, and
# the load of the busiest expert over the mean.
LARGEST_LOSS = {STEPS: 1.7, QUICK_STEPS: 2.7}
LARGEST_IMBALANCE = {STEPS: 1.2, QUICK_STEPS: 1.6}
HELD_OUT, NUM_HELD_OUT = 0.05, 64  # share of the text, at its end; pieces of it
WINDOW = 20  # steps over which load and speed are taken
BIAS_RATE, LOSS_WEIGHT, Z_WEIGHT = 0.01, 0.01, 1e-4
SAMPLE, SAMPLE_TEMPERATURE = b"def ", 0.5
NOT_SETTINGS = ("out", "resume", "checkpoint_every")  # they leave the result alone


def read_text(path=None):
    """Bytes (n,) of a file, or of the standard library's modules in the order of their names."""
    if path is None:
        path = sysconfig.get_path("stdlib")
        files = sorted(pathlib.Path(path).glob("*.py"))
    else:
        files = [pathlib.Path(path)]
    text = bytes([moe_lm.END]).join(file.read_bytes() for file in files)
    return np.frombuffer(text, np.uint8)


def split(text, context):
    """-> text to train on, and pieces (NUM_HELD_OUT, context + 1) of what is held out."""
    cut = len(text) - int(HELD_OUT * len(text))
    train, held_out = text[:cut], text[cut:]
    if len(held_out) <= context:
        raise ValueError(
            f"text has {len(text)} bytes; for a context of {context} it needs more than "
            f"{int(context / HELD_OUT)}"
        )
    starts = np.linspace(0, len(held_out) - context - 1, NUM_HELD_OUT, dtype=int)
    return train, np.stack([held_out[start : start + context + 1] for start in starts])


def unigram_loss(train, held_out):
    """Nats per byte where each byte is guessed from how often it occurs."""
    counts = np.bincount(train, minlength=moe_lm.VOCAB_SIZE) + 1
    return float(np.mean(-np.log(counts / counts.sum())[held_out]))


def batch_of_step(text, step, seed, batch, context):
    """Pieces (batch, context + 1); a function of the step, so that a resumed run sees the same."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(text) - context, batch)
    return text[starts[:, None] + np.arange(context + 1)]


def cross_entropy(model, pieces):
    """Nats per byte of pieces (b, s + 1), each byte given those before it; the model's Output."""
    pieces = pieces.astype(jnp.int32)
    out = model(pieces[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(out.logits, pieces[:, 1:])
    return jnp.mean(loss), out


def make_optimizer(model, steps, learning_rate):
    warmup = min(50, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, steps, 0.1 * learning_rate
    )
    return nnx.Optimizer(
        model,
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=_is_matrix),
        ),
        wrt=nnx.Param,
    )


def _is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def make_train_step(balance):
    @nnx.jit
    def train_step(model, optimizer, pieces):
        """-> nats per byte, load (l, e)."""

        def objective(model):
            loss, out = cross_entropy(model, pieces)
            total = loss + Z_WEIGHT * out.z_loss
            if balance == "loss":
                total += LOSS_WEIGHT * out.load_balance_loss
            return total, (loss, out.load)

        grads, (loss, load) = nnx.grad(objective, has_aux=True)(model)
        optimizer.update(model, grads)
        if balance == "bias":
            model.update_selection_bias(load, BIAS_RATE)
        return loss, load

    return train_step


@nnx.jit
def evaluate(model, pieces):
    return cross_entropy(model, pieces)[0]


class Run:
    """A training run in a folder: settings, log.jsonl with a line for each step, checkpoints."""

    def __init__(self, directory, settings, *, resume):
        self.directory = pathlib.Path(directory)
        self.log_path = self.directory / "log.jsonl"
        if resume:
            written = moe_lm.read_settings(self.directory)
            for name, value in settings.items():
                if written.get(name) != value:
                    raise ValueError(
                        f"--resume: the run in {directory} has {name} {written.get(name)}, "
                        f"not {value}"
                    )
            self.log = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        else:
            moe_lm.start(self.directory, settings)
            self.log = []
        self.checkpoints = moe_lm.open_checkpoints(self.directory)
        if resume and self.checkpoints.latest_step() is None:
            raise ValueError(f"--resume: {directory} has no checkpoint")

    def restore(self, model, optimizer) -> int:
        """The number of steps done; the log ends there."""
        step = moe_lm.restore(self.checkpoints, model=model, optimizer=optimizer)
        self.log = self.log[:step]
        return step

    def save(self, model, optimizer):
        """Log first: what it has more than the checkpoint is cut off, less would be missing."""
        self.log_path.write_text("".join(json.dumps(record) + "\n" for record in self.log))
        moe_lm.save(self.checkpoints, len(self.log), model=model, optimizer=optimizer)


def train(run, config, train_text, held_out, options):
    """The model after the last step; run.log has what happened."""
    model = moe_lm.MoELM(config, rngs=nnx.Rngs(options.seed))
    optimizer = make_optimizer(model, options.steps, options.learning_rate)
    done = run.restore(model, optimizer) if options.resume else 0
    train_step = make_train_step(options.balance)
    with tqdm(total=options.steps, initial=done, unit="step", mininterval=0.5) as bar:
        for step in range(done, options.steps):
            start = time.perf_counter()
            pieces = batch_of_step(train_text, step, options.seed, options.batch, config.context)
            loss, load = train_step(model, optimizer, pieces)
            loss, load = float(loss), np.asarray(load).tolist()
            seconds = time.perf_counter() - start
            if not np.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step + 1} is {loss}")
            run.log.append({"loss": loss, "load": load, "seconds": seconds})
            if (step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps:
                run.log[-1]["held_out_loss"] = float(evaluate(model, held_out))
                run.save(model, optimizer)
            bar.set_postfix_str(
                f"loss {loss:.3f}, {speed(run.log, options):,.0f} tokens/s, "
                f"busiest expert {imbalance(run.log[-WINDOW:]).max():.2f}x",
                refresh=False,
            )
            bar.update()
    run.checkpoints.wait_until_finished()
    return model


def imbalance(log):
    """(l,): load of the busiest expert over the mean, of all steps together."""
    load = np.sum([record["load"] for record in log], axis=0)
    return load.max(-1) / load.mean(-1)


def speed(log, options):
    """Tokens per second, by the median of the last steps."""
    seconds = np.median([record["seconds"] for record in log[-WINDOW:]])
    return options.batch * options.context / seconds


def draw(path, log, unigram, title):
    """Loss of each step above, share of the load of each expert of the last block below."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = np.arange(1, len(log) + 1)
    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    top.plot(steps, [record["loss"] for record in log], linewidth=0.8, label="training")
    held_out = [(n, r["held_out_loss"]) for n, r in zip(steps, log) if "held_out_loss" in r]
    top.plot(*zip(*held_out), marker="o", label="held out")
    top.axhline(unigram, color="gray", linewidth=0.8, label="single bytes")
    top.set(ylabel="nats per byte", title=title)
    top.legend()
    load = np.array([record["load"][-1] for record in log])
    bottom.plot(steps, load / load.mean(-1, keepdims=True), linewidth=0.8)
    bottom.axhline(1, color="gray", linewidth=0.8)
    bottom.set(xlabel="step", ylabel="load / mean, experts of the last block")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = jax.default_backend() == "gpu"
    model = moe_lm.Config(dtype="bfloat16" if gpu else "float32")
    for field in dataclasses.fields(model):
        default = getattr(model, field.name)
        choices = ("float32", "bfloat16") if field.name == "dtype" else None
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(default),
            default=default,
            choices=choices,
        )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--quick",
        action="store_const",
        dest="steps",
        const=QUICK_STEPS,
        help=f"--steps {QUICK_STEPS}",
    )
    parser.add_argument("--batch", type=int, default=8, help="pieces of text in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest")
    parser.add_argument(
        "--balance",
        choices=("bias", "loss", "none"),
        default="bias",
        help="what evens out the load",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", metavar="FILE", help="in place of the standard library")
    parser.add_argument("--out", metavar="DIR", default="build/train_moe")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in DIR")
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "learning_rate", "checkpoint_every"):
        if not getattr(options, name) > 0:
            parser.error(
                f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}"
            )
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    return parser, options


def main(argv=None):
    parser, options = parse(argv)
    start = time.perf_counter()
    try:
        names = [field.name for field in dataclasses.fields(moe_lm.Config)]
        config = moe_lm.Config(**{name: getattr(options, name) for name in names})
        train_text, held_out = split(read_text(options.text), config.context)
        settings = {k: v for k, v in vars(options).items() if k not in NOT_SETTINGS}
        run = Run(options.out, settings, resume=options.resume)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        model = train(run, config, train_text, held_out, options)
    except FloatingPointError as error:
        sys.exit(f"train_moe: {error}")
    except KeyboardInterrupt:
        sys.exit("train_moe: interrupted; --resume goes on from the last checkpoint")

    log, unigram = run.log, unigram_loss(train_text, held_out)
    picture = run.directory / "training.png"
    draw(
        picture, log, unigram, f"{options.steps} steps of {options.batch} x {config.context} bytes"
    )
    sample = serve_moe.Generator.of_model(model, 1)([SAMPLE], config.context, SAMPLE_TEMPERATURE)
    loss, worst = log[-1]["held_out_loss"], imbalance(log[-WINDOW:]).max()
    print(
        f"\n{SAMPLE.decode()}{sample.texts[0].decode(errors='replace')}\n\n"
        f"held-out text   {loss:.3f} nats per byte; by the frequency of bytes {unigram:.3f}\n"
        f"busiest expert  {worst:.2f} times the mean load; in the first steps "
        f"{imbalance(log[:WINDOW]).max():.2f}\n"
        f"speed           {speed(log, options):,.0f} tokens/s, {jax.default_backend()}\n"
        f"time            {time.perf_counter() - start:.0f} s; picture: {picture}"
    )
    usual = {name: parser.get_default(name) for name in settings} | {"seed": options.seed}
    if settings == usual | {"steps": options.steps}:
        check(options.steps, loss, worst)


def check(steps, loss, worst):
    """Ends with an error where a run with default settings fell short."""
    for name, value, largest in (
        ("the loss of the held-out text", loss, LARGEST_LOSS.get(steps)),
        ("the load of the busiest expert over the mean", worst, LARGEST_IMBALANCE.get(steps)),
    ):
        if largest is not None and not value <= largest:
            sys.exit(f"train_moe: {name} is {value:.3f}, above {largest}")


if __name__ == "__main__":
    main()
