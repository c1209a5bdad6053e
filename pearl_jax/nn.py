"""Mixture-of-Experts layers for Flax: modules that hold the weights of routing and moe.

`MoE` and `Router` are NNX modules; `linen_moe` gives the same layer to Linen. This module
needs Flax, `pip install 'pearl-jax[nn]'`, and is imported when first used.

Parameters carry the names of their axes, which need no mesh: `nnx.get_named_sharding` turns
them into shardings, by way of `nnx.logical_axis_rules`. Those of a layer with a mesh are
the mesh's. What others call the weights:

| here | axes | MaxText | Transformer Engine | transformers |
| --- | --- | --- | --- | --- |
| router.kernel (d, e) | None, None | gate.kernel | gate_kernel | gate.weight, transposed |
| gate_up (e, d, 2, f) | expert, embed, None, mlp | wi_0, wi_1 | wi_0, wi_1 | experts.gate_up_proj |
| down (e, f, d) | expert, mlp, embed | wo | wo | experts.down_proj |
| axis expert | | exp | exp | |
| axis embed | | embed_moe | embed | |
| axis mlp | | mlp_moe | mlp | |
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

try:
    from flax import nnx
except ModuleNotFoundError as e:
    if e.name != "flax":
        raise
    raise ModuleNotFoundError(
        "pearl_jax.nn needs Flax, which is not installed: pip install 'pearl-jax[nn]'", name=e.name
    ) from e

from pearl_jax import moe, routing, sharding
from pearl_jax.expert_parallel import ExpertParallel
from pearl_jax.grouped_matmul import grouped_matmul

_LECUN_NORMAL = nnx.initializers.lecun_normal()


class SelectionBias(nnx.Variable):
    """Added to the scores when experts are chosen; updated from their load, not trained."""


class ExpertTable(nnx.Variable):
    """The experts of each token id, fixed."""


class Router(nnx.Module):
    """Tokens (t, d) -> routing.Routing, in float32 whatever the tokens are.

    Attributes:
      kernel: Param (d, e).
      bias: Param (e,) added to the logits, or None.
      selection_bias: SelectionBias (e,) float32, or None; see routing.route.
      expert_scale: Param (e,), or None; see routing.route.
      expert_table: ExpertTable (vocab_size, top_k) int32, or None: experts chosen by the
        token id instead of the logits (DeepSeek-V4).

    Args:
      hidden_size: d.
      config: how experts are chosen.
      use_bias, selection_bias, expert_scale: whether there is one.
      vocab_size: of an expert_table; None for none. Until one is loaded, it deals out
        the experts in turn.
      jitter: in training the tokens are multiplied by noise from [1 - jitter, 1 + jitter],
        drawn from the stream "jitter" of rngs. `eval()` turns it off, `train()` on.
      deterministic: whether jitter starts turned off.
      param_dtype: of kernel, bias and expert_scale.
      kernel_init, bias_init: initializers.
      mesh: whose devices each have all parameters, if given.
      rngs: of the parameters, "params", and "jitter".

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from pearl_jax import nn, routing
    >>> router = nn.Router(16, routing.RouterConfig(num_experts=8, top_k=2), rngs=nnx.Rngs(0))
    >>> router(jnp.ones((5, 16))).experts.shape
    (5, 2)
    """

    def __init__(
        self,
        hidden_size: int,
        config: routing.RouterConfig,
        *,
        use_bias: bool = False,
        selection_bias: bool = False,
        expert_scale: bool = False,
        vocab_size: int | None = None,
        jitter: float = 0.0,
        deterministic: bool = False,
        param_dtype=jnp.float32,
        kernel_init=_LECUN_NORMAL,
        bias_init=nnx.initializers.zeros,
        mesh: Mesh | AbstractMesh | None = None,
        rngs: nnx.Rngs,
    ):
        e = config.num_experts
        everywhere = None if mesh is None else NamedSharding(mesh, P())

        def param(there, init, shape):
            return _optional(
                there, init, rngs, shape, param_dtype, (None,) * len(shape), everywhere
            )

        self.hidden_size = hidden_size
        self.config = config
        self.jitter = jitter
        self.deterministic = deterministic
        self.rngs = rngs["jitter"].fork() if jitter else nnx.data(None)
        self.kernel = param(True, kernel_init, (hidden_size, e))
        self.bias = param(use_bias, bias_init, (e,))
        self.expert_scale = param(expert_scale, nnx.initializers.ones, (e,))
        self.selection_bias = nnx.data(None)
        if selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros(e, jnp.float32, device=everywhere))
        self.expert_table = nnx.data(None)
        if vocab_size is not None:
            table = jnp.arange(vocab_size * config.top_k, dtype=jnp.int32, device=everywhere) % e
            self.expert_table = ExpertTable(table.reshape(vocab_size, config.top_k))

    def __call__(
        self, tokens, *, token_mask=None, token_ids=None, deterministic=None
    ) -> routing.Routing:
        """Tokens (t, d) -> Routing.

        Args:
          tokens: (t, d), any float dtype.
          token_mask: (t,) bool, False for padding, which may hold anything.
          token_ids: (t,) integers, for the expert_table.
          deterministic: overrides the attribute.

        Raises:
          TypeError: tokens are not floats, token_mask not bool, token_ids not integers.
          ValueError: shapes do not fit, or token_ids and expert_table are not both there.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or tokens.shape[1] != self.hidden_size:
            raise ValueError(f"Router: tokens must be (t, {self.hidden_size}), got {tokens.shape}")
        token_mask, token_ids = _check_tokens("Router", tokens, token_mask, token_ids)
        if token_mask is not None:
            tokens = jnp.where(token_mask[:, None], tokens, 0)  # or NaN reaches the kernel
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.rngs is not None and not deterministic:
            tokens = routing.jitter(tokens, self.jitter, self.rngs())
        table = _value(self.expert_table)
        if (token_ids is None) != (table is None):
            there = "no" if table is None else "an"
            given = "none" if token_ids is None else token_ids.shape
            raise ValueError(
                f"Router: token_ids go with an expert_table, got token_ids {given} and {there} "
                "expert_table"
            )
        return routing.route(
            routing.project(tokens, self.kernel[...], _value(self.bias)),
            self.config,
            selection_bias=_value(self.selection_bias),
            experts=None if table is None else table[token_ids],
            expert_scale=_value(self.expert_scale),
            token_mask=token_mask,
        )


class MoE(nnx.Module):
    """A Mixture-of-Experts layer: tokens (..., d) -> (..., d).

    Attributes:
      router: Router.
      gate_up: Param (e, d, 2, f), gate first; down: Param (e, f, d).
      gate_up_bias: Param (e, 2, f), or None; down_bias: Param (e, d), or None.
      shared_gate_up: Param (d, 2, s); shared_down: Param (s, d); or None.
      shared_gate: Param (d, 1), or None.
      latent_down: Param (d, l); latent_norm: Param (l,); latent_up: Param (l, d); or None.
        With them the d of the routed experts is l.

    Args:
      hidden_size: d.
      intermediate_size: f, of one expert.
      num_experts, top_k: of a router with the defaults of RouterConfig; or else
      router: a RouterConfig, or a Router.
      activation: name of a moe.Activation, or one.
      use_bias: whether experts have biases.
      router_bias, selection_bias, expert_scale, vocab_size, jitter, deterministic: of the
        Router that is made here.
      shared_size: s, the summed width of the experts that every token takes; 0 for none.
      shared_gate: whether their output is gated by each token (Qwen3-Next).
      latent_size: l, the width of the routed experts where it is not d (Kimi-K3).
      latent_norm: whether their combined output is normalised.
      norm_eps: of that norm.
      dtype: of the products and the result; by default what tokens and parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initializer of one matrix (in, out), called for each expert, and for gate
        and up, so that none of these axes counts for the variance.
      bias_init: initializer of biases.
      mesh: short for parallel=ExpertParallel(mesh).
      parallel: how experts are spread over devices, in place of moe.apply_experts. With an
        ExpertParallel the parameters are created on its mesh: "expert" of their axes is on
        its axis expert, "embed" on fsdp and "mlp" on tensor.
      contraction: in place of grouped_matmul, like jax.lax.ragged_dot.
      rngs: of the parameters, "params", and "jitter".

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from pearl_jax import nn
    >>> layer = nn.MoE(16, 32, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)
    >>> layer.with_aux(jnp.ones((2, 5, 16))).tokens_per_expert.sum()
    Array(20, dtype=int32)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int | None = None,
        top_k: int | None = None,
        router: routing.RouterConfig | Router | None = None,
        activation: str | moe.Activation = "silu",
        use_bias: bool = False,
        router_bias: bool = False,
        selection_bias: bool = False,
        expert_scale: bool = False,
        vocab_size: int | None = None,
        shared_size: int = 0,
        shared_gate: bool = False,
        latent_size: int | None = None,
        latent_norm: bool = True,
        norm_eps: float = 1e-6,
        jitter: float = 0.0,
        deterministic: bool = False,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init=_LECUN_NORMAL,
        bias_init=nnx.initializers.zeros,
        mesh: Mesh | AbstractMesh | None = None,
        parallel: Any = None,
        contraction=grouped_matmul,
        rngs: nnx.Rngs,
    ):
        if mesh is not None:
            if parallel is not None:
                raise ValueError(f"MoE: give a mesh or parallel, got {mesh} and {parallel}")
            parallel = ExpertParallel(mesh)
        placed = parallel if isinstance(parallel, ExpertParallel) else None
        if (router is None) == (num_experts is None and top_k is None):
            raise ValueError(
                "MoE: give num_experts and top_k, or a router, got "
                f"num_experts={num_experts}, top_k={top_k}, router={router}"
            )
        if router is None:
            router = routing.RouterConfig(num_experts, top_k)  # type: ignore[arg-type]
        if isinstance(router, routing.RouterConfig):
            router = Router(
                hidden_size,
                router,
                use_bias=router_bias,
                selection_bias=selection_bias,
                expert_scale=expert_scale,
                vocab_size=vocab_size,
                jitter=jitter,
                deterministic=deterministic,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                mesh=None if placed is None else placed.mesh,
                rngs=rngs,
            )
        self.router = router
        self.hidden_size = hidden_size
        self.activation = moe.Activation(activation) if isinstance(activation, str) else activation
        self.norm_eps = norm_eps
        self.dtype = dtype
        self.parallel = parallel
        self.contraction = contraction

        e, f, s, d = router.config.num_experts, intermediate_size, shared_size, hidden_size
        width = d if latent_size is None else latent_size
        ones = nnx.initializers.ones

        def vector(there, init, shape, axes):
            place = None if placed is None else NamedSharding(placed.mesh, placed.spec(*axes))
            return _optional(there, init, rngs, shape, param_dtype, axes, place)

        def kernel(shape, axes, batch=(), there=True):
            return vector(there, _per_matrix(kernel_init, batch), shape, axes)

        self.gate_up = kernel((e, width, 2, f), ("expert", "embed", None, "mlp"), (0, 2))
        self.down = kernel((e, f, width), ("expert", "mlp", "embed"), (0,))
        self.gate_up_bias = vector(use_bias, bias_init, (e, 2, f), ("expert", None, "mlp"))
        self.down_bias = vector(use_bias, bias_init, (e, width), ("expert", "embed"))
        self.shared_gate_up = kernel((d, 2, s), ("embed", None, "mlp"), (1,), bool(s))
        self.shared_down = kernel((s, d), ("mlp", "embed"), there=bool(s))
        self.shared_gate = kernel((d, 1), ("embed", None), there=shared_gate)
        latent = latent_size is not None
        self.latent_down = kernel((d, width), ("embed", None), there=latent)
        self.latent_norm = vector(latent and latent_norm, ones, (width,), (None,))
        self.latent_up = kernel((width, d), (None, "embed"), there=latent)

    def __call__(self, tokens, *, token_mask=None, token_ids=None, deterministic=None):
        """Tokens (..., d) -> (..., d), as with_aux without the losses.

        Args:
          tokens: (..., d), any float dtype.
          token_mask: (...) bool, False for padding, which may hold anything and gets 0.
          token_ids: (...) integers, for the router's expert_table.
          deterministic: overrides the router's attribute.

        Raises:
          TypeError: tokens are not floats, token_mask not bool, token_ids not integers.
          ValueError: shapes do not fit, or token_ids and expert_table are not both there.
        """
        return self.with_aux(
            tokens, token_mask=token_mask, token_ids=token_ids, deterministic=deterministic
        ).out

    def with_aux(
        self, tokens, *, token_mask=None, token_ids=None, deterministic=None
    ) -> moe.MoEOutput:
        """The arguments of a call -> moe.MoEOutput, with the losses and counts of training.

        Nothing is sown: the caller adds up the losses of its layers, also under nnx.scan
        and nnx.remat.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim < 1 or tokens.shape[-1] != self.hidden_size:
            raise ValueError(f"MoE: tokens must be (..., {self.hidden_size}), got {tokens.shape}")
        token_mask, token_ids = _check_tokens("MoE", tokens, token_mask, token_ids)
        routed = self.router(
            tokens.reshape(-1, self.hidden_size),
            token_mask=None if token_mask is None else token_mask.reshape(-1),
            token_ids=None if token_ids is None else token_ids.reshape(-1),
            deterministic=deterministic,
        )
        dtype = self.dtype
        if dtype is None:
            dtype = jnp.result_type(tokens.dtype, self.gate_up.dtype)
        return moe.moe(
            tokens.astype(dtype),
            routed,
            self.weights(dtype),
            activation=self.activation,
            weight_input=self.router.config.weight_input,
            norm_eps=self.norm_eps,
            contraction=self.contraction,
            apply_experts=self.parallel or moe.apply_experts,
        )

    def weights(self, dtype=None) -> moe.MoEWeights:
        """The parameters after the router, for the functions of moe, in dtype if given."""

        def value(param) -> Any:
            return None if param is None else param[...].astype(dtype or param.dtype)

        def whole(param) -> Any:
            # Explicit axes that shard a contraction would need to be told where its sum goes.
            known = isinstance(self.parallel, ExpertParallel) and param is not None
            return sharding.place(value(param), self.parallel.mesh, P()) if known else value(param)

        experts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        shared = (self.shared_gate_up, self.shared_down, self.shared_gate)
        latent = (self.latent_down, self.latent_norm, self.latent_up)
        return moe.MoEWeights(
            moe.ExpertWeights(*map(value, experts)),
            None if shared[0] is None else moe.SharedWeights(*map(whole, shared)),
            None if latent[0] is None else moe.LatentWeights(*map(whole, latent)),
        )

    def update_selection_bias(self, tokens_per_expert, rate):
        """After a step, with the tokens_per_expert (e,) of its whole batch; see routing.

        Raises:
          ValueError: the router has no selection_bias.
        """
        bias = self.router.selection_bias
        if bias is None:
            raise ValueError(
                "MoE: the router has no selection_bias, make it with selection_bias=True"
            )
        bias[...] = routing.update_selection_bias(bias[...], tokens_per_expert, rate)


def linen_moe(hidden_size, intermediate_size, *, name=None, **options):
    """MoE as a Linen module, with its arguments but rngs.

    Its collections are "params", and "SelectionBias" and "ExpertTable" for what is not
    trained. Of its methods, `module.apply(variables, tokens, nnx_method="with_aux")`
    calls others than `__call__`.

    >>> import jax, jax.numpy as jnp
    >>> from pearl_jax import nn
    >>> layer = nn.linen_moe(16, 32, num_experts=8, top_k=2)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((5, 16)))
    >>> layer.apply(variables, jnp.ones((5, 16))).shape
    (5, 16)
    """
    return nnx.bridge.to_linen(MoE, hidden_size, intermediate_size, name=name, **options)


def _optional(there, init, rngs, shape, dtype, axes, place=None) -> Any:
    if not there:
        return nnx.data(None)
    if place is not None:
        # Each device makes its part only.
        init = jax.jit(init, static_argnums=(1, 2), out_shardings=place)
        axes = tuple(place.spec)
    # Without eager_sharding the names of the axes need no mesh.
    return nnx.Param(init(rngs.params(), shape, dtype), out_sharding=axes, eager_sharding=False)


def _per_matrix(init, batch):
    """An initializer for shapes whose batch axes count different matrices."""

    def batched(key, shape, dtype):
        sizes = tuple(shape[i] for i in batch)
        one = tuple(n for i, n in enumerate(shape) if i not in batch)
        make = lambda key: init(key, one, dtype)
        # Innermost first; of the axes still to come, those before it are missing.
        for i, axis in reversed(list(enumerate(batch))):
            make = jax.vmap(make, out_axes=axis - i)
        return make(jax.random.split(key, sizes) if sizes else key)

    return batched


def _value(variable):
    return None if variable is None else variable[...]


def _check_tokens(name, tokens, token_mask, token_ids):
    """The two as arrays that fit the tokens."""
    if not jnp.issubdtype(tokens.dtype, jnp.floating):
        raise TypeError(f"{name}: tokens must be floats, got {tokens.dtype}")
    checked = []
    for what, x, kind, words in (
        ("token_mask", token_mask, jnp.bool_, "bool"),
        ("token_ids", token_ids, jnp.integer, "integers"),
    ):
        if x is not None:
            x = jnp.asarray(x)
            if not jnp.issubdtype(x.dtype, kind):
                raise TypeError(f"{name}: {what} must be {words}, got {x.dtype}")
            if x.shape != tokens.shape[:-1]:
                raise ValueError(
                    f"{name}: {what} must be {tokens.shape[:-1]} for tokens {tokens.shape}, "
                    f"got {x.shape}"
                )
        checked.append(x)
    return checked
