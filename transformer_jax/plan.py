"""What a run will need, before it is paid for: nothing here touches an accelerator.

Parameters, optimizer state and FLOPs are counted exactly; activations are what JAX keeps for the
backward pass, before the compiler fuses or moves anything. With libtpu installed, topology.py asks
the compiler itself.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import AbstractMesh

from transformer_jax.config import Config, ModelConfig
from transformer_jax.model import Model
from transformer_jax.model.dropout import dropout_key
from transformer_jax.sharding import MESH_AXES, batch_shards, mesh_sizes
from transformer_jax.topology import Topology, can_compile, compile_for, parse_topology
from transformer_jax.train.loss import CHUNK_LOGITS
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import abstract_state
from transformer_jax.train.step import batch_metrics
from transformer_jax.types import Batch

_ROOM = 0.9  # share of the memory that a plan may fill
_LOGITS_HELD = 3  # float32 copies of a chunk of logits: the logits, their exponentials, d_logits

Shape = tuple[int, int, int]  # rows, source length, target length of a batch


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """Number of parameters of the embeddings, the encoder, the decoder, and in total."""
    parts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(Model(model).abstract_params()):
        part = str(path[0].key).split("_")[0]
        name = part if part in ("encoder", "decoder") else "embeddings"
        parts[name] = parts.get(name, 0) + leaf.size
    return parts | {"total": sum(parts.values())}


def flops_per_step(model: ModelConfig, shape: Shape) -> float:
    """FLOPs of the matrix products of one update: forward, and twice that backward.

    A product [n, k] x [k, m] is 2nkm. Attention counts every pair of positions, masked or not, as
    it is computed; recomputation by --model.remat is not counted, as is usual for utilisation.
    """
    c, (rows, S, T) = model, shape
    H, G = c.num_heads, c.num_kv_heads or c.num_heads
    K, U = c.d_k or c.d_model // H, c.d_v or c.d_model // H
    query_out = c.d_model * H * (K + U)  # multiplications for each query, and
    key_value = c.d_model * G * (K + U)  # for each position that is attended to
    feed = c.d_model * c.d_ff * (3 if c.activation in ("swiglu", "geglu") else 2)
    scores = lambda queries, keys: queries * keys * H * (K + U)
    own = lambda n: n * (query_out + key_value + feed) + scores(n, n)
    encoder = c.encoder_layers * own(S)
    decoder = c.decoder_layers * own(T)
    if c.encoder_layers:
        decoder += c.decoder_layers * (T * query_out + S * key_value + scores(T, S))
    logits = T * c.d_model * c.vocab_size
    return 3.0 * 2.0 * rows * (encoder + decoder + logits)


def longest_shape(config: Config, row_multiple: int) -> Shape:
    """The batch of the longest sequences, which needs the most memory."""
    data = config.data
    S = data.max_source_tokens if config.model.encoder_layers else 0
    T = data.max_target_tokens
    if data.batching == "packed" and data.packed_length:
        S, T = S and max(S, data.packed_length), max(T, data.packed_length)
    rows = max(data.global_batch_tokens // max(S, T) // row_multiple, 1) * row_multiple
    return rows, S, T


def kept_bytes(model: ModelConfig, shape: Shape) -> int:
    """Bytes that the forward pass keeps for the backward pass, on one device, parameters apart."""
    rows, S, T = shape
    ids = lambda length: jax.ShapeDtypeStruct((rows, length), jnp.int32)
    source = ids(S) if S else None
    batch = Batch(source, source, ids(T), ids(T), ids(T))

    def kept(params: Any, batch: Batch) -> list[jax.Array]:
        loss = lambda params: (
            batch_metrics(Model(model), params, batch, 0.1, dropout_key(0, 0)).loss
        )
        return jax.tree.leaves(jax.vjp(loss, params)[1])

    jaxpr = jax.make_jaxpr(kept)(Model(model).abstract_params(), batch).jaxpr
    given = {id(variable) for variable in jaxpr.invars}
    made = [v for v in jaxpr.outvars if isinstance(v, Var) and id(v) not in given]
    new = {id(variable): variable.aval for variable in made}
    return sum(_bytes(aval) for aval in new.values())


def plan(config: Config, topology_text: str = "", mfu: float = 0.4) -> dict[str, Any]:
    """Everything a plan says, as one tree for JSON. Bytes are those of one device.

    Args:
        config: of the run.
        topology_text: such as v5e:2x4; empty: as many v5e as the mesh has places.
        mfu: model FLOPs utilisation to expect, a share of the peak.

    Raises:
        ConfigError: the mesh does not fit the topology.
    """
    config = _planned(config, topology_text)
    sizes = [size for size in dataclasses.astuple(config.mesh)]
    topology = (
        parse_topology(topology_text)
        if topology_text
        else Topology("v5e", (math.prod(max(size, 1) for size in sizes),))
    )
    mesh = AbstractMesh(tuple(mesh_sizes(config.mesh, topology.devices)), MESH_AXES)
    hardware, shards = topology.hardware, batch_shards(mesh)
    shape = longest_shape(config, shards * config.train.micro_batches)
    state = abstract_state(
        Model(config.model), make_optimizer(config), mesh, config.train.ema_decay > 0
    )
    memory = {
        "parameters": _shard_bytes(state.params),
        "optimizer": _shard_bytes((state.opt_state, state.average)),
        "gradients": _shard_bytes(state.params) * (2 if config.train.micro_batches > 1 else 1),
        **_activations(config, shape, shards),
    }
    total = sum(memory.values())
    fixed = total - memory["activations"]
    row = memory["activations"] / (shape[0] // shards)
    room = max(_ROOM * hardware.memory_bytes - fixed, 0.0) / row
    flops = flops_per_step(config.model, shape)
    seconds = flops / (mfu * hardware.peak_flops * topology.devices)
    compiles = bool(topology_text) and can_compile(topology)
    result = {
        "parameters": parameters_by_part(config.model),
        "checkpoint_bytes": sum(map(_bytes, jax.tree.leaves(state))),
        "topology": str(topology),
        "mesh": dict(mesh.shape),
        "batch": dict(zip(("rows", "source_length", "target_length"), shape, strict=True)),
        "flops_per_step": flops,
        "memory_per_device": memory | {"total": total},
        "device_memory_bytes": hardware.memory_bytes,
        "fits": total <= _ROOM * hardware.memory_bytes,
        "recommended_global_batch_tokens": int(room) * shards * max(shape[1:]),
        "mfu": mfu,
        "step_secs": seconds,
        "target_tokens_per_sec": shape[0] * shape[2] / seconds,
        "assumes": _assumptions(topology, topology_text, compiles),
    }
    if compiles:
        result["compiled"] = compile_for(config, topology, shape)
    return result


def _planned(config: Config, topology_text: str) -> Config:
    """The config with its vocabulary, and with the layers compiled as its devices will do it."""
    model = config.model
    vocab_size = model.vocab_size or config.tokenizer.vocab_size
    layers = "scanned" if model.layers == "auto" else model.layers
    model = dataclasses.replace(model, vocab_size=vocab_size, layers=layers)
    return dataclasses.replace(config, model=model)


def _activations(config: Config, shape: Shape, shards: int) -> dict[str, int]:
    """What one device holds of a micro-batch: activations, and a chunk of the logits."""
    rows = shape[0] // shards // config.train.micro_batches
    one, two = (kept_bytes(config.model, (n, *shape[1:])) for n in (1, 2))
    chunk = min(CHUNK_LOGITS // shards, rows * shape[2] * config.model.vocab_size)
    return {"activations": (two - one) * rows, "logits": 4 * _LOGITS_HELD * chunk}


def _assumptions(topology: Topology, named: str, compiles: bool) -> list[str]:
    said = [
        "sequences are as long as --data.max-source-tokens and --data.max-target-tokens allow",
        "activations are what JAX keeps for the backward pass, spread over data and fsdp alone",
        f"a device has {topology.hardware.memory_bytes / 1e9:.1f} GB, of which {_ROOM:.0%} are "
        f"used, and {topology.hardware.peak_flops / 1e12:.0f} TFLOP/s in bfloat16",
        "the time of a step is FLOPs over peak times mfu (--mfu)",
    ]
    if not named:
        said.append("no --topology: the devices are TPU v5e, as many as the mesh names")
    elif topology.is_tpu and not compiles:
        said.append("libtpu is not installed (make plan-tools): nothing was compiled")
    return said


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _shard_bytes(tree: Any) -> int:
    """Bytes of the part that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
