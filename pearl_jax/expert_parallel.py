"""The routed experts spread over the devices of a mesh.

One axis of the mesh shards the experts over its n devices. Each token must meet its
experts, and the strategies differ in how it gets to them:

  replicate     All n devices have the same tokens; each adds up what its own experts make
                of them, and a psum adds that over devices. One exchange, and so the
                fastest for the few tokens of a decoding step.
  gather        Tokens are sharded over the axis too. all_gather, own experts,
                psum_scatter.
  all_to_all    A device sends a token once to each device that has an expert of it, in a
                fixed number of slots for each pair of devices, and gets back one sum of
                those experts' outputs. Dropless with a slot for each token; with a
                capacity there are fewer, and the traffic no longer grows with n.
  ragged        The same, but only what is needed travels (jax.lax.ragged_all_to_all):
                dropless at the least traffic, on GPU and TPU only.
  auto          replicate, gather or all_to_all, by what the exchanges take: see choose.

ragged is never chosen by itself: between two H200s jax 0.11 moved 5 GB/s that way, 1/70
of what all_to_all did.

The other axes: "data" shards tokens only. "tensor" shards f, the hidden columns of an
expert; the partial sums of the down projection are added by one psum, of tokens. "fsdp"
shards tokens, and d of the weights, which are gathered before use and whose gradients are
reduce-scattered. Other than that, weights never move.

Every device takes part in every exchange, also one without tokens: nothing but the values
in the buffers depends on the routing.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pearl_jax import moe, sharding
from pearl_jax.moe import ExpertWeights
from pearl_jax.routing import (
    Permutation,
    Routing,
    dispatch,
    sort_by_expert,
    to_pairs,
    tokens_per_expert,
)

_STRATEGIES = ("auto", "replicate", "gather", "all_to_all", "ragged")

# What an exchange takes to start, and the bytes per second into one device: two H200s,
# NVLink, jax 0.11.2.
_START_SECONDS = 140e-6
_BYTES_PER_SECOND = 300e9


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """The experts of a layer on a mesh: a function in place of moe.apply_experts.

    Attributes:
      mesh: with axes of type Auto or Explicit, of any sizes. Of the names below, those that
        are left at their default and that it lacks are not used.
      expert: axis that shards the experts.
      data: axis, or tuple of axes, that shards tokens only.
      tensor: axis that shards f.
      fsdp: axis that shards tokens, and d of the weights.
      strategy: "auto", "replicate", "gather", "all_to_all" or "ragged", as in the module.
      capacity: None: every token gets all its experts, whatever their load. A number c: a
        device has room for c times its even share of the choices of experts, and in
        all_to_all for c times the even share of tokens from each device. What finds no room
        is left out and counted in dropped.
      micro_batches: the tokens of a device are worked on in so many parts, so that the
        compiler may exchange one while another is computed.

    Raises:
      ValueError: an option is none of those, or names an axis that the mesh lacks.

      >>> import jax, jax.numpy as jnp
      >>> from pearl_jax import expert_parallel, moe, routing
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",))
      >>> config = routing.RouterConfig(num_experts=8, top_k=2)
      >>> tokens, logits = jnp.ones((6, 4)), jnp.tile(jnp.arange(8.0), (6, 1))
      >>> weights = moe.ExpertWeights(jnp.ones((8, 4, 2, 3)), jnp.ones((8, 3, 4)))
      >>> layer = expert_parallel.ExpertParallel(mesh)
      >>> print(layer(tokens, routing.route(logits, config), weights)[1])
      [0 0 0 0 0 0 6 6]
    """

    mesh: Mesh | AbstractMesh
    expert: str | None = "expert"
    data: str | tuple[str, ...] | None = "data"
    tensor: str | None = "tensor"
    fsdp: str | None = "fsdp"
    strategy: str = "auto"
    capacity: float | None = None
    micro_batches: int = 1

    def __post_init__(self):
        for name in ("expert", "data", "tensor", "fsdp"):
            axes = getattr(self, name)
            if not {*_names(axes)} <= {*self.mesh.axis_names}:
                if axes != name:
                    raise ValueError(
                        f"ExpertParallel: {name}={axes!r} but the axes of the mesh are "
                        f"{self.mesh.axis_names}"
                    )
                object.__setattr__(self, name, None)
        for ok, rule in (
            (self.strategy in _STRATEGIES, f"strategy is one of {_STRATEGIES}"),
            (self.capacity is None or self.capacity > 0, "capacity is above 0, or None"),
            (self.micro_batches >= 1, "micro_batches is at least 1"),
            (len({*self._axes}) == len(self._axes), "an axis has one role"),
        ):
            if not ok:
                raise ValueError(f"ExpertParallel: {rule}, got {self}")

    def __call__(self, tokens, routing: Routing, weights: ExpertWeights, **options):
        """As moe.apply_experts, with the same arguments, results and gradients.

        Operands may be sharded in any way, but only weights sharded as in weight_specs stay
        in place. Of Explicit axes, out has the sharding of tokens.

        Raises:
          ValueError: weights cannot be split evenly.
        """
        if self._size(self._axes) == 1:
            return moe.apply_experts(tokens, routing, weights, **options)
        (t, d), num_experts = tokens.shape, weights.gate_up.shape[0]
        if self.strategy == "auto":
            chosen = self.choose(t, d, routing.experts.shape[1], tokens.dtype)
            return chosen(tokens, routing, weights, **options)
        self._check_divisible(weights)

        # Every device gets the same number of tokens, at least one; those added are masked.
        spec, parts = self.token_spec, self._size(_names(self.token_spec[0]))
        padding = parts * max(-(-t // parts), 1) - t

        def place(x, fill):
            if padding:
                x = sharding.place(x, self.mesh, P(None, None))
                x = jnp.pad(x, ((0, padding), (0, 0)), constant_values=fill)
            return sharding.place(x, self.mesh, spec)

        def local(tokens, experts, expert_weights, weights):
            routing = Routing(experts, expert_weights, None, None)  # pyright: ignore
            return self.local(tokens, routing, weights, **options)

        out, counts, dropped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(spec, spec, spec, self.weight_specs),
            out_specs=(spec, P(None), P()),
        )(
            place(tokens, 0),
            place(routing.experts, num_experts),
            place(routing.weights, 0),
            self._place(weights),
        )
        if padding:
            out = sharding.place(out, self.mesh, P(None, None))[:t]
        return sharding.place_like(out, tokens), counts, dropped

    def local(self, tokens, routing: Routing, weights: ExpertWeights, **options):
        """As a call, but inside a shard_map over the mesh, with one device's parts.

        They are sharded as token_spec and weight_specs say; of routing, only experts and
        weights are read. tokens_per_expert and dropped are those of all devices.

        Raises:
          ValueError: strategy is "auto"; see choose.
        """
        if self.strategy == "auto":
            raise ValueError(f"ExpertParallel: local takes no strategy 'auto', got {self}")
        (t, top_k), num_here = routing.experts.shape, weights.gate_up.shape[0]
        first = 0 if self.expert is None else lax.axis_index(self.expert) * num_here
        weights = self._for_use(weights)

        def run(share, tokens, experts, expert_weights):
            """What the experts here add to tokens (t, d), and how many rows that took."""
            own = (experts >= first) & (experts < first + num_here)
            max_rows = self._room(share, len(experts) * min(top_k, num_here))
            out, sizes = moe.apply_local_experts(
                tokens,
                jnp.where(own, experts - first, num_here),
                expert_weights,
                weights,
                max_rows=max_rows,
                **options,
            )
            return out, jnp.minimum(jnp.sum(sizes), max_rows)

        outs, rows = zip(
            *(
                self._exchange(
                    run, num_here, tokens[part], routing.experts[part], routing.weights[part]
                )
                for part in _parts(t, self.micro_batches)
            )
        )
        out = lax.psum(jnp.concatenate(outs), self._replicated + _names(self.tensor))
        token_axes = _names(self.token_spec[0])
        counts = tokens_per_expert(routing.experts, self._num_shards * num_here)
        counts = lax.psum(counts, token_axes)
        if self.capacity is None:
            return out, counts, jnp.int32(0)
        used = lax.psum(sum(rows), token_axes + self._replicated)
        return out, counts, jnp.sum(counts) - used

    def choose(self, t, d, top_k, dtype) -> ExpertParallel:
        """The same with a strategy in place of "auto", for t tokens (d,) on all devices.

        What is computed is the same for all strategies; what counts are the exchanges, each
        by a time to start and its bytes into one of the n devices with T tokens each:
          replicate     psum: 2 (n - 1) T d of float32. Where few tokens count, they are taken
                        to be replicated already, but the bytes of gathering them count.
          gather        all_gather: (n - 1) T tokens and routings; psum_scatter: (n - 1) T d
                        of float32.
          all_to_all    the same for the slots of n - 1 pairs, sums in dtype.
        """
        if self.strategy != "auto":
            return self
        others = self._num_shards - 1
        here = -(-t // self._size(self._token_axes + _names(self.expert)))
        token, routing = d * jnp.dtype(dtype).itemsize, 8 * top_k
        slots = self._slots(here, top_k)
        exchanges = {
            "replicate": (1, here * (token + routing + 2 * d * 4)),
            "gather": (3, here * (token + routing + d * 4)),
            "all_to_all": (3, slots * (2 * token + routing)),
        }
        seconds = {
            name: count * _START_SECONDS + others * num_bytes / _BYTES_PER_SECOND
            for name, (count, num_bytes) in exchanges.items()
        }
        return dataclasses.replace(self, strategy=min(seconds, key=seconds.__getitem__))

    def spec(self, *names):
        """The PartitionSpec of an array with axes "expert", "embed" (d), "mlp" (f) or None."""
        axes = {"expert": self.expert, "embed": self.fsdp, "mlp": self.tensor}
        return P(*(axes.get(name) for name in names))

    @property
    def weight_specs(self) -> ExpertWeights:
        """The PartitionSpecs of the weights, each of which stays where it is."""
        return ExpertWeights(*self._weight_specs)  # pyright: ignore[reportArgumentType]

    @property
    def token_spec(self):
        """The PartitionSpec of tokens (t, d), and of experts and weights of their routing."""
        sharded = () if self._replicated else _names(self.expert)
        return P((self._token_axes + sharded) or None, None)

    # Axes.

    @property
    def _weight_specs(self):
        return (
            self.spec("expert", "embed", None, "mlp"),
            self.spec("expert", "mlp", "embed"),
            self.spec("expert", None, "mlp"),
            self.spec("expert", "embed"),
        )

    @property
    def _token_axes(self):
        return _names(self.data) + _names(self.fsdp)

    @property
    def _axes(self):
        return self._token_axes + _names(self.expert) + _names(self.tensor)

    @property
    def _replicated(self):
        """The axes over which tokens are replicated though experts are sharded."""
        alone = self.strategy == "replicate" or self._num_shards == 1
        return _names(self.expert) if alone else ()

    @property
    def _num_shards(self):
        return self._size(_names(self.expert))

    def _size(self, axes):
        return math.prod(self.mesh.shape[a] for a in axes)

    def _check_divisible(self, weights):
        for name, spec in zip(weights._fields, self._weight_specs):
            shape = getattr(getattr(weights, name), "shape", ())
            for size, axis in zip(shape, spec):
                if size % self._size(_names(axis)):
                    raise ValueError(
                        f"ExpertParallel: {name} {shape} cannot be split evenly over the mesh "
                        f"{dict(self.mesh.shape)} by {spec}"
                    )

    def _place(self, weights):
        def place(x, spec):
            return None if x is None else sharding.place(x, self.mesh, spec)

        return ExpertWeights(*map(place, weights, self._weight_specs))  # pyright: ignore

    # On one device.

    def _for_use(self, weights):
        """Weights whole in d; down_bias on one device of the tensor axis, which adds it once."""
        gate_up, down, gate_up_bias, down_bias = weights
        if self.fsdp is not None:
            gate_up = lax.all_gather(gate_up, self.fsdp, axis=1, tiled=True)
            down = lax.all_gather(down, self.fsdp, axis=2, tiled=True)
            if down_bias is not None:
                down_bias = lax.all_gather(down_bias, self.fsdp, axis=1, tiled=True)
        if down_bias is not None and self.tensor is not None:
            down_bias = jnp.where(lax.axis_index(self.tensor) == 0, down_bias, 0)
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias)

    def _room(self, share, most):
        return most if self.capacity is None else min(most, math.ceil(self.capacity * share))

    def _slots(self, t, top_k):
        """Room for tokens from one device to another; a token goes there at most once."""
        return self._room(t * top_k / self._num_shards, t)

    def _exchange(self, run, num_here, tokens, experts, expert_weights):
        """What all experts add to the tokens here, and how many rows the experts here took.

        But where the tokens are replicated, that is what the experts here add.
        """
        (t, top_k), n, axis = experts.shape, self._num_shards, self.expert
        if self._replicated or axis is None:
            return run(experts.size / n, tokens, experts, expert_weights)
        run, num_experts = functools.partial(run, experts.size), n * num_here
        # One exchange for the routing, in which zeros are a masked token: no free slot counts.
        routing = jnp.concatenate(
            [expert_weights, (experts - num_experts).astype(jnp.float32)], axis=1
        )

        def run_on(tokens, routing):
            experts = routing[:, top_k:].astype(jnp.int32) + num_experts
            return run(tokens, experts, routing[:, :top_k])

        if self.strategy == "gather":
            out, rows = run_on(*(lax.all_gather(x, axis, tiled=True) for x in (tokens, routing)))
            return lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True), rows

        peers = _each_once(experts // num_here, n)
        permutation = sort_by_expert(peers, n)
        if self.strategy == "ragged":
            room = t * min(top_k, n)
            permutation = permutation._replace(order=permutation.order[:room])
            sizes = lax.all_gather(permutation.group_sizes, axis)  # (from, to)
            there = functools.partial(_ragged_all_to_all, axis, n * t, sizes=sizes)
            back = functools.partial(_ragged_all_to_all, axis, room, sizes=sizes.T)
        else:
            slots = self._slots(t, top_k)
            permutation = _to_slots(permutation, peers, slots)

            def there(rows):
                rows = rows.reshape(n, slots, -1)
                return lax.all_to_all(rows, axis, 0, 0).reshape(n * slots, -1)

            back = there
        out, rows = run_on(*(there(dispatch(x, permutation)) for x in (tokens, routing)))
        # As a row of an expert, a device's sum is rounded to the tokens' dtype.
        sums = to_pairs(back(out.astype(tokens.dtype)), permutation)
        return jnp.sum(sums, axis=1, dtype=jnp.float32), rows


def _names(axes):
    """Mesh axes, as an entry of a PartitionSpec has them, as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _parts(t, count):
    """count slices of t tokens, or fewer with a token each."""
    count = max(min(t, count), 1)
    bounds = [t * i // count for i in range(count + 1)]
    return [slice(*pair) for pair in zip(bounds, bounds[1:])]


def _each_once(peers, n):
    """(t, top_k) devices, with n in place of one that stands further left already."""
    choice = jnp.arange(peers.shape[1])
    same = peers[:, :, None] == peers[:, None, :]
    return jnp.where(jnp.any(same & (choice < choice[:, None]), axis=2), n, peers)


def _to_slots(permutation: Permutation, peers, slots):
    """Rows sorted by peer -> (peers * slots,) of them, each peer's first ones in its slots."""
    order, inverse, sizes = permutation
    n, starts, slot = len(sizes), jnp.cumsum(sizes) - sizes, jnp.arange(slots)
    rows = order.at[starts[:, None] + slot].get(mode="clip")
    order = jnp.where(slot < sizes[:, None], rows, order.size).ravel()
    slot = inverse - starts.at[peers].get(mode="clip")
    inverse = jnp.where((peers < n) & (slot < slots), peers * slots + slot, n * slots)
    return Permutation(order, inverse, jnp.minimum(sizes, slots))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged_all_to_all(axis, room, rows, sizes):
    """Rows sorted by the device they go to -> (room, d), sorted by that they come from, then 0.

    sizes: (n, n), rows from each device to each other; its transpose sends them back.
    """
    here = lax.axis_index(axis)
    send, receive = sizes[here], sizes[:, here]
    operands = sharding.vary_alike(
        rows,
        jnp.zeros((room, rows.shape[1]), rows.dtype),
        jnp.cumsum(send) - send,
        send,
        (jnp.cumsum(sizes, axis=0) - sizes)[here],
        receive,
    )
    return lax.ragged_all_to_all(*operands, axis_name=axis)


def _ragged_fwd(axis, room, rows, sizes):
    return _ragged_all_to_all(axis, room, rows, sizes), (sizes, len(rows))


def _ragged_bwd(axis, room, residuals, ct):
    sizes, num_rows = residuals
    return _ragged_all_to_all(axis, num_rows, ct, sizes.T), None


_ragged_all_to_all.defvjp(_ragged_fwd, _ragged_bwd)
