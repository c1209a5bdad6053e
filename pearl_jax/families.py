"""Model families: what the tensors of their MoE layers are called, and what their configs mean.

What families differ in is written down once, in FAMILIES: the name of each tensor and the
order of its axes, by letter: d hidden, e experts, f intermediate, w the width that experts
work at (d, or the latent size), s the width of the shared experts, v vocabulary, k experts
of a token. "e (2 f) w" is an array (e, 2f, w) with gate first, and "e w (f 2)" an array
(e, w, 2f) with gate and up interleaved. Nothing is ever told by a shape: where w is f or
2f, a transposed weight has the same one.

Sources: the models in transformers 5.24 and its conversions of checkpoints; for Kimi-K3 the
names in its files and the code in its repository.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pearl_jax.moe import Activation
from pearl_jax.routing import RouterConfig

# Parameters of nn.MoE and their axes.
PARAMETERS = {
    "router.kernel": "d e",
    "router.bias": "e",
    "router.selection_bias": "e",
    "router.expert_table": "v k",
    "gate_up": "e w 2 f",
    "down": "e f w",
    "gate_up_bias": "e 2 f",
    "down_bias": "e w",
    "shared_gate_up": "d 2 s",
    "shared_down": "s d",
    "shared_gate": "d 1",
    "latent_down": "d w",
    "latent_norm": "w",
    "latent_up": "w d",
}


def shape(axes, sizes):
    return tuple(math.prod(sizes[a] for a in dimension) for dimension in _dimensions(axes))


def rearrange(x, source, target, sizes):
    """An array with the axes source -> the same with the axes target, maybe a view."""
    letters = [a for dimension in _dimensions(source) for a in dimension]
    order = [letters.index(a) for dimension in _dimensions(target) for a in dimension]
    return x.reshape([sizes[a] for a in letters]).transpose(order).reshape(shape(target, sizes))


def _dimensions(axes):
    """The letters of each dimension: "e (2 f) d" -> [["e"], ["2", "f"], ["d"]]."""
    dimensions, inside = [], False
    for word in axes.split():
        if not inside:
            dimensions.append([])
        dimensions[-1].append(word.strip("()"))
        inside = (inside or word.startswith("(")) and not word.endswith(")")
    return dimensions


class Source(NamedTuple):
    """Where a parameter is: the axes of its tensors, and their names.

    {} in a name is the expert, and such tensors lack the axis e. Two names are those of
    gate and up, which lack the axis 2.
    """

    axes: str
    names: tuple[str, ...]

    @property
    def per_expert(self):
        return "{}" in self.names[0]

    def tensors(self, sizes):
        """All names."""
        experts = range(sizes["e"] if self.per_expert else 1)
        return [name.format(i) for i in experts for name in self.names]

    def read(self, tensors, target, sizes, expert=None):
        """The parameter, with the axes target; or an expert's row of it, target without e."""
        row = slice(None) if expert is None or self.per_expert else expert
        parts = [np.asarray(tensors[name.format(expert)][row]) for name in self.names]
        stacked = np.stack(parts) if len(parts) == 2 else parts[0]
        return rearrange(stacked, self._stacked_axes(expert), target, sizes)

    def write(self, value, target, sizes):
        """The inverse of read: tensors by name."""
        rows = {None: value}
        if self.per_expert:
            rows, target = dict(enumerate(value)), target.removeprefix("e ")
        tensors = {}
        for expert, row in rows.items():
            stacked = rearrange(row, target, self._stacked_axes(expert), sizes)
            parts = stacked if len(self.names) == 2 else [stacked]
            for name, part in zip(self.names, parts):
                tensors[name.format(expert)] = np.ascontiguousarray(part)
        return tensors

    def _stacked_axes(self, expert):
        axes = self.axes if expert is None else self.axes.removeprefix("e ")
        return axes if len(self.names) == 1 else "2 " + axes


@dataclasses.dataclass(frozen=True)
class Form:
    """The tensors of a layer: root, "layers.{layer}.", block, ".", and a name of sources."""

    block: str
    sources: dict[str, Source]
    root: str = "model."

    def head(self, layer, prefix):
        """All that precedes the names of sources; see hf.load_layer."""
        if layer is None:
            return prefix or ""
        return f"{self.root if prefix is None else prefix}layers.{layer}.{self.block}."


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model_type is.

    Attributes:
      forms: by name, "fused" as transformers 5 has a layer in memory, "per_expert" as its
        experts were Linears before, and are in most files.
      intermediate: the config's key of f.
      score, weight_input: of the RouterConfig; a score in the config comes first.
      activation: in place of the config's hidden_act.
      defaults: of config keys that may be absent or null.
    """

    forms: dict[str, Form]
    intermediate: str = "moe_intermediate_size"
    score: str = "softmax"
    weight_input: bool = False
    activation: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self):
        return {name for form in self.forms.values() for name in form.sources}


def _linears(parameter, prefix, gate, up, down):
    """An MLP of Linears, whose weights are (out, in)."""
    width, hidden = ("s", "d") if parameter else ("f", "w")
    return {
        f"{parameter}gate_up": Source(f"{width} {hidden}", (f"{prefix}.{gate}", f"{prefix}.{up}")),
        f"{parameter}down": Source(f"{hidden} {width}", (f"{prefix}.{down}",)),
    }


def _one(parameter, axes, name):
    return {parameter: Source(axes, (name,))}


_PROJ = "gate_proj.weight", "up_proj.weight", "down_proj.weight"
_W = "w1.weight", "w3.weight", "w2.weight"
_GATE = _one("router.kernel", "e d", "gate.weight")
_ROUTER = _one("router.kernel", "e d", "router.weight")
_CORRECTION = _one("router.selection_bias", "e", "gate.e_score_correction_bias")
_TABLE = _one("router.expert_table", "v k", "gate.tid2eid")
_FUSED = _one("gate_up", "e (2 f) w", "experts.gate_up_proj") | _one(
    "down", "e w f", "experts.down_proj"
)
_SHARED = _linears("shared_", "shared_experts", *_PROJ)
_ONE_SHARED = _linears("shared_", "shared_expert", *_PROJ)


def _forms(others, block="mlp", linears=_PROJ):
    """Both forms, alike in all but the experts."""
    return {
        "fused": Form("mlp", others | _FUSED),
        "per_expert": Form(block, others | _linears("", "experts.{}", *linears)),
    }


_DEEPSEEK_FORMS = _forms(_GATE | _CORRECTION | _SHARED)
_DEEPSEEK = Family(
    forms=_DEEPSEEK_FORMS,
    score="sigmoid",
    defaults={
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
)
_LLAMA4 = Family(
    forms={
        "fused": Form(
            "feed_forward",
            _ROUTER
            | _one("gate_up", "e w (2 f)", "experts.gate_up_proj")
            | _one("down", "e f w", "experts.down_proj")
            | _ONE_SHARED,
        )
    },
    intermediate="intermediate_size",
    score="sigmoid",
    weight_input=True,
    defaults={"norm_topk_prob": False, "n_shared_experts": 1},
)
FAMILIES = {
    "mixtral": Family(
        forms=_forms(_GATE, "block_sparse_moe", _W), intermediate="intermediate_size"
    ),
    "qwen3_moe": Family(forms=_forms(_GATE), defaults={"norm_topk_prob": False}),
    "qwen3_next": Family(
        forms=_forms(_GATE | _ONE_SHARED | _one("shared_gate", "1 d", "shared_expert_gate.weight"))
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": Family(
        forms=_DEEPSEEK_FORMS, score="sigmoid", defaults={"first_k_dense_replace": 1}
    ),
    "glm_moe_dsa": Family(
        forms=_DEEPSEEK_FORMS,
        score="sigmoid",
        defaults={"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    ),
    "minimax_m2": Family(
        forms=_forms(
            _GATE | _one("router.selection_bias", "e", "e_score_correction_bias"),
            "block_sparse_moe",
            _W,
        ),
        intermediate="intermediate_size",
        score="sigmoid",
    ),
    "gpt_oss": Family(
        forms={
            "fused": Form(
                "mlp",
                _ROUTER
                | _one("router.bias", "e", "router.bias")
                | _one("gate_up", "e w (f 2)", "experts.gate_up_proj")
                | _one("gate_up_bias", "e (f 2)", "experts.gate_up_proj_bias")
                | _one("down", "e f w", "experts.down_proj")
                | _one("down_bias", "e w", "experts.down_proj_bias"),
            )
        },
        intermediate="intermediate_size",
        activation="gpt_oss",
        defaults={"swiglu_limit": 7.0},
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "deepseek_v4": Family(
        forms={
            "fused": Form("mlp", _GATE | _CORRECTION | _TABLE | _FUSED | _SHARED),
            "per_expert": Form(
                "ffn",
                _GATE
                | _one("router.selection_bias", "e", "gate.bias")
                | _TABLE
                | _linears("", "experts.{}", *_W)
                | _linears("shared_", "shared_experts", *_W),
                root="",
            ),
        },
        score="sqrt_softplus",
        defaults={"routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "n_shared_experts": 1},
    ),
    "kimi_linear": Family(
        forms=_forms(
            _GATE
            | _CORRECTION
            | _SHARED
            | _one("latent_down", "w d", "routed_expert_down_proj.weight")
            | _one("latent_norm", "w", "routed_expert_norm.weight")
            | _one("latent_up", "d w", "routed_expert_up_proj.weight"),
            "block_sparse_moe",
            _W,
        ),
        score="sigmoid",
        defaults={"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "activation_situ_beta": 1.0},
    ),
}

# Config keys that mean the same.
_KEYS = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts"),
    "normalize": ("norm_topk_prob", "moe_renormalize"),
    "score": ("scoring_func", "moe_router_activation_func"),
    "num_groups": ("n_group", "num_expert_group"),
}
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "situ": "situ",
}


class Config:
    """A family, and its config.json with defaults and by any of the keys that mean the same."""

    def __init__(self, config: Mapping[str, Any]):
        text = config.get("text_config") or config
        self.model_type = text.get("model_type", config.get("model_type"))
        self.family = _choice(FAMILIES, "model_type", self.model_type)
        self._keys = {key: value for key, value in text.items() if value is not None}

    def get(self, what, default=None):
        keys = _KEYS.get(what, (what,))
        for given in (self._keys, self.family.defaults):
            values = {key: given[key] for key in keys if key in given}
            if len({*map(repr, values.values())}) > 1:
                raise ValueError(f"hf: keys of the config mean the same but differ: {values}")
            if values:
                return next(iter(values.values()))
        return default

    def __getitem__(self, what):
        if (value := self.get(what)) is None:
            keys = " or ".join(_KEYS.get(what, (what,)))
            raise ValueError(f"hf: the config of {self.model_type} has no {keys}")
        return value


def _choice(choices, what, name):
    if name not in choices:
        raise ValueError(f"hf: {what} is one of {[*choices]}, got {name!r}")
    return choices[name]


def layer_arguments(config: Mapping[str, Any], *, hash_routing: bool = False) -> dict[str, Any]:
    """The arguments of nn.MoE for a config.json, of a multimodal model for its text_config.

    Args:
      config: of a family that hf.load_layer knows.
      hash_routing: for a layer that chooses experts by a table of token ids (DeepSeek-V4).

    Raises:
      ValueError: the model_type is unknown, or a key is missing or has a value that
        nn.MoE does not compute.

    >>> from flax import nnx
    >>> from pearl_jax import hf, nn
    >>> config = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    ...           "num_local_experts": 8, "num_experts_per_tok": 2}
    >>> layer = nnx.eval_shape(lambda: nn.MoE(**hf.layer_arguments(config), rngs=nnx.Rngs(0)))
    >>> layer.gate_up.shape
    (8, 4096, 2, 14336)
    """
    keys = Config(config)
    family, parameters = keys.family, keys.family.parameters
    for key, only in (("topk_method", "noaux_tc"), ("swiglu_alpha", 1.702)):
        if keys.get(key, only) != only:
            raise ValueError(f"hf: {key} must be {only!r}, got {keys[key]!r}")

    score, activation = keys.get("score"), family.activation
    if activation is None:
        activation = _choice(_ACTIVATIONS, "hidden_act", keys.get("hidden_act", "silu"))
    f = keys[family.intermediate]
    shared_size = 0
    if "shared_down" in parameters:
        shared_size = keys.get(
            "shared_expert_intermediate_size", f * keys.get("num_shared_experts", 0)
        )
    return {
        "hidden_size": keys["hidden_size"],
        "intermediate_size": f,
        "router": RouterConfig(
            num_experts=keys["num_experts"],
            top_k=keys["top_k"],
            score=family.score if score is None else _choice(_SCORES, "score", score),
            normalize=keys.get("normalize", True),
            scaling_factor=keys.get("routed_scaling_factor", 1.0),
            num_groups=keys.get("num_groups", 1),
            top_k_groups=keys.get("topk_group", 1),
            weight_input=family.weight_input,
        ),
        "activation": Activation(
            activation,
            limit=keys.get("swiglu_limit"),
            beta=keys.get("activation_situ_beta", 1.0),
            linear_beta=keys.get("activation_situ_linear_beta"),
        ),
        "use_bias": "gate_up_bias" in parameters,
        "router_bias": "router.bias" in parameters,
        "selection_bias": "router.selection_bias" in parameters and not hash_routing,
        "vocab_size": keys["vocab_size"] if hash_routing else None,
        "shared_size": shared_size,
        "shared_gate": "shared_gate" in parameters,
        "latent_size": keys.get("routed_expert_hidden_size"),
        "latent_norm": keys.get("latent_moe_use_norm", False),
        "norm_eps": keys.get("rms_norm_eps", 1e-6),
    }


def axis_sizes(arguments) -> dict[str, int]:
    """Of layer_arguments, the size of each letter."""
    d, latent = arguments["hidden_size"], arguments["latent_size"]
    return {
        "d": d,
        "e": arguments["router"].num_experts,
        "f": arguments["intermediate_size"],
        "w": d if latent is None else latent,
        "s": arguments["shared_size"],
        "v": arguments["vocab_size"],
        "k": arguments["router"].top_k,
        "1": 1,
        "2": 2,
    }


def moe_layers(config: Mapping[str, Any]) -> list[int]:
    """The numbers of a model's layers that are MoE layers, for its config.json.

    >>> from pearl_jax import hf
    >>> hf.moe_layers({"model_type": "glm4_moe", "num_hidden_layers": 4,
    ...                "first_k_dense_replace": 1})
    [1, 2, 3]
    """
    keys = Config(config)
    if (kinds := keys.get("mlp_layer_types")) is not None:
        return [i for i, kind in enumerate(kinds) if kind != "dense"]
    if (listed := keys.get("moe_layers")) is not None:
        return sorted(listed)
    frequency = keys.get("moe_layer_freq", 1)
    if not isinstance(frequency, int):
        return [i for i, there in enumerate(frequency) if there]
    step = keys.get("decoder_sparse_step", keys.get("interleave_moe_layer_step", 1))
    first, dense = keys.get("first_k_dense_replace", 0), keys.get("mlp_only_layers", ())
    return [
        i
        for i in range(keys["num_hidden_layers"])
        # moe_layer_freq counts layers from 0, the steps from 1.
        if i >= first and i % frequency == 0 and (i + 1) % step == 0 and i not in dense
    ]
