"""Makes hf_moe_golden.npz: outputs and gradients of the MoE blocks of transformers.

python tests/data/hf_moe_golden.py, with torch and transformers 5.24. A case has x and ct
(2, 6, 16), ids (2, 6) if experts are chosen by token ids, y = block(x), dx, and by the names
that torch gives them the parameters p/, their gradients g/ and the buffers b/. All float32,
weights 0.3 * normal.
"""

import importlib
import pathlib

EXPERTS = {"hidden_size": 16, "num_experts_per_tok": 3}
QWEN = {**EXPERTS, "moe_intermediate_size": 12, "num_experts": 8}
DEEPSEEK = {
    **EXPERTS,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LOCAL = {**EXPERTS, "intermediate_size": 12, "num_local_experts": 8}
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    **EXPERTS,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["hash_moe", "moe"],
    "vocab_size": 50,
    "swiglu_limit": 0.7,
}

# Configs, and the classes of a config and a block.
CASES = {
    "mixtral": (
        {"model_type": "mixtral", **LOCAL, "num_experts_per_tok": 2},
        "MixtralConfig",
        "MixtralSparseMoeBlock",
    ),
    "qwen3_moe": (
        {"model_type": "qwen3_moe", **QWEN, "norm_topk_prob": True},
        "Qwen3MoeConfig",
        "Qwen3MoeSparseMoeBlock",
    ),
    "qwen3_moe_nonorm": (
        {"model_type": "qwen3_moe", **QWEN, "norm_topk_prob": False},
        "Qwen3MoeConfig",
        "Qwen3MoeSparseMoeBlock",
    ),
    "qwen3_next": (
        {"model_type": "qwen3_next", **QWEN, "shared_expert_intermediate_size": 10},
        "Qwen3NextConfig",
        "Qwen3NextSparseMoeBlock",
    ),
    "deepseek_v3": (
        {"model_type": "deepseek_v3", **DEEPSEEK, "n_group": 4, "topk_group": 2},
        "DeepseekV3Config",
        "DeepseekV3MoE",
    ),
    "glm4_moe": (
        {"model_type": "glm4_moe", **DEEPSEEK, "n_group": 1, "topk_group": 1},
        "Glm4MoeConfig",
        "Glm4MoeMoE",
    ),
    "glm_moe_dsa": (
        {"model_type": "glm_moe_dsa", **DEEPSEEK, "n_group": 1, "topk_group": 1},
        "GlmMoeDsaConfig",
        "GlmMoeDsaMoE",
    ),
    "minimax_m2": (
        {"model_type": "minimax_m2", **LOCAL},
        "MiniMaxM2Config",
        "MiniMaxM2SparseMoeBlock",
    ),
    "gpt_oss": (
        {"model_type": "gpt_oss", **LOCAL, "swiglu_limit": 0.7, "num_hidden_layers": 2},
        "GptOssConfig",
        "GptOssMLP",
    ),
    "llama4": (
        {"model_type": "llama4", **LOCAL, "num_experts_per_tok": 1, "num_hidden_layers": 2},
        "Llama4TextConfig",
        "Llama4TextMoe",
    ),
    "deepseek_v4": (DEEPSEEK_V4, "DeepseekV4Config", "DeepseekV4SparseMoeBlock"),
    "deepseek_v4_hash": (
        DEEPSEEK_V4 | {"mlp_layer_types": ["moe", "hash_moe"]},
        "DeepseekV4Config",
        "DeepseekV4SparseMoeBlock",
    ),
    "kimi_linear": (
        {
            "model_type": "kimi_linear",
            "hidden_size": 16,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "num_expert_group": 2,
            "topk_group": 1,
            "moe_renormalize": True,
            "routed_scaling_factor": 2.446,
        },
        "KimiLinearConfig",
        "KimiLinearMoE",
    ),
}


def main():
    import numpy as np
    import torch

    torch.manual_seed(0)
    arrays = {}
    for name, (config, config_class, block_class) in CASES.items():
        family = config["model_type"]
        options = {key: value for key, value in config.items() if key != "model_type"}
        package = f"transformers.models.{family}"
        configuration = importlib.import_module(f"{package}.configuration_{family}")
        modeling = importlib.import_module(f"{package}.modeling_{family}")
        config = getattr(configuration, config_class)(**options)
        config._experts_implementation = "eager"
        layer = (1,) if family == "deepseek_v4" else ()
        block = getattr(modeling, block_class)(config, *layer).eval()
        with torch.no_grad():
            for tensor in [*block.parameters(), *block.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn_like(tensor) * 0.3)
                else:  # the experts of each token id
                    tensor.copy_(torch.rand(len(tensor), 8).argsort(-1)[:, : tensor.shape[1]])
        x, ct = torch.randn(2, 6, 16, requires_grad=True), torch.randn(2, 6, 16)
        ids = (torch.randint(50, (2, 6)),) if name == "deepseek_v4_hash" else ()
        y = block(x, *ids)
        y = (y[0] if isinstance(y, tuple) else y).reshape(2, 6, 16)
        (y * ct).sum().backward()
        case = {"x": x, "ct": ct, "y": y, "dx": x.grad, **({"ids": ids[0]} if ids else {})}
        for key, parameter in block.named_parameters():
            case[f"p/{key}"] = parameter
            if parameter.grad is not None:
                case[f"g/{key}"] = parameter.grad
        for key, buffer in block.named_buffers():
            case[f"b/{key}"] = buffer
        for key, tensor in case.items():
            arrays[f"{name}/{key}"] = tensor.detach().numpy()
    np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main()
