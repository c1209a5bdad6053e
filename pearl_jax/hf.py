"""MoE layers from and to checkpoints of Hugging Face models.

    checkpoint = hf.Checkpoint("folder")  # config.json and safetensors files
    layer = hf.load_layer(checkpoint.config, checkpoint, layer=3)

The families that are known are those of pearl_jax.families. Needs Flax, and safetensors
for files: `pip install 'pearl-jax[nn]'`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pearl_jax import families, nn
from pearl_jax.expert_parallel import ExpertParallel
from pearl_jax.families import PARAMETERS
from pearl_jax.families import layer_arguments as layer_arguments
from pearl_jax.families import moe_layers as moe_layers
from pearl_jax.nn import nnx

# Whatever the checkpoint has. A bias of bfloat16 would change which experts are chosen.
_DTYPES = {"router.selection_bias": jnp.float32, "router.expert_table": jnp.int32}
# What precedes "layers.", first of all in text models.
_ROOTS = ("model.", "language_model.model.", "model.language_model.", "")
# Ends of names of quantised weights, and of what belongs to them.
_QUANTISED = ("_scale_inv", "_scale", "_scales", ".scale", ".scales", "_blocks", "_packed")
_QUANTISED += (".qweight", ".qzeros", ".absmax")
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_INTEGERS = {"I64": np.int64, "I32": np.int32}


def load_layer(
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    layer: int | None = None,
    prefix: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype=None,
    rngs: nnx.Rngs | None = None,
    **options,
) -> nn.MoE:
    """One MoE layer of a checkpoint, as nn.MoE.

    Known are the model_types mixtral, qwen3_moe, qwen3_next, deepseek_v3, deepseek_v32,
    kimi_k2, glm4_moe, glm_moe_dsa, minimax_m2, gpt_oss, llama4, deepseek_v4 and kimi_linear
    (also Kimi-K3). The experts are one tensor, as transformers 5 has them in memory, or
    tensors of their own, as in most files; either where a family has had both.

    Weights are read expert by expert, with a mesh only those of this process. They are
    sharded by the names that nn.MoE gives their axes, by way of nnx.logical_axis_rules;
    without rules, "expert" is the mesh axis of that name, "embed" is "fsdp" and "mlp" is
    "tensor", where the mesh has them.

    Args:
      config: config.json; of a multimodal model its text_config counts.
      tensors: arrays by name, of NumPy or JAX; or a Checkpoint.
      layer: its number, or None where names are those of one layer, "experts.gate_up_proj".
      prefix: all that precedes "layers." in the names, by default the first of "model.",
        "language_model.model.", "model.language_model." and "" that is there. Without a
        layer, all that precedes the names of the layer, by default nothing.
      mesh: to shard the parameters over. The layer computes with them where they are, by
        ExpertParallel(mesh) if it has an axis "expert", unless another is given as parallel.
      param_dtype: of the parameters, by default what each has in the checkpoint. The
        selection bias is float32 in any case.
      rngs: for jitter, where that is among the options.
      **options: further arguments of nn.MoE, like dtype.

    Raises:
      ValueError: a tensor is missing, quantised, of another shape than config says, or of
        no use to the layer, and is named; or config is not understood.

    >>> import numpy as np
    >>> from pearl_jax import hf
    >>> config = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 32,
    ...           "num_local_experts": 4, "num_experts_per_tok": 2}
    >>> tensors = {"gate.weight": np.ones((4, 16), np.float32),
    ...            "experts.gate_up_proj": np.ones((4, 64, 16), np.float32),
    ...            "experts.down_proj": np.ones((4, 16, 32), np.float32)}
    >>> hf.load_layer(config, tensors).gate_up.shape
    (4, 16, 2, 32)
    """
    family = families.Config(config).family
    block = _find_block(family, tensors, layer, prefix)
    arguments = layer_arguments(config, hash_routing="gate.tid2eid" in block)
    sizes = families.axis_sizes(arguments)
    if mesh is not None and "expert" in mesh.axis_names:
        options.setdefault("parallel", ExpertParallel(mesh))
    make = lambda: nn.MoE(**arguments, **options, rngs=nnx.Rngs(0))
    graph, state = nnx.split(nnx.eval_shape(make))
    variables = dict(nnx.to_flat_state(state))

    block.check_quantised()
    paths = {_name(path): path for path in variables}
    sources = {name: block.source(family, name, sizes) for name in PARAMETERS if name in paths}
    block.check_unused(sources.values(), sizes)
    dtypes = {name: block.dtype(source, sizes) for name, source in sources.items()}
    for name, source in sources.items():
        variable = variables[paths[name]]
        dtype = _DTYPES.get(name, param_dtype or dtypes[name])
        sharding = None if mesh is None else _sharding(variable, mesh)
        value = _read(block, source, PARAMETERS[name], sizes, dtype, sharding)
        variables[paths[name]] = variable.replace(value)
    moe = nnx.merge(graph, nnx.from_flat_state(variables))
    if moe.router.rngs is not None:
        moe.router.rngs = (rngs or nnx.Rngs(0))["jitter"].fork()
    return moe


def load_layers(
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    layers: Iterable[int] | None = None,
    progress: bool = True,
    **options,
) -> Iterator[tuple[int, nn.MoE]]:
    """The MoE layers of a model one by one, as (number, nn.MoE).

    Args:
      config, tensors: as of load_layer.
      layers: their numbers, by default moe_layers(config).
      progress: whether a bar shows it.
      **options: further arguments of load_layer.

    Raises:
      ValueError: as load_layer.

    >>> from pearl_jax import hf
    >>> def load(folder):
    ...     checkpoint = hf.Checkpoint(folder)
    ...     return dict(hf.load_layers(checkpoint.config, checkpoint))
    """
    layers = moe_layers(config) if layers is None else list(layers)
    if progress:
        from tqdm import tqdm

        layers = tqdm(layers, desc="MoE layers", unit="layer")
    for layer in layers:
        yield layer, load_layer(config, tensors, layer=layer, **options)


def export_layer(
    moe: nn.MoE | nnx.State,
    config: Mapping[str, Any],
    *,
    form: str = "fused",
    layer: int | None = None,
    prefix: str | None = None,
) -> dict[str, np.ndarray]:
    """The tensors of a layer by the names of its family: the inverse of load_layer, bit by bit.

    Args:
      moe: a layer; or a State of some of its parameters or of gradients, as of nnx.grad.
      config: as of load_layer.
      form: "fused" is that of transformers 5 in memory, "per_expert" that of most files.
      layer, prefix: as of load_layer; by default the prefix of text models.

    Raises:
      ValueError: the family has no such form or parameter, or config says another shape.
    """
    keys = families.Config(config)
    if form not in keys.family.forms:
        raise ValueError(
            f"export_layer: {keys.model_type} has the forms {[*keys.family.forms]}, got {form!r}"
        )
    names = keys.family.forms[form]
    sizes = families.axis_sizes(layer_arguments(config)) | {"v": keys.get("vocab_size")}
    state = moe if isinstance(moe, nnx.State) else nnx.state(moe)
    variables = {_name(path): variable for path, variable in nnx.to_flat_state(state)}
    tensors = {}
    for name, axes in PARAMETERS.items():
        if name not in variables:
            continue
        if name not in names.sources:
            raise ValueError(f"export_layer: {keys.model_type} has no {name}")
        value = np.asarray(variables[name][...])
        if value.shape != families.shape(axes, sizes):
            raise ValueError(
                f"export_layer: {name} must be {families.shape(axes, sizes)} by the config, got "
                f"{value.shape}"
            )
        if name == "router.expert_table":
            value = value.astype(np.int64)
        for tensor, part in names.sources[name].write(value, axes, sizes).items():
            tensors[names.head(layer, prefix) + tensor] = part
    return tensors


class Checkpoint(Mapping):
    """Tensors of safetensors files by name, of which only what is indexed is read.

    Args:
      path: a folder, where model.safetensors.index.json tells the file of each tensor if
        it is there; or one file.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        self._folder = path if path.is_dir() else path.parent
        self._files = {}
        index = path / "model.safetensors.index.json"
        if index.exists():
            self._file_of = json.loads(index.read_text())["weight_map"]
        else:
            files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
            if not files:
                raise FileNotFoundError(f"Checkpoint: no *.safetensors in {path}")
            self._file_of = {}
            for file in files:
                self._file_of |= dict.fromkeys(self._open(file.name).keys(), file.name)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the folder."""
        return json.loads((self._folder / "config.json").read_text())

    def _open(self, name):
        if name not in self._files:
            from safetensors import safe_open

            self._files[name] = safe_open(self._folder / name, framework="numpy")
        return self._files[name]

    def __getitem__(self, name):
        return _Lazy(self._open(self._file_of[name]).get_slice(name))

    def __iter__(self):
        return iter(self._file_of)

    def __len__(self):
        return len(self._file_of)


class _Lazy:
    """An array of a file."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.shape = tuple(tensor.get_shape())
        dtype = tensor.get_dtype()
        self.dtype = (_FLOATS | _INTEGERS).get(dtype, dtype)

    def __getitem__(self, index):
        return self._tensor[index]


class _Block(Mapping):
    """The tensors of one layer, by their names after the head that they share."""

    def __init__(self, tensors, head, names):
        self._tensors, self._head = tensors, head
        self._names = {name.removeprefix(head) for name in names if name.startswith(head)}

    def __getitem__(self, name):
        return self._tensors[self._head + name]

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)

    def _some(self, names):
        """The first three in full."""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(repr(self._head + name) for name in names[:3]) + more

    def check_quantised(self):
        if quantised := sorted(name for name in self if name.endswith(_QUANTISED)):
            raise ValueError(
                f"load_layer: weights must not be quantised, got {self._some(quantised)}"
            )

    def source(self, family, parameter, sizes):
        """Where a parameter is, all of it."""
        sources = [
            form.sources[parameter] for form in family.forms.values() if parameter in form.sources
        ]
        there = [s for s in sources if not self._names.isdisjoint(s.tensors(sizes))]
        source = (there or sources)[0]
        if missing := [name for name in source.tensors(sizes) if name not in self]:
            raise ValueError(f"load_layer: missing {self._some(missing)}, the {parameter}")
        return source

    def check_unused(self, sources, sizes):
        used = {name for source in sources for name in source.tensors(sizes)}
        if unused := sorted(self._names - used):
            raise ValueError(f"load_layer: the layer has no use for {self._some(unused)}")

    def dtype(self, source, sizes):
        """Of all tensors of a source, with their shapes checked."""
        names, want = source.tensors(sizes), families.shape(source.axes, sizes)
        allowed = _INTEGERS if source.axes == "v k" else _FLOATS
        dtypes = {}
        for name in names:
            shape, dtype = tuple(self[name].shape), self[name].dtype
            if shape != want:
                raise ValueError(
                    f"load_layer: {self._some([name])} must be {want} by the config, got {shape}"
                )
            if dtype not in allowed.values():
                raise ValueError(
                    f"load_layer: {self._some([name])} must not be quantised, got {dtype}"
                )
            dtypes[np.dtype(dtype)] = name
        if len(dtypes) > 1:
            raise ValueError(
                f"load_layer: {self._some([*dtypes.values()])} must have one dtype, got "
                f"{', '.join(map(str, dtypes))}"
            )
        return jax.dtypes.canonicalize_dtype(*dtypes)


def _find_block(family, tensors, layer, prefix):
    if layer is None:
        return _Block(tensors, prefix or "", tensors)
    names = [name for name in tensors if f"layers.{layer}." in name]
    roots = _ROOTS if prefix is None else (prefix,)
    blocks = dict.fromkeys(form.block for form in family.forms.values())
    heads = [f"{root}layers.{layer}.{block}." for root in roots for block in blocks]
    for head in heads:
        if any(name.startswith(head) for name in names):
            return _Block(tensors, head, names)
    raise ValueError(f"load_layer: no name starts with any of {heads}")


def _read(block, source, axes, sizes, dtype, sharding):
    """A parameter, each shard by itself, and that expert by expert."""
    shape, row_axes = families.shape(axes, sizes), axes.removeprefix("e ")

    @functools.cache  # replicas of a shard are read once
    def read(bounds):
        slices = tuple(slice(*b) for b in bounds)
        out = np.empty([stop - start for start, stop in bounds], dtype)
        if row_axes == axes:
            out[...] = source.read(block, axes, sizes)[slices]
            return out

        def read_expert(row, expert):
            out[row] = source.read(block, row_axes, sizes, expert)[slices[1:]]

        with ThreadPoolExecutor() as pool:  # one thread transposes 0.3 GB/s
            for _ in pool.map(read_expert, range(len(out)), range(*bounds[0])):
                pass  # raises what reading raised
        return out

    def shard(index):
        return read(tuple(i.indices(n)[:2] for i, n in zip(index, shape)))

    if sharding is None:
        return jnp.asarray(shard((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, shard)


def _sharding(variable, mesh):
    """By the names of its axes."""
    names: Any = nnx.get_partition_spec(variable)
    mesh_axes = {"embed": "fsdp", "mlp": "tensor"} | {name: name for name in mesh.axis_names}
    axes = [mesh_axes.get(name) for name in names.get_raw_value()]
    return NamedSharding(mesh, P(*(axis if axis in mesh.axis_names else None for axis in axes)))


def _name(path):
    return ".".join(map(str, path))
