"""Checkpoints of Hugging Face models: the layers, their gradients, and what is refused.

The oracle is data: outputs and gradients of the blocks of transformers. Names and axes of
what has no such data (Kimi-K3, files with a tensor per expert) are written down here again.
"""

import doctest
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.hf_moe_golden import CASES
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from pearl_jax import families, hf
from pearl_jax.expert_parallel import ExpertParallel

with np.load(pathlib.Path(__file__).parent / "data" / "hf_moe_golden.npz") as arrays:
    GOLDEN = dict(arrays)
E, D, F = 8, 16, 12

KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 16,
        "routed_expert_hidden_size": 10,
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.5,
        "latent_moe_use_norm": True,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_hidden_layers": 3,
    },
}
CONFIGS = {name: config for name, (config, _, _) in CASES.items()} | {"kimi_k3": KIMI_K3}
# Names of a tensor per expert: prefix of a layer, gate, up, down.
PER_EXPERT = {
    "mixtral": ("model.layers.{}.block_sparse_moe.", "w1", "w3", "w2"),
    "minimax_m2": ("model.layers.{}.block_sparse_moe.", "w1", "w3", "w2"),
    "kimi_linear": ("model.layers.{}.block_sparse_moe.", "w1", "w3", "w2"),
    "kimi_k3": ("language_model.model.layers.{}.block_sparse_moe.", "w1", "w3", "w2"),
    "deepseek_v4": ("layers.{}.ffn.", "w1", "w3", "w2"),
    "deepseek_v4_hash": ("layers.{}.ffn.", "w1", "w3", "w2"),
}
for name in (
    "qwen3_moe",
    "qwen3_moe_nonorm",
    "qwen3_next",
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
):
    PER_EXPERT[name] = ("model.layers.{}.mlp.", "gate_proj", "up_proj", "down_proj")
ONLY_FUSED = {"gpt_oss", "llama4"}


def golden(name, *kinds):
    """Of a case, the parameters p, buffers b or gradients g."""
    heads = [f"{name}/{kind}/" for kind in kinds]
    return {k.removeprefix(h): x for h in heads for k, x in GOLDEN.items() if k.startswith(h)}


def fused(name):
    """Tensors as transformers 5 has them in memory."""
    if name != "kimi_k3":
        return golden(name, "p", "b")
    shapes = {
        "gate.weight": (8, 16),
        "gate.e_score_correction_bias": (8,),
        "experts.gate_up_proj": (8, 24, 10),
        "experts.down_proj": (8, 10, 12),
        "routed_expert_down_proj.weight": (10, 16),
        "routed_expert_norm.weight": (10,),
        "routed_expert_up_proj.weight": (16, 10),
        "shared_experts.gate_proj.weight": (24, 16),
        "shared_experts.up_proj.weight": (24, 16),
        "shared_experts.down_proj.weight": (16, 24),
    }
    rng = np.random.default_rng(3)
    return {k: 0.3 * rng.standard_normal(s, np.float32) for k, s in shapes.items()}


def per_expert(name, tensors, layer=3):
    """The same as files have them, by the names of a whole model."""
    prefix, gate, up, down = PER_EXPERT[name]
    files = {}
    for key, value in tensors.items():
        if key == "experts.gate_up_proj":
            for i, (g, u) in enumerate(np.split(v, 2) for v in value):
                files[f"experts.{i}.{gate}.weight"] = g
                files[f"experts.{i}.{up}.weight"] = u
        elif key == "experts.down_proj":
            files |= {f"experts.{i}.{down}.weight": d for i, d in enumerate(value)}
        else:
            if name.startswith("deepseek_v4"):
                key = key.replace("e_score_correction_bias", "bias")
                for theirs, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                    key = key.replace(theirs, ours)
            files[key] = value
    return {prefix.format(layer) + key: value for key, value in files.items()}


def assert_equal_bits(got, want):
    assert got.keys() == want.keys()
    for key, array in want.items():
        assert got[key].dtype == array.dtype, key
        assert got[key].flags.c_contiguous, key  # safetensors writes the memory as it lies
        np.testing.assert_array_equal(got[key], array, err_msg=key)


def assert_equal_layers(got, want):
    got, want = (dict(nnx.to_flat_state(nnx.state(layer))) for layer in (got, want))
    assert got.keys() == want.keys()
    for path, variable in want.items():
        assert got[path].dtype == variable.dtype
        np.testing.assert_array_equal(got[path][...], variable[...], err_msg=str(path))


@nnx.jit
def call(layer, tokens):
    with jax.default_matmul_precision("highest"):
        return layer(tokens)


def relative_error(got, want):
    return np.max(np.abs(got - want)) / np.max(np.abs(want))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_of_transformers(name):
    config = CONFIGS[name]
    x, y, dx, ct = (GOLDEN[f"{name}/{key}"] for key in ("x", "y", "dx", "ct"))
    ids = GOLDEN.get(f"{name}/ids")
    layer = hf.load_layer(config, fused(name))

    @nnx.jit
    def grad(layer, x):
        def loss(layer, x):
            out = layer(x, token_ids=ids)
            return jnp.vdot(out, ct), out

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    with jax.default_matmul_precision("highest"):
        grads, out = grad(layer, x)
    errors = {"y": relative_error(out, y), "dx": relative_error(grads[1], dx)}
    want = golden(name, "g")
    got = hf.export_layer(grads[0], config)
    assert got.keys() == want.keys()
    errors |= {key: relative_error(got[key], want[key]) for key in want}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_bit_by_bit(name):
    """Both forms, and both give the same layer."""
    config, tensors = CONFIGS[name], fused(name)
    layer = hf.load_layer(config, tensors)
    assert_equal_bits(hf.export_layer(layer, config), tensors)
    if name in ONLY_FUSED:
        with pytest.raises(ValueError, match=r"forms \['fused'\], got 'per_expert'"):
            hf.export_layer(layer, config, form="per_expert")
        return
    files = per_expert(name, tensors)
    from_files = hf.load_layer(config, files, layer=3)
    assert_equal_layers(from_files, layer)
    prefix = "language_model.model." if name == "kimi_k3" else None
    export = hf.export_layer(from_files, config, form="per_expert", layer=3, prefix=prefix)
    assert_equal_bits(export, files)


def test_latent_experts_kimi_k3():
    """Kimi-K3 in float64 NumPy: the router at full width, experts at that of the latent."""
    tensors = {key: value.astype(np.float64) for key, value in fused("kimi_k3").items()}
    x = np.random.default_rng(0).standard_normal((5, 16))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))

    def situ_mlp(x, gate, up, down):
        gate, up = x @ gate.T, x @ up.T
        return (4 * np.tanh(gate / 4) * sigmoid(gate) * 25 * np.tanh(up / 25)) @ down.T

    shared = [tensors[f"shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down")]
    want = situ_mlp(x, *shared)
    for token, out in zip(x, want):
        scores = sigmoid(tensors["gate.weight"] @ token)
        chosen = np.argsort(-(scores + tensors["gate.e_score_correction_bias"]))[:3]
        latent = tensors["routed_expert_down_proj.weight"] @ token
        routed = sum(
            1.5 * scores[i] / scores[chosen].sum()
            * situ_mlp(latent, *np.split(tensors["experts.gate_up_proj"][i], 2),
                       tensors["experts.down_proj"][i])
            for i in chosen
        )  # fmt: skip
        routed /= np.sqrt(np.mean(routed**2) + 1e-5)
        out += tensors["routed_expert_up_proj.weight"] @ (
            routed * tensors["routed_expert_norm.weight"]
        )
    layer = hf.load_layer(KIMI_K3, fused("kimi_k3"))
    assert layer.gate_up.shape == (8, 10, 2, 12)
    assert relative_error(call(layer, x.astype(np.float32)), want) < 1e-5


@pytest.mark.parametrize("width", [F, 2 * F], ids=["D=F", "D=2F"])
def test_square_weights_are_not_transposed_transformers_47031(width):
    """transformers#47031: shapes told the layout, and square experts came out transposed.

    One expert takes every token, so that the layer is an MLP in NumPy.
    """
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, F, width), np.float32)
    down, x = rng.standard_normal((width, F), np.float32), rng.standard_normal((3, width))
    hidden = x @ gate.T
    want = (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T
    config = {
        "hidden_size": width,
        "intermediate_size": F,
        "moe_intermediate_size": F,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
    }
    zeros = np.zeros((1, width), np.float32)
    qwen, llama = {**config, "model_type": "qwen3_moe"}, {**config, "model_type": "llama4"}
    fused_qwen = {
        "gate.weight": zeros,
        "experts.gate_up_proj": np.concatenate([gate, up])[None],
        "experts.down_proj": down[None],
    }
    fused_llama = {
        "router.weight": zeros,
        "experts.gate_up_proj": np.concatenate([gate.T, up.T], axis=1)[None],
        "experts.down_proj": down.T[None],
        "shared_expert.gate_proj.weight": np.zeros((F, width), np.float32),
        "shared_expert.up_proj.weight": np.zeros((F, width), np.float32),
        "shared_expert.down_proj.weight": np.zeros((width, F), np.float32),
    }
    for layer, scale in (
        (hf.load_layer(qwen, fused_qwen), 1),
        (hf.load_layer(qwen, per_expert("qwen3_moe", fused_qwen), layer=3), 1),
        (hf.load_layer(llama, fused_llama), 2),  # the sigmoid of logits 0 halves the tokens
    ):
        assert relative_error(call(layer, (scale * x).astype(np.float32)), want) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("pop", "gate.weight"), r"missing '{}gate.weight', the router.kernel"),
        (("pop", "experts.5.up_proj.weight"), r"missing '{}experts.5.up_proj.weight'"),
        (("pop", "gate.e_score_correction_bias"), r"missing '{}gate.e_score_correction_bias'"),
        (("pop", "shared_experts.down_proj.weight"), "missing '{}shared_experts.down_proj.weight'"),
        (("add", "experts.8.up_proj.weight", (F, D)), "no use for '{}experts.8.up_proj.weight'"),
        (("add", "experts.gate_up_proj", (E, 2 * F, D)), "no use for '{}experts.0.gate_proj.wei"),
        (("add", "gate.bias", (E,)), "no use for '{}gate.bias'"),
        (("add", "experts.2.up_proj.weight_scale_inv", (1, 1)), "quantised, got '{}experts.2.up_"),
        (("add", "experts.gate_up_proj_blocks", (E, 1)), "quantised, got '{}experts.gate_up_pro"),
        (("add", "experts.3.down_proj.weight_packed", (D, 6)), "quantised, got '{}experts.3.down"),
        (("add", "experts.2.up_proj.weight", (F, D), jnp.float8_e4m3fn), "'{}experts.2.up_proj.w"
         "eight' must not be quantised, got float8_e4m3fn"),
        (("add", "experts.2.up_proj.weight", (F, D), np.int8), "must not be quantised, got int8"),
        (("add", "experts.2.up_proj.weight", (F, D), np.float16), "'{}experts.2.up_proj.weight' m"
         "ust have one dtype, got float32, float16"),
        (("add", "experts.2.up_proj.weight", (D, F)), r"'{}experts.2.up_proj.weight' must be "
         r"\(12, 16\) by the config, got \(16, 12\)"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(change, message):
    config, prefix = CONFIGS["deepseek_v3"], "model.layers.3.mlp."
    tensors = per_expert("deepseek_v3", fused("deepseek_v3"))
    other = {"model.layers.30.mlp.gate.weight": None, "model.layers.3.self_attn.q.weight": None}
    hf.load_layer(config, tensors | other, layer=3)
    action, key, *shape_and_dtype = change
    if action == "pop":
        del tensors[prefix + key]
    else:
        shape, dtype = [*shape_and_dtype, np.float32][:2]
        tensors[prefix + key] = np.zeros(shape, dtype)
    if "one dtype" in message:
        message = message.replace("'{}experts.2", ".*'{}experts.2")
    with pytest.raises(ValueError, match=message.replace("{}", prefix.replace(".", r"\."))):
        hf.load_layer(config, tensors | other, layer=3)


def test_names_of_whole_models():
    config, tensors = CONFIGS["llama4"], fused("llama4")
    want = hf.load_layer(config, tensors)
    for root in ("model.", "language_model.model.", "model.language_model.", ""):
        names = {f"{root}layers.1.feed_forward.{key}": x for key, x in tensors.items()}
        vision = {f"vision_model.model.layers.1.mlp.{key}": None for key in tensors}
        nested = {"model_type": "llama4", "vision_config": {}, "text_config": config}
        assert_equal_layers(hf.load_layer(nested, names | vision, layer=1), want)
    names = {f"mtp.layers.1.feed_forward.{key}": x for key, x in tensors.items()}
    assert_equal_layers(hf.load_layer(config, names, layer=1, prefix="mtp."), want)
    assert hf.export_layer(want, config, layer=1, prefix="mtp.").keys() == names.keys()
    one = {f"block.{key}": x for key, x in tensors.items()}
    assert_equal_layers(hf.load_layer(config, one | names, prefix="block."), want)
    for kwargs in ({"layer": 1}, {"layer": 2, "prefix": "mtp."}):
        with pytest.raises(ValueError, match=r"no name starts with any of .*layers\.\d\.feed_f"):
            hf.load_layer(config, names, **kwargs)


class Counted(dict):
    """A mapping that says which rows of its arrays were read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read = []

    def __getitem__(self, name):
        return CountedArray(name, super().__getitem__(name), self.read)


class CountedArray:
    def __init__(self, name, array, read):
        self.shape, self.dtype = array.shape, array.dtype
        self._name, self._array, self._read = name, array, read

    def __getitem__(self, index):
        self._read.append((self._name, index))
        return self._array[index]


@pytest.mark.parametrize("form", ["fused", "per_expert"])
@pytest.mark.parametrize("data", [1, 2])
def test_a_mesh_gets_its_experts_only(form, data, monkeypatch):
    """Each device is given its own experts, read once; no array ever has all of them."""
    config, tensors = CONFIGS["deepseek_v3"], fused("deepseek_v3")
    want = hf.load_layer(config, tensors)
    if form == "per_expert":
        tensors = per_expert("deepseek_v3", tensors)
    counted = Counted(tensors)
    mesh = jax.make_mesh((data, 4), ("data", "expert"), devices=jax.devices()[: 4 * data])
    made, empty = [], np.empty
    monkeypatch.setattr(np, "empty", lambda s, dtype=float: made.append(s) or empty(s, dtype))
    layer = hf.load_layer(config, counted, layer=3 if form == "per_expert" else None, mesh=mesh)
    assert {tuple(s) for s in made if np.ndim(s) and len(s) > 2} == {
        (2, D, 2, F),
        (2, F, D),
        (D, 2, F),
    }
    assert_equal_layers(layer, want)
    for weights in (layer.gate_up, layer.down):
        assert weights.sharding.spec[0] == "expert"
        shards = {shard.device: shard.data.shape[0] for shard in weights.addressable_shards}
        assert shards == dict.fromkeys(mesh.devices.flat, 2)
    assert layer.router.kernel.sharding.is_fully_replicated
    reads = [read for read in counted.read if "experts." in read[0] and "shared" not in read[0]]
    rows = 2 * E if form == "fused" else 3 * E
    assert len(reads) == len({(name, str(row)) for name, row in reads}) == rows
    if form == "fused":
        assert all(isinstance(row, int) for _, row in reads)


def test_a_mesh_of_experts_and_tensor():
    config, tensors = CONFIGS["gpt_oss"], fused("gpt_oss")
    want = hf.load_layer(config, tensors)
    mesh = jax.make_mesh((2, 2, 2), ("expert", "tensor", "fsdp"))
    parallel = ExpertParallel(mesh)
    layer = hf.load_layer(config, tensors, mesh=mesh, parallel=parallel)
    assert_equal_layers(layer, want)
    specs = parallel.weight_specs
    weights = layer.weights().experts
    assert specs.gate_up == P("expert", "fsdp", None, "tensor")
    for spec, array in zip(specs, weights):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    x = GOLDEN["gpt_oss/x"]
    assert relative_error(call(layer, x), call(want, x)) < 1e-6
    # Any other names, by the rules of Flax.
    mesh = jax.make_mesh((4, 2), ("ep", "rows"))
    with nnx.logical_axis_rules([("expert", "ep"), ("embed", "rows"), ("mlp", None)]):
        layer = hf.load_layer(config, tensors, mesh=mesh)
    assert_equal_layers(layer, want)
    assert layer.gate_up.sharding.spec == P("ep", "rows", None, None)
    assert_equal_bits(hf.export_layer(layer, config), tensors)


def test_dtypes():
    """sglang#38719: the selection bias stays float32; all else is what the checkpoint has."""
    config, tensors = CONFIGS["glm4_moe"], fused("glm4_moe")
    bf16 = {k: x if "bias" in k else x.astype(jnp.bfloat16) for k, x in tensors.items()}
    bf16["gate.weight"] = tensors["gate.weight"]
    layer = hf.load_layer(config, bf16)
    assert layer.gate_up.dtype == layer.shared_down.dtype == jnp.bfloat16
    assert layer.router.kernel.dtype == layer.router.selection_bias.dtype == jnp.float32
    assert_equal_bits(hf.export_layer(layer, config), bf16)
    assert jax.eval_shape(layer, jnp.ones((3, D), jnp.bfloat16)).dtype == jnp.bfloat16

    layer = hf.load_layer(config, tensors, param_dtype=jnp.bfloat16)
    assert layer.router.kernel.dtype == layer.down.dtype == jnp.bfloat16
    np.testing.assert_array_equal(layer.gate_up[...], hf.load_layer(config, bf16).gate_up[...])
    bias = tensors["gate.e_score_correction_bias"]
    np.testing.assert_array_equal(layer.router.selection_bias[...], bias)
    assert layer.router.selection_bias.dtype == jnp.float32
    half = tensors | {"gate.e_score_correction_bias": bias.astype(jnp.bfloat16)}
    assert hf.load_layer(config, half).router.selection_bias.dtype == jnp.float32
    # JAX arrays too.
    on_device = jax.tree.map(jnp.asarray, bf16)
    assert_equal_layers(hf.load_layer(config, on_device), hf.load_layer(config, bf16))


def test_a_checkpoint_may_change_afterwards():
    tensors = {key: array.copy() for key, array in fused("mixtral").items()}
    layer = hf.load_layer(CONFIGS["mixtral"], tensors)
    for array in tensors.values():
        array[...] = np.nan
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nnx.state(layer)))


def test_options_of_the_layer():
    rngs = nnx.Rngs(jitter=1)
    options = {"jitter": 0.1, "dtype": jnp.bfloat16, "rngs": rngs}
    layer = hf.load_layer(CONFIGS["mixtral"], fused("mixtral"), **options)
    first, second = (call(layer, jnp.ones((2, D))) for _ in range(2))
    assert first.dtype == jnp.bfloat16
    assert not np.array_equal(first, second)
    layer.eval()
    first, second = (call(layer, jnp.ones((2, D))) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_exports_that_do_not_fit():
    layer = hf.load_layer(CONFIGS["glm4_moe"], fused("glm4_moe"))
    with pytest.raises(ValueError, match=r"mixtral has no router\.selection_bias"):
        hf.export_layer(layer, CONFIGS["mixtral"])
    wide = CONFIGS["glm4_moe"] | {"moe_intermediate_size": 6}
    with pytest.raises(ValueError, match=r"gate_up must be \(8, 16, 2, 6\) .* \(8, 16, 2, 12\)"):
        hf.export_layer(layer, wide)
    only_experts = nnx.state(layer, lambda path, _: path[-1] == "down")
    down = {"experts.down_proj": fused("glm4_moe")["experts.down_proj"]}
    assert_equal_bits(hf.export_layer(only_experts, CONFIGS["glm4_moe"]), down)


def test_a_model_of_two_files(tmp_path, capsys):
    """safetensors files and their index; dense layers are skipped, and bfloat16 stays."""
    config = CONFIGS["deepseek_v3"] | {"num_hidden_layers": 3, "first_k_dense_replace": 1}
    base = {
        k: x if "bias" in k else x.astype(jnp.bfloat16) for k, x in fused("deepseek_v3").items()
    }
    layers = {i: {k: x * x.dtype.type(i) for k, x in base.items()} for i in (1, 2)}
    files = per_expert("deepseek_v3", layers[1], 1) | per_expert("deepseek_v3", layers[2], 2)
    files["model.layers.0.mlp.gate_proj.weight"] = np.ones((4, 4), np.float32)
    names = sorted(files)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: files[key] for key in keys}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def check(checkpoint):
        assert checkpoint.config == config
        assert checkpoint.keys() == files.keys()
        for i, layer in hf.load_layers(checkpoint.config, checkpoint, progress=False):
            assert_equal_layers(layer, hf.load_layer(config, layers.pop(i)))
        assert not layers

    expected = dict(layers)
    check(hf.Checkpoint(tmp_path))
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    layers = dict(expected)
    check(hf.Checkpoint(tmp_path))
    assert not capsys.readouterr().err
    mesh = jax.make_mesh((8,), ("expert",))
    checkpoint = hf.Checkpoint(tmp_path)
    ((i, layer),) = hf.load_layers(config, checkpoint, layers=[2], mesh=mesh)
    assert i == 2
    assert "MoE layers: 100%" in capsys.readouterr().err
    assert_equal_layers(layer, hf.load_layer(config, expected[2]))
    with pytest.raises(ValueError, match=r"missing 'model\.layers\.0\.mlp\.gate\.weight'"):
        hf.load_layer(config, checkpoint, layer=0)

    one = tmp_path / "one.safetensors"
    exported = hf.export_layer(layer, config)
    save_file(exported, one)
    assert_equal_layers(hf.load_layer(config, hf.Checkpoint(one)), layer)
    save_file({"experts.w": np.zeros(2, np.uint8), "gate.weight": np.zeros((E, D), np.int8)}, one)
    with pytest.raises(ValueError, match=r"missing 'experts\.gate_up_proj'"):
        hf.load_layer(CONFIGS["mixtral"], hf.Checkpoint(one))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="safetensors in"):
        hf.Checkpoint(tmp_path / "empty")


def test_quantised_files(tmp_path):
    tensors = fused("mixtral") | {"gate.weight": np.zeros((E, D), jnp.float8_e4m3fn)}
    save_file(tensors, tmp_path / "fp8.safetensors")
    with pytest.raises(ValueError, match=r"'gate\.weight' must not be quantised, got F8_E4M3"):
        hf.load_layer(CONFIGS["mixtral"], hf.Checkpoint(tmp_path))


@pytest.mark.parametrize("module", [hf, families])
def test_docstrings_run(module):
    assert doctest.testmod(module).failed == 0
