"""Generates text with the model of train_moe.py: a cache of keys and values, fixed shapes.

Prompts of different lengths run as one batch. Two programs are compiled, each once: prefill
reads the prompts, decode adds a byte to every sequence; how the tokens spread over the
experts changes with each step and never compiles anything.

  python examples/serve_moe.py --prompt 'class ' --prompt 'import '
  python examples/serve_moe.py --temperature 0.7 --seed 1
  python examples/serve_moe.py --export build/moe.npz    # and runs it without Flax
  python examples/serve_moe.py --program build/moe.npz   # the same by hand

Of a Hugging Face checkpoint, of which only the MoE layers are known here, it runs each of
them on random hidden states and shows how these spread over the experts:

  python examples/serve_moe.py --hf FOLDER --tokens 512
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pearl_jax import library

# Flax and the model are imported where they are needed: exported programs need neither.

# That the kernels' call means the same in later versions is not a thing jax.export knows.
_KERNEL_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(target) for target in library.TARGETS.values()
]

PROMPTS = ("def ", "class Error(", "import sys\n\n")


class Program:
    """A function compiled once for each set of shapes, and how often that was."""

    def __init__(self, function, **jit_options):
        self.compilations = 0

        def counted(*args):
            self.compilations += 1  # runs while tracing only
            return function(*args)

        self.function, self.compiled = function, jax.jit(counted, **jit_options)

    def __call__(self, *args):
        return self.compiled(*args)

    def serialize(self, *args):
        """(n,) uint8, the program for arguments like these."""
        export = jax.export.export(jax.jit(self.function), disabled_checks=_KERNEL_CALLS)
        return np.frombuffer(export(*args).serialize(), np.uint8)


class Generation(NamedTuple):
    """What came after some prompts.

    Attributes:
      texts: bytes after each prompt.
      loads: (steps, l, e), tokens of each expert; the first step is that of the prompts.
      seconds: of all steps.
    """

    texts: list[bytes]
    loads: np.ndarray
    seconds: float


class Generator:
    """Programs for b sequences of at most capacity bytes; prefill and decode as of moe_lm.py."""

    def __init__(self, prefill, decode, weights, shape):
        self.prefill, self.decode = Program(prefill), Program(decode, donate_argnums=1)
        self.weights, self.shape = weights, shape

    @classmethod
    def of_model(cls, model, num_sequences):
        import moe_lm

        return cls(*moe_lm.programs(model), (num_sequences, model.config.context))

    def inputs(self, prompts, temperature=0.0, seed=0):
        """What prefill takes after the weights; decode takes the last two of it."""
        b, capacity = self.shape
        padded, lengths = np.zeros((b, capacity), np.int32), np.zeros(b, np.int32)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = np.frombuffer(prompt, np.uint8)
            lengths[i] = len(prompt)
        return padded, lengths, np.arange(seed, seed + b, dtype=np.uint32), np.float32(temperature)

    def __call__(self, prompts, num_tokens, temperature=0.0, seed=0) -> Generation:
        """Adds up to num_tokens to each of the prompts, bytes; fewer where capacity ends.

        temperature 0 takes the likeliest byte, 1 draws by the model's probabilities, with
        the seed seed + i for sequence i.
        """
        b, capacity = self.shape
        if not 1 <= len(prompts) <= b:
            raise ValueError(f"needs 1 to {b} prompts, got {len(prompts)}")
        for prompt in prompts:
            if not 1 <= len(prompt) <= capacity:
                raise ValueError(f"a prompt has 1 to {capacity} bytes, got {len(prompt)}")
        start = time.perf_counter()
        *first, seeds, temperature = self.inputs(prompts, temperature, seed)
        state, load = self.prefill(self.weights, *first, seeds, temperature)
        tokens, loads = [state[1]], [load]
        for _ in range(num_tokens - 1):
            state, load = self.decode(self.weights, *state, seeds, temperature)
            tokens.append(state[1])
            loads.append(load)
        rows, loads = np.stack(tokens, axis=1), np.stack(loads)
        seconds = time.perf_counter() - start
        texts = [bytes(row[row >= 0].astype(np.uint8)) for row in rows[: len(prompts)]]
        return Generation(texts, loads, seconds)

    def export(self, path):
        """Writes both programs and the weights, which is all that of_file needs."""
        inputs = self.inputs([])
        state, _ = jax.eval_shape(self.prefill.function, self.weights, *inputs)
        content: dict[str, Any] = {f"weight {i}": np.asarray(w) for i, w in enumerate(self.weights)}
        content["prefill"] = self.prefill.serialize(self.weights, *inputs)
        content["decode"] = self.decode.serialize(self.weights, *state, *inputs[2:])
        content["shape"] = np.array(self.shape)
        with open(path, "wb") as file:
            np.savez(file, **content)

    @classmethod
    def of_file(cls, path):
        """Raises ValueError where export did not write the file."""
        if jax.default_backend() == "gpu":
            library.ensure_registered()
        try:
            with np.load(path) as file:
                prefill, decode = (
                    jax.export.deserialize(bytearray(file[name].tobytes()))
                    for name in ("prefill", "decode")
                )
                count = sum(name.startswith("weight") for name in file)
                weights = [jnp.asarray(file[f"weight {i}"]) for i in range(count)]
                return cls(prefill.call, decode.call, weights, tuple(map(int, file["shape"])))
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no file of --export: {error}") from None


def report(prompts, generation) -> str:
    """A line for each prompt and what follows it."""
    return "\n".join(f"{p.decode()!r} -> {t!r}" for p, t in zip(prompts, generation.texts))


def run_without_flax(path, prompts, options) -> str:
    """The report of the exported programs in a process of their own."""
    command = [sys.executable, __file__, "--program", path, "--tokens", str(options.tokens)]
    command += ["--temperature", str(options.temperature), "--seed", str(options.seed)]
    for prompt in prompts:
        command += ["--prompt", prompt.decode()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"serve_moe: the exported programs failed\n{done.stderr}")
    return done.stdout


def run_layers(folder, num_tokens, seed=0):
    """Yields for each MoE layer of a checkpoint: its number, (e,) load, seconds."""
    from pearl_jax import hf
    from pearl_jax.nn import nnx

    forward = nnx.jit(lambda layer, *args, **kwargs: layer.with_aux(*args, **kwargs))
    checkpoint = hf.Checkpoint(folder)
    keys = jax.random.split(jax.random.key(seed))
    for number, layer in hf.load_layers(checkpoint.config, checkpoint):
        tokens = jax.random.normal(keys[0], (num_tokens, layer.hidden_size), layer.down.dtype)
        inputs = {}
        if layer.router.expert_table is not None:
            vocab_size = layer.router.expert_table.shape[0]
            inputs["token_ids"] = jax.random.randint(keys[1], (num_tokens,), 0, vocab_size)
        jax.block_until_ready(forward(layer, tokens, **inputs))  # the first one compiles
        start = time.perf_counter()
        out = jax.block_until_ready(forward(layer, tokens, **inputs))
        yield number, np.asarray(out.tokens_per_expert), time.perf_counter() - start


def show_layers(folder, num_tokens, seed):
    for number, load, seconds in run_layers(folder, num_tokens, seed):
        print(
            f"layer {number}: {1e3 * seconds:.1f} ms, {np.count_nonzero(load)} of {len(load)} "
            f"experts with tokens, the busiest {load.max() / load.mean():.2f} times the mean"
        )


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run", metavar="DIR", default="build/train_moe", help="of train_moe.py")
    source.add_argument("--program", metavar="FILE", help="written by --export")
    source.add_argument("--hf", metavar="FOLDER", help="with config.json and safetensors files")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given repeatedly")
    parser.add_argument(
        "--tokens", type=int, default=100, help="bytes after each prompt, or hidden states"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", metavar="FILE", help="write the programs, and run them as well")
    options = parser.parse_args(argv)
    if options.tokens < 1 or options.temperature < 0 or options.seed < 0:
        parser.error("--tokens must be at least 1, --temperature and --seed at least 0")
    if options.export and (options.program or options.hf):
        parser.error("--export writes the model of --run")
    return parser, options


def main(argv=None):
    parser, options = parse(argv)
    prompts = [prompt.encode() for prompt in options.prompt or PROMPTS]
    try:
        if options.hf:
            show_layers(options.hf, options.tokens, options.seed)
            return
        if options.program:
            generator = Generator.of_file(options.program)
        else:
            import moe_lm  # and with it Flax

            generator = Generator.of_model(moe_lm.load(options.run), len(prompts))
        generation = generator(prompts, options.tokens, options.temperature, options.seed)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report(prompts, generation))
    loads = generation.loads[generation.loads.any((1, 2))]
    busiest = (loads.max(-1) / loads.mean(-1)).max(-1)
    num_bytes = sum(map(len, generation.texts))
    print(
        f"\n{num_bytes} bytes after {len(prompts)} prompts, {generation.seconds:.1f} s with "
        f"compilation; of a step, the busiest expert had {busiest.min():.1f} to "
        f"{busiest.max():.1f} times the mean load\ncompilations: prefill "
        f"{generator.prefill.compilations}, decode {generator.decode.compilations}"
    )
    if options.program and "flax" in sys.modules:
        raise SystemExit("serve_moe: an exported program should not need flax")
    if options.export:
        generator.export(options.export)
        if report(prompts, generation) not in run_without_flax(options.export, prompts, options):
            raise SystemExit("serve_moe: the exported programs generated another text")
        print(f"{options.export}: the same text, without flax")


if __name__ == "__main__":
    main()
