"""What a config.json says of a layer: its arguments, its sizes, and which layers are MoE."""

import pytest
from flax import nnx
from test_hf import CONFIGS, KIMI_K3

from pearl_jax import families, hf, nn
from pearl_jax.routing import RouterConfig


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type is one of .*'mixtral'.*, got 'bert'"),
        ({"num_local_experts": None}, "mixtral has no num_local_experts or num_experts or n_rou"),
        ({"num_experts": 4}, "mean the same but differ: {'num_local_experts': 8, 'num_experts'"),
        ({"hidden_act": "tanh"}, "hidden_act is one of .*, got 'tanh'"),
        ({"scoring_func": "tanh"}, "score is one of .*, got 'tanh'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702, got 1.0"),
    ],
)
def test_configs_that_are_not_understood(change, message):
    with pytest.raises(ValueError, match=message):
        hf.layer_arguments(CONFIGS["mixtral"] | change)
    assert hf.layer_arguments(CONFIGS["mixtral"] | {"num_experts": 8})


@pytest.mark.parametrize(
    ("model_type", "want", "limit"),
    [
        ("mixtral", RouterConfig(64, 8), None),
        ("qwen3_moe", RouterConfig(64, 8, normalize=False), None),
        ("qwen3_next", RouterConfig(64, 8), None),
        ("deepseek_v3", RouterConfig(64, 8, "sigmoid", True, 2.5, 8, 4), None),
        ("glm4_moe", RouterConfig(64, 8, "sigmoid"), None),
        ("glm_moe_dsa", RouterConfig(64, 8, "sigmoid", scaling_factor=2.5), None),
        ("minimax_m2", RouterConfig(64, 8, "sigmoid"), None),
        ("gpt_oss", RouterConfig(64, 8), 7.0),
        ("llama4", RouterConfig(64, 8, "sigmoid", False, weight_input=True), None),
        ("deepseek_v4", RouterConfig(64, 8, "sqrt_softplus", scaling_factor=1.5), 10.0),
    ],
)
def test_defaults_of_transformers(model_type, want, limit):
    """What the config classes assume where config.json has no key, or null."""
    config = {
        "model_type": model_type,
        "hidden_size": 16,
        "intermediate_size": 12,
        "moe_intermediate_size": 12,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "n_group": None,
    }
    arguments = hf.layer_arguments(config)
    assert arguments["router"] == want
    assert arguments["activation"].limit == limit


REAL = {
    "GLM-5": (
        {"model_type": "glm_moe_dsa", "hidden_size": 6144, "moe_intermediate_size": 2048,
         "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
         "moe_layer_freq": 1, "num_hidden_layers": 78},
        {"gate_up": (256, 6144, 2, 2048), "down": (256, 2048, 6144), "router.kernel": (6144, 256),
         "shared_gate_up": (6144, 2, 2048)},
        [*range(3, 78)],
    ),
    "Kimi-K3": (
        {"model_type": "kimi_k3", "text_config": KIMI_K3["text_config"] | {
            "hidden_size": 7168, "routed_expert_hidden_size": 3584, "num_experts": 896,
            "moe_intermediate_size": 3072, "num_experts_per_token": 16, "num_hidden_layers": 93}},
        {"gate_up": (896, 3584, 2, 3072), "down": (896, 3072, 3584), "router.kernel": (7168, 896),
         "shared_gate_up": (7168, 2, 6144), "latent_down": (7168, 3584), "latent_norm": (3584,),
         "latent_up": (3584, 7168)},
        [*range(1, 93)],
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048,
         "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
         "topk_group": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_hidden_layers": 61},
        {"gate_up": (256, 7168, 2, 2048), "down": (256, 2048, 7168),
         "router.selection_bias": (256,), "shared_down": (2048, 7168)},
        [*range(3, 61)],
    ),
    "gpt-oss-120b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
         "num_local_experts": 128, "num_experts_per_tok": 4, "num_hidden_layers": 36},
        {"gate_up": (128, 2880, 2, 2880), "down": (128, 2880, 2880),
         "gate_up_bias": (128, 2, 2880), "down_bias": (128, 2880), "router.bias": (128,)},
        [*range(36)],
    ),
    "Llama-4-Maverick": (
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
            "num_local_experts": 128, "num_experts_per_tok": 1, "num_hidden_layers": 48,
            "interleave_moe_layer_step": 2}},
        {"gate_up": (128, 5120, 2, 8192), "shared_gate_up": (5120, 2, 8192)},
        [*range(1, 48, 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_sizes_of_real_models_inference_sim_1690(name):
    """inference-sim#1690: the latent size of Kimi-K3 was ignored. Nothing is allocated."""
    config, shapes, layers = REAL[name]
    arguments = hf.layer_arguments(config)
    layer = nnx.eval_shape(lambda: nn.MoE(**arguments, rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(layer))
    got = {".".join(path): variable.shape for path, variable in state}
    assert {key: got[key] for key in shapes} == shapes
    assert hf.moe_layers(config) == layers
    # What the layer has is what the family's tensors are.
    sizes = families.axis_sizes(arguments)
    for form in families.Config(config).family.forms.values():
        named = {key for key in form.sources if key != "router.expert_table"}
        assert got.keys() == named
    assert got == {key: families.shape(families.PARAMETERS[key], sizes) for key in got}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, [1, 3]),
        ({"mlp_layer_types": ["hash_moe", "moe", "moe"]}, [0, 1, 2]),
        ({"moe_layers": [3, 1]}, [1, 3]),
        ({"moe_layers": []}, []),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 1, 0, 1, 1]}, [1, 3, 4]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"first_k_dense_replace": None}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_moe_layers(config, layers):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6} | config
    assert hf.moe_layers(config) == layers
