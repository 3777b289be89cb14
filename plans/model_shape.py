"""Shape of a model as far as plans depend on it: sizes, layers, possible cuts. No weights, no code, no torch.

A rank of the job describes its own module (`clusterd.train.inspect.describe`); the daemon stores the description.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of the whole model."""

    name: str  # global: blocks.17.attn.qkv.weight
    shape: tuple[int, ...]
    dtype_bytes: int
    layer: int  # index into the model's layers; -1: none
    trainable: bool = True
    tp_dim: int = -1  # dimension that tensor parallelism cuts; -1: replicated

    @property
    def size_bytes(self) -> int:
        """Size of the whole parameter."""
        return math.prod(self.shape) * self.dtype_bytes

    def local_bytes(self, tp: int) -> int:
        """Size of one tensor-parallel shard."""
        return self.size_bytes if self.tp_dim < 0 else -(-self.size_bytes // tp)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer, the unit of pipeline cuts. All bytes and operations are for one sample."""

    name: str  # path of the submodule: blocks.17
    block: bool = False  # one of a list of equal blocks: unit of recomputation and of ZeRO-3 gathering
    activation_bytes: int = 0  # saved for the backward pass by every tensor-parallel shard
    activation_tp_bytes: int = 0  # saved for the backward pass, divided among the shards
    output_bytes: int = 0  # input of the next layer; a pipeline sends it
    tp_reduced_bytes: int = 0  # results that shards sum or gather in the forward pass
    flops: int = 0  # of the forward pass; the backward pass has about twice as many
    cast_bytes: int = (
        0  # copies of parameters in another precision, saved for the backward pass; independent of the batch
    )
    weight: int = 0  # by which `plans.stages` cuts pipelines; 0 in all layers: parameter bytes


@dataclass(frozen=True, slots=True)
class BufferShape:
    """A tensor that is not trained (running statistics, tables), held by every rank that has its layer."""

    name: str
    shape: tuple[int, ...]
    dtype_bytes: int
    layer: int  # as in `ParameterShape`


@dataclass(frozen=True, slots=True)
class OddSlot:
    """Optimizer state tensor of another shape than its parameter; it goes with the state."""

    parameter: int  # index
    name: str
    shape: tuple[int, ...]
    dtype_bytes: int


_NOT_SIGNED = ("steps", "samples", "optimizer_temporaries_ratio")

_SIGNED_SINCE = (
    "precision", "pipeline_refused", "optimizer_by_tensor", "find_unused_parameters", "noncontiguous", "repeated_block",
    "hooked", "sparse", "written", "written_by_samples", "written_anew", "written_known", "parts", "gathers",
    "sees_batch",
)  # fmt: skip
"""Fields added later: with their defaults, signatures are the same as before."""

Slots = tuple[tuple[str, int], ...]
"""Optimizer state of a parameter's own shape: name, bytes per element; in the order of transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A job's model, optimizer and training parameters."""

    parameters: tuple[ParameterShape, ...]
    layers: tuple[LayerShape, ...]
    global_batch: int
    samples: int  # of the data set; 0: a stream
    steps: int = 0  # that the job trains; 0: unknown
    precision: str = "fp32"  # of the computation
    pipeline: bool = False  # the job names its layers in order of application
    pipeline_refused: str = ""  # why the named layers cannot be stages
    tp_plan: bool = False  # the job names the tensors to cut
    tp_degrees: tuple[int, ...] = ()  # valid numbers of shards, without 1
    tp_refused: tuple[tuple[int, str], ...] = ()  # invalid numbers that were tried, and why
    tied: tuple[tuple[str, ...], ...] = ()  # names of one and the same parameter
    loss_bytes: int = 0  # saved by the loss function for the backward pass, per sample
    optimizer: str = "AdamW"
    optimizer_state_ratio: float = 2.0  # bytes of optimizer state per byte of trainable parameter
    optimizer_temporaries_ratio: float = 0.0  # the same for temporaries of an update on CUDA; 0 if unknown
    optimizer_elementwise: bool = True  # parts of a tensor can be updated separately
    optimizer_by_tensor: bool = True  # tensors can be updated separately
    find_unused_parameters: bool = False  # steps or replicas may use different parameters
    noncontiguous: str = ""  # a non-contiguous parameter
    parts: tuple[str, ...] = ()  # submodules that have losses and optimizers of their own, in the order of updates
    repeated_block: str = ""  # a block that is in a list more than once
    hooked: str = ""  # a parameter with a gradient hook
    sees_batch: str = "global"  # "replica": the script accepts that a loss or a model sees a part of the batch
    gathers: bool = False  # the loss or the model gathers the samples of all replicas
    sparse: str = ""  # a parameter with sparse gradients
    written: tuple[str, ...] = ()  # parameters that the forward pass writes into
    written_by_samples: str = ""  # one of them, if the values depend on samples or random numbers
    written_anew: str = ""  # one of them, if a second pass would write other values
    written_known: bool = True  # fake tensors could run the model
    parameter_groups: tuple[
        tuple[int, ...], ...
    ] = ()  # of the optimizer, by index; empty: one group of all trainable ones
    slots: tuple[Slots, ...] = ()  # distinct kinds; empty: unknown, use the ratio
    parameter_slots: tuple[int, ...] = ()  # kind of each parameter's slots; -1: none
    odd_slots: tuple[OddSlot, ...] = ()
    buffers: tuple[BufferShape, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Size of the whole model."""
        return sum(p.size_bytes for p in self.parameters)

    @property
    def state_bytes(self) -> int:
        """Size of parameters and their optimizer state, each once."""
        trained = sum(p.size_bytes for p in self.parameters if p.trainable)
        return self.parameter_bytes + round(self.optimizer_state_ratio * trained)

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def signature(self) -> str:
        """Hash that is equal for jobs with equal step times; length of training and data set are excluded."""
        values = {k: v for k, v in self.to_dict().items() if k not in _NOT_SIGNED}
        for name in _SIGNED_SINCE:
            if values[name] == _DEFAULTS[name]:
                del values[name]
        by_bytes = not self.pipeline or self.layer_weights() == self._layer_bytes()
        for layer in values["layers"]:
            if not layer["cast_bytes"]:
                del layer["cast_bytes"]
            if by_bytes:
                del layer["weight"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def slots_of(self, parameter: int) -> Slots:
        """Slots of a parameter, by index."""
        if self.parameter_slots:
            kind = self.parameter_slots[parameter]
            return self.slots[kind] if kind >= 0 else ()
        shape = self.parameters[parameter]
        size = round(self.optimizer_state_ratio * shape.dtype_bytes) if shape.trainable else 0
        return (("state", size),) if size else ()

    def layer_weights(self) -> tuple[int, ...]:
        """Weight of each layer; `plans.stages` cuts pipelines by them."""
        weights = tuple(layer.weight for layer in self.layers)
        return weights if any(weights) else self._layer_bytes()

    def _layer_bytes(self) -> tuple[int, ...]:
        """Parameter bytes of each layer."""
        sizes = [0] * len(self.layers)
        for parameter in self.parameters:
            if parameter.layer >= 0:
                sizes[parameter.layer] += parameter.size_bytes
        return tuple(sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and the wire."""
        values = asdict(self)
        # Rows instead of maps: there are thousands of parameters.
        values["parameters"] = [
            [p.name, list(p.shape), p.dtype_bytes, p.layer, p.trainable, p.tp_dim] for p in self.parameters
        ]
        values["odd_slots"] = [[o.parameter, o.name, list(o.shape), o.dtype_bytes] for o in self.odd_slots]
        values["buffers"] = [[b.name, list(b.shape), b.dtype_bytes, b.layer] for b in self.buffers]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelShape:
        """Parse the result of `to_dict`; unknown fields of newer versions are ignored.

        Raises:
            ValueError: it is not a description of a model.
        """
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        try:
            known["parameters"] = tuple(
                ParameterShape(name, tuple(shape), *rest) for name, shape, *rest in known["parameters"]
            )
            known["layers"] = tuple(LayerShape(**layer) for layer in known["layers"])
            known["tp_degrees"] = tuple(known.get("tp_degrees", ()))
            known["tp_refused"] = tuple((int(n), str(why)) for n, why in known.get("tp_refused", ()))
            known["tied"] = tuple(tuple(names) for names in known.get("tied", ()))
            known["parts"] = tuple(known.get("parts", ()))
            known["written"] = tuple(known.get("written", ()))
            known["parameter_groups"] = tuple(tuple(group) for group in known.get("parameter_groups", ()))
            known["slots"] = tuple(tuple((str(n), int(b)) for n, b in slots) for slots in known.get("slots", ()))
            known["parameter_slots"] = tuple(known.get("parameter_slots", ()))
            known["odd_slots"] = tuple(OddSlot(p, n, tuple(s), b) for p, n, s, b in known.get("odd_slots", ()))
            known["buffers"] = tuple(BufferShape(n, tuple(s), b, x) for n, s, b, x in known.get("buffers", ()))
            return cls(**known)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a description of a model: {error!r}") from error


_DEFAULTS = {f.name: f.default for f in fields(ModelShape)}
