"""What of a model matters for choosing plans: sizes, layers, what can be cut. No weights, no code, no torch.

A rank of the job describes its own module (`clusterd.train.inspect.describe`); the daemon keeps the description.
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
    layer: int  # index into the model's layers; -1: in none of them
    trainable: bool = True
    tp_dim: int = -1  # the dimension that tensor parallelism cuts; -1: every shard holds it whole

    @property
    def size_bytes(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape) * self.dtype_bytes

    def local_bytes(self, tp: int) -> int:
        """Of one tensor-parallel shard."""
        return self.size_bytes if self.tp_dim < 0 else -(-self.size_bytes // tp)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: what a pipeline is cut between. All bytes and operations are for one sample."""

    name: str  # path of the submodule: blocks.17
    block: bool = False  # one of a list of alike: the unit of recomputing and of ZeRO-3 gathering
    activation_bytes: int = 0  # kept for the backward pass by every tensor-parallel shard alike
    activation_tp_bytes: int = 0  # kept for the backward pass, divided among the shards
    output_bytes: int = 0  # what the next layer gets, and what a pipeline sends
    tp_reduced_bytes: int = 0  # results that shards add up or gather in the forward pass
    flops: int = 0  # of the forward pass; the backward pass has about twice as many
    cast_bytes: int = 0  # copies of parameters in another precision, kept for the backward pass; of any batch


@dataclass(frozen=True, slots=True)
class BufferShape:
    """A tensor of the model that is not trained: running statistics, tables. Every rank that has its layer holds it."""

    name: str
    shape: tuple[int, ...]
    dtype_bytes: int
    layer: int  # as in `ParameterShape`


@dataclass(frozen=True, slots=True)
class OddSlot:
    """A tensor that the optimizer keeps for a parameter and that has another shape; it goes where the state goes."""

    parameter: int  # index
    name: str
    shape: tuple[int, ...]
    dtype_bytes: int


_NOT_SIGNED = ("steps", "samples", "optimizer_temporaries_ratio")

_SIGNED_SINCE = (
    "precision", "pipeline_refused", "optimizer_by_tensor", "find_unused_parameters", "noncontiguous", "repeated_block",
    "hooked", "loss", "loss_learns", "gradients_added", "gradients_bent", "sparse", "by_frequency", "counted",
    "written", "written_by_samples", "written_anew", "written_known",
)  # fmt: skip
"""Fields that came later: with their defaults, models are signed as they were before."""

Slots = tuple[tuple[str, int], ...]
"""What the optimizer keeps in a parameter's own shape: name, bytes per element; in the order in which it is moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A job's model and what the job does with it."""

    parameters: tuple[ParameterShape, ...]
    layers: tuple[LayerShape, ...]
    global_batch: int
    samples: int  # of the data set
    steps: int = 0  # that the job wants to train; 0: not known
    precision: str = "fp32"  # in which it computes
    pipeline: bool = False  # whether the job names its layers, in the order in which they are applied
    pipeline_refused: str = ""  # why they cannot be stages though they are named
    tp_plan: bool = False  # whether the job says how to cut tensors
    tp_degrees: tuple[int, ...] = ()  # numbers of shards that work, 1 left out
    tp_refused: tuple[tuple[int, str], ...] = ()  # numbers that were tried and do not, and why
    tied: tuple[tuple[str, ...], ...] = ()  # names of one and the same parameter
    loss_bytes: int = 0  # kept by the loss function for the backward pass, per sample
    optimizer: str = "AdamW"
    optimizer_state_ratio: float = 2.0  # bytes of optimizer state per byte of trainable parameter
    optimizer_temporaries_ratio: float = 0.0  # the same of what an update on CUDA makes beside it; 0 if not known, too
    optimizer_elementwise: bool = True  # whether parts of a tensor can be updated apart
    optimizer_by_tensor: bool = True  # whether tensors can be updated apart
    find_unused_parameters: bool = False  # whether steps or replicas may use different parameters
    noncontiguous: str = ""  # a parameter that is not laid out row by row
    repeated_block: str = ""  # a block that is in a list more than once
    hooked: str = ""  # a parameter whose gradient goes through a hook of the script's
    loss: str = "mean"  # over the samples it is given; "sum", or "other"
    loss_learns: bool = False  # whether it computes with parameters of the model, beside the model's outputs
    gradients_added: bool = False  # whether the backward pass adds what does not depend on the loss
    gradients_bent: bool = False  # whether it makes something of gradients that is not in proportion to the loss
    sparse: str = ""  # a parameter whose gradient has only the rows that were looked up
    by_frequency: str = ""  # one whose gradient depends on how often rows were looked up in a batch
    counted: str = ""  # an attribute of a module that is a number, and another one after each forward pass
    written: tuple[str, ...] = ()  # parameters that the forward pass writes into
    written_by_samples: str = ""  # one of them, where what is written depends on the samples, or is drawn
    written_anew: str = ""  # one of them, where a second pass would write something else
    written_known: bool = True  # whether fake tensors could tell
    parameter_groups: tuple[tuple[int, ...], ...] = ()  # of the optimizer, by index; empty: one of all trainable ones
    slots: tuple[Slots, ...] = ()  # the kinds that there are; empty: not known, the ratio stands for them
    parameter_slots: tuple[int, ...] = ()  # kind of each parameter's slots; -1: it has none
    odd_slots: tuple[OddSlot, ...] = ()
    buffers: tuple[BufferShape, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Of the whole model."""
        return sum(p.size_bytes for p in self.parameters)

    @property
    def state_bytes(self) -> int:
        """Parameters and what the optimizer keeps for them, each once."""
        trained = sum(p.size_bytes for p in self.parameters if p.trainable)
        return self.parameter_bytes + round(self.optimizer_state_ratio * trained)

    @property
    def flops(self) -> int:
        """Of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def signature(self) -> str:
        """The same for jobs whose steps take the same time: how long they train, and on what, is left out."""
        values = {k: v for k, v in self.to_dict().items() if k not in _NOT_SIGNED}
        for name in _SIGNED_SINCE:
            if values[name] == _DEFAULTS[name]:
                del values[name]
        for layer in values["layers"]:
            if not layer["cast_bytes"]:
                del layer["cast_bytes"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def slots_of(self, parameter: int) -> Slots:
        """Of a parameter, by index."""
        if self.parameter_slots:
            kind = self.parameter_slots[parameter]
            return self.slots[kind] if kind >= 0 else ()
        shape = self.parameters[parameter]
        size = round(self.optimizer_state_ratio * shape.dtype_bytes) if shape.trainable else 0
        return (("state", size),) if size else ()

    def layer_weights(self) -> tuple[int, ...]:
        """Parameter bytes of each layer: by these a pipeline is cut (`plans.stages`)."""
        weights = [0] * len(self.layers)
        for parameter in self.parameters:
            if parameter.layer >= 0:
                weights[parameter.layer] += parameter.size_bytes
        return tuple(weights)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the wire."""
        values = asdict(self)
        # Thousands of parameters: rows, not maps.
        values["parameters"] = [
            [p.name, list(p.shape), p.dtype_bytes, p.layer, p.trainable, p.tp_dim] for p in self.parameters
        ]
        values["odd_slots"] = [[o.parameter, o.name, list(o.shape), o.dtype_bytes] for o in self.odd_slots]
        values["buffers"] = [[b.name, list(b.shape), b.dtype_bytes, b.layer] for b in self.buffers]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelShape:
        """The shape of `to_dict`; fields of newer versions are left out.

        Raises:
            ValueError: it is no description of a model.
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
            known["written"] = tuple(known.get("written", ()))
            known["parameter_groups"] = tuple(tuple(group) for group in known.get("parameter_groups", ()))
            known["slots"] = tuple(tuple((str(n), int(b)) for n, b in slots) for slots in known.get("slots", ()))
            known["parameter_slots"] = tuple(known.get("parameter_slots", ()))
            known["odd_slots"] = tuple(OddSlot(p, n, tuple(s), b) for p, n, s, b in known.get("odd_slots", ()))
            known["buffers"] = tuple(BufferShape(n, tuple(s), b, x) for n, s, b, x in known.get("buffers", ()))
            return cls(**known)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no description of a model: {error!r}") from error


_DEFAULTS = {f.name: f.default for f in fields(ModelShape)}
