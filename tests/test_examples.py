"""The examples: a tiny run of training, what it resumes to, and text from its checkpoint."""

import contextlib
import io
import json
import math
import shutil
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import moe_lm
import serve_moe
import train_moe

STEPS, HALF, CONTEXT = 60, 30, 32
TINY = {"hidden": 32, "heads": 2, "experts": 4, "intermediate": 16, "batch": 4, "context": CONTEXT}
TINY |= {"steps": STEPS, "checkpoint-every": HALF}
PROMPTS = [b"def f1(x", b"return ", b"def f2(x):\n    ret"]
ADDED = 12  # bytes


def call(main, *argv):
    """What it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(map(str, argv)))
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    digits = np.random.default_rng(0).integers(0, 10, 2000)
    text = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in digits)
    (folder / "text.py").write_text(text)
    argv = [word for name, value in TINY.items() for word in (f"--{name}", value)]
    argv += ["--text", folder / "text.py", "--out", folder / "run"]
    printed = call(train_moe.main, *argv)
    run = folder / "run"
    model = moe_lm.load(run)
    return types.SimpleNamespace(argv=argv, printed=printed, run=run, model=model)


def read_log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_training_learns_and_evens_out_the_load(trained):
    log = read_log(trained.run)
    assert len(log) == STEPS
    train_text, held_out = train_moe.split(train_moe.read_text(trained.argv[-3]), CONTEXT)
    unigram = train_moe.unigram_loss(train_text, held_out)
    assert log[-1]["held_out_loss"] < 0.6 * unigram
    first, last = (train_moe.imbalance(part).max() for part in (log[:20], log[-20:]))
    assert last < first
    assert last < 1.5
    assert f"{log[-1]['held_out_loss']:.3f} nats per byte" in trained.printed
    assert (trained.run / "training.png").stat().st_size > 10_000


def test_a_resumed_run_has_the_same_bits(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    call(train_moe.main, *trained.argv[:-1], run, "--resume")
    whole, resumed = read_log(trained.run), read_log(run)
    for name in ("loss", "load", "held_out_loss"):
        assert [r.get(name) for r in resumed] == [r.get(name) for r in whole]
    assert [r["seconds"] for r in resumed[:HALF]] == [r["seconds"] for r in whole[:HALF]]
    assert resumed[-1]["seconds"] != whole[-1]["seconds"]
    want, got = (jax.tree.leaves(moe_lm.programs(m)[2]) for m in (trained.model, moe_lm.load(run)))
    for w, g in zip(want, got, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.fixture(scope="module")
def pieces(trained):
    return train_moe.split(train_moe.read_text(trained.argv[-3]), CONTEXT)[1][:3, :CONTEXT]


@pytest.fixture(scope="module")
def forward(trained):
    """Of the trained model, compiled."""
    return jax.jit(lambda *args, **kwargs: trained.model(*args, **kwargs))


@pytest.fixture(scope="module")
def generator(trained):
    return serve_moe.Generator.of_model(trained.model, 4)


def test_steps_with_caches_equal_the_whole(forward, pieces):
    """Each sequence from its own position on, with garbage where nothing was written yet."""
    tokens, lengths = jnp.asarray(pieces, jnp.int32), jnp.array([1, 7, 20])
    want = forward(tokens)
    valid = jnp.arange(CONTEXT) < lengths[:, None]
    out = forward(jnp.where(valid, tokens, 77), token_mask=valid)
    assert out.load.sum(-1).tolist() == [2 * 28] * 2
    np.testing.assert_allclose(out.logits[2, :20], want.logits[2, :20], rtol=0, atol=2e-5)
    caches = [
        tuple(jnp.where(valid[:, :, None, None], x, 1e4) for x in cache) for cache in out.caches
    ]
    for _ in range(CONTEXT - 20):
        one = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
        out = forward(one, positions=lengths[:, None], caches=caches)
        expected = jnp.take_along_axis(want.logits, lengths[:, None, None], axis=1)
        np.testing.assert_allclose(out.logits, expected, rtol=0, atol=2e-5)
        caches, lengths = out.caches, lengths + 1


def greedy(forward, prompt, num_tokens):
    """By the whole forward pass for every byte; the model is causal."""
    text = np.zeros((1, CONTEXT), np.int32)
    text[0, : len(prompt)] = list(prompt)
    for n in range(len(prompt), len(prompt) + num_tokens):
        text[0, n] = np.argmax(forward(text).logits[0, n - 1])
    return bytes(text[0, len(prompt) : n + 1].astype(np.uint8))


def test_a_batch_is_what_its_prompts_are_one_by_one(trained, forward, generator):
    texts = generator(PROMPTS, ADDED).texts
    assert texts == [greedy(forward, prompt, ADDED) for prompt in PROMPTS]
    assert len(set(texts)) == len(texts)
    texts = generator(PROMPTS, ADDED, temperature=1.0, seed=5).texts
    single = serve_moe.Generator.of_model(trained.model, 1)
    for i, prompt in enumerate(PROMPTS):
        assert single([prompt], ADDED, temperature=1.0, seed=5 + i).texts == [texts[i]]
    assert generator(PROMPTS, ADDED, temperature=1.0, seed=6).texts != texts


def test_nothing_compiles_anew_as_the_load_changes(generator):
    generations = [generator(PROMPTS[i:], ADDED) for i in range(3)]
    loads = generations[0].loads
    assert len(np.unique(loads[1:], axis=0)) > 3
    # An unused sequence and padding are in no load; every other token is in each layer twice.
    assert loads.sum(-1).tolist() == [[2 * sum(map(len, PROMPTS))] * 2] + [[6, 6]] * (ADDED - 1)
    assert generations[2].loads[1:].sum(-1).tolist() == [[2, 2]] * (ADDED - 1)
    for program in (generator.prefill, generator.decode):
        assert program.compilations == 1
        assert program.compiled._cache_size() == 1


def test_a_sequence_ends_where_the_context_does(generator):
    full, short = generator([b"x" * CONTEXT, b"x" * (CONTEXT - 3)], 10, temperature=1.0).texts
    assert (len(full), len(short)) == (1, 4)


def test_bytes_are_drawn_by_their_probabilities():
    logits = (
        jnp.full((20_000, moe_lm.VOCAB_SIZE), -1e9).at[:, [0, 7, 9]].set(jnp.array([0, 1, 2.0]))
    )
    seeds = jnp.arange(len(logits), dtype=jnp.uint32)
    choose = jax.jit(moe_lm._choose)
    for temperature in (0.5, 1.0):
        tokens = choose(logits, 0 * seeds, seeds, temperature)
        values, counts = np.unique(tokens, return_counts=True)
        want = np.exp(np.array([0, 1, 2]) / temperature)
        want /= want.sum()
        assert values.tolist() == [-1, 7, 9]  # END is 0
        sigma = np.sqrt(want * (1 - want) / len(logits))
        assert np.all(np.abs(counts / len(logits) - want) < 4 * sigma)
    assert np.all(choose(logits, 0 * seeds, seeds, 0.0) == 9)


def test_exported_programs_run_without_flax(trained, tmp_path):
    path = tmp_path / "moe.npz"
    argv = ["--tokens", ADDED, "--temperature", 0.5]
    argv += [word for prompt in PROMPTS for word in ("--prompt", prompt.decode())]
    printed = call(serve_moe.main, "--run", trained.run, "--export", path, *argv)
    assert f"{path}: the same text, without flax" in printed
    assert "compilations: prefill 1, decode 1" in printed
    # Here flax has been imported, which the process of its own must not.
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        pytest.raises(SystemExit, match="should not need flax"),
    ):
        serve_moe.main(["--program", str(path), *map(str, argv)])
    lines = len(PROMPTS)
    assert out.getvalue().splitlines()[:lines] == printed.splitlines()[:lines]


def test_bfloat16_stays_near(trained, forward, pieces):
    model = moe_lm.load(trained.run, dtype="bfloat16")
    want, got = forward(pieces).logits, jax.jit(lambda tokens: model(tokens).logits)(pieces)
    assert got.dtype == jnp.float32
    assert 1e-4 < jnp.linalg.norm(got - want) / jnp.linalg.norm(want) < 5e-2


def test_imbalance_is_of_all_steps_together():
    log = [{"load": [[4, 0], [1, 3]]}, {"load": [[0, 4], [3, 3]]}]
    assert train_moe.imbalance(log).tolist() == [1.0, 1.2]


def test_text_is_held_out_at_its_end():
    text = np.arange(2000) % 251
    train_text, held_out = train_moe.split(text, 16)
    assert len(train_text) == 1900
    assert held_out.shape == (train_moe.NUM_HELD_OUT, 17)
    np.testing.assert_array_equal(held_out[0], text[1900:1917])
    np.testing.assert_array_equal(held_out[-1], text[-17:])
    counts = (np.bincount(train_text, minlength=256) + 1) / 2156
    want = -np.mean([math.log(counts[b]) for b in held_out.ravel()])
    assert train_moe.unigram_loss(train_text, held_out) == pytest.approx(want)
    batches = [train_moe.batch_of_step(text, step, 0, 5, 16) for step in (3, 3, 4)]
    np.testing.assert_array_equal(batches[0], batches[1])
    assert (batches[0] != batches[2]).any()
    assert (np.diff(batches[0]) % 251 == 1).all()


def test_a_run_that_fell_short_fails():
    steps = train_moe.QUICK_STEPS
    loss, load = train_moe.LARGEST_LOSS[steps], train_moe.LARGEST_IMBALANCE[steps]
    train_moe.check(steps, loss, load)
    for bad in ((loss + 0.01, load), (loss, load + 0.01), (math.nan, load)):
        with pytest.raises(SystemExit, match="above"):
            train_moe.check(steps, *bad)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps must be above 0, got 0"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0, got nan"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--hidden", "36", "--heads", "4"], "hidden must be a multiple of twice the heads"),
        (["--top-k", "9"], "top_k must be at most experts, got 9 of 8"),
        (["--text", "absent.txt"], "No such file or directory: 'absent.txt'"),
        (["--text", __file__, "--context", "4096"], "for a context of 4096 it needs more than"),
        (["--resume"], "train_moe.json is missing; train_moe.py writes it"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments_of_training(argv, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        train_moe.main([*argv, "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_other_things_is_left_alone(capsys, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SystemExit):
        train_moe.main(["--out", str(tmp_path)])
    assert "is not empty, and of no earlier run" in capsys.readouterr().err
    assert (tmp_path / "checkpoints").exists()


def test_only_the_same_run_is_resumed(trained, capsys):
    with pytest.raises(SystemExit):
        train_moe.main([*map(str, trained.argv), "--resume", "--seed", "3"])
    assert "has seed 0, not 3" in capsys.readouterr().err


def test_layers_of_a_checkpoint_show_their_load(tmp_path, rng):
    config = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 8}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, routers = {}, rng.standard_normal((2, 4, 16), np.float32)
    for layer, router in enumerate(routers):
        head = f"model.layers.{layer}.block_sparse_moe."
        tensors[f"{head}gate.weight"] = router
        for e in range(4):
            for name, shape in (("w1", (8, 16)), ("w2", (16, 8)), ("w3", (8, 16))):
                tensors[f"{head}experts.{e}.{name}.weight"] = np.ones(shape, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = np.asarray(jax.random.normal(jax.random.split(jax.random.key(3))[0], (50, 16)))
    found = {number: load for number, load, _ in serve_moe.run_layers(tmp_path, 50, seed=3)}
    assert [*found] == [0, 1]
    for router, load in zip(routers, found.values()):
        chosen = np.argsort(tokens @ router.T)[:, 2:]
        assert load.tolist() == np.bincount(chosen.ravel(), minlength=4).tolist()
    printed = call(serve_moe.main, "--hf", tmp_path, "--tokens", 50, "--seed", 3)
    ratio = found[1].max() / 25
    assert f"4 of 4 experts with tokens, the busiest {ratio:.2f} times the mean" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", ""], "a prompt has 1 to 32 bytes, got 0"),
        (["--prompt", "x" * 33], "a prompt has 1 to 32 bytes, got 33"),
        (["--run", "absent"], "train_moe.json is missing; train_moe.py writes it"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--program", __file__], "is no file of --export"),
        (["--program", "x", "--export", "y"], "--export writes the model of --run"),
        (["--hf", "absent"], "No such file or directory: absent"),
    ],
)
def test_bad_arguments_of_serving(argv, message, trained, capsys):
    if not {"--run", "--program", "--hf"} & {*argv}:
        argv = [*argv, "--run", str(trained.run)]
    with pytest.raises(SystemExit) as caught:
        serve_moe.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
