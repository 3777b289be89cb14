"""Fingerprint of a data set: its length and a few of its samples, to find processes that have other data.

Numbers are summarized and compared with a tolerance, because hosts may decode an image differently in the last digits.
A sample that differs between two readings is a random one. Then none is compared: where a coin is tossed for each, some
are alike by chance.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.process.exits import Refused
from clusterd.train.process.run_in_fork import run_in_fork
from clusterd.train.process.seeding import all_generator_states, seed_everything

SAMPLES = 4
MEANS = 8
"""Mean values that summarize a tensor: of so many stretches of it."""
TOLERANCE = 1e-3

Fingerprint = dict[str, Any]
"""job, length (None of a stream), draws (True if samples draw from the global generators), and samples: [index, summary
of each part, or None for a random sample]."""


def fingerprint_of(data: Any, job: str) -> Fingerprint | None:
    """Fingerprint of a map-style data set; None for others. Samples are read in a forked child."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return None
    return run_in_fork(lambda: _read(data, job))


def check_same_on_all_ranks(own: Fingerprint | None) -> None:
    """Compare the fingerprints of all ranks; every rank must call it.

    Raises:
        Refused: on all ranks, if some have other data.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, own)
    for rank, other in enumerate(fingerprints):
        if why := difference(fingerprints[0], other):
            raise Refused(f"the data of rank {rank} and rank 0 differ: {why}. {ADVICE}")


ADVICE = (
    "Every process must build the same data set: sort what a folder lists, give random_split and shuffles a seeded "
    "generator of their own, and read no clock"
)


def difference(one: Fingerprint | None, other: Fingerprint | None) -> str:
    """First difference of two fingerprints, in words; empty if there is none or one is unknown."""
    if not one or not other:
        return ""
    if one["length"] != other["length"]:
        lengths = [f["length"] for f in (other, one)]
        return " instead of ".join("a stream" if length is None else f"{length} samples" for length in lengths)
    if len(one["samples"]) != len(other["samples"]):
        return f"{len(other['samples'])} samples instead of {len(one['samples'])}"
    if any(sample is None for fingerprint in (one, other) for _, sample in fingerprint["samples"]):
        return ""
    for (index, first), (_, second) in zip(one["samples"], other["samples"], strict=True):
        if not alike(first, second):
            return f"sample {index} is another one"
    return ""


def _read(data: Any, job: str) -> Fingerprint:
    length = len(data)
    indices = sorted({length * i // SAMPLES for i in range(SAMPLES)} | {length - 1}) if length else []
    samples, draws = [], False
    for index in indices:
        sample, drawn = _sample(data, index)
        samples.append([index, sample])
        draws = draws or drawn
    return {"job": job, "length": length, "draws": draws, "samples": samples}


def drop_random(one: list[Any], again: list[Any]) -> list[Any]:
    """The summaries of one reading, with None for those of random samples, which another reading has otherwise."""
    return [a if alike(a, b) else None for a, b in zip(one, again, strict=False)]


def summary(sample: Any) -> list[Any]:
    """Summary of each part of a nested sample."""
    parts: list[Any] = []
    _summarize(sample, parts)
    return parts


def _sample(data: Any, index: int) -> tuple[list[Any] | None, bool]:
    """Summary of a sample, None for a random one; and whether it draws from the global generators."""
    readings, drawn = [], False
    for seed in (index, index):
        seed_everything(seed)
        before = all_generator_states()
        readings.append(summary(data[index]))
        drawn = drawn or all_generator_states() != before
    return readings[0] if alike(*readings) else None, drawn


def _summarize(value: Any, parts: list[Any]) -> None:
    """Append a summary of each part of a nested sample."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            parts.append(str(key))
            _summarize(value[key], parts)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _summarize(part, parts)
    elif isinstance(value, (bool, int, float)):
        parts.append([float(value)])
    elif isinstance(value, (str, bytes)):
        parts.append(zlib.crc32(value.encode() if isinstance(value, str) else value))
    elif (array := _as_tensor(value)) is not None:
        flat = array.detach().reshape(-1)[: 1 << 20].to("cpu", torch.float64)
        parts.append(str(tuple(array.shape)))
        parts.append(
            [stretch.mean().item() for stretch in flat.tensor_split(min(MEANS, len(flat)))] if len(flat) else []
        )
    else:  # an object of the script's own, which only its collate_fn can read
        parts.append(type(value).__name__)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Tensor of what is one, or of what NumPy can read as one: an image."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(_array(value))
        return None if tensor.is_complex() or tensor.is_sparse else tensor
    except (TypeError, ValueError, RuntimeError):
        return None


def _array(value: Any) -> Any:
    import numpy as np

    if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        raise TypeError
    return np.array(value)


def alike(one: list[Any], other: list[Any]) -> bool:
    """True if two summaries are of the same sample."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if isinstance(a, list) and isinstance(b, list):
            scale = max((abs(x) for x in a if x == x), default=0.0)
            if len(a) != len(b) or any(abs(x - y) > TOLERANCE * scale for x, y in zip(a, b, strict=True)):
                return False
        elif a != b:
            return False
    return True
