"""Fingerprint of a data set: its length and some of its samples, to find processes that have other data.

Numbers are summarized and compared with a tolerance, because hosts may decode an image differently in the last digits.
Each sample is read twice. What differs between the two readings, in any sample, is random and compared in none: where a
coin is tossed for each sample, some are alike by chance.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.process import held
from clusterd.train.process.exits import Refused
from clusterd.train.process.seeding import all_generator_states, preserved_generators, seed_everything

SAMPLES = 8
LIMIT_S = 10.0
"""Time after which no further sample is read."""

MEANS = 8
"""Mean values that summarize a tensor: of so many stretches of it."""
TOLERANCE = 1e-3

Fingerprint = dict[str, Any]
"""job, length (None of a stream), draws (True if samples draw from the global generators), samples: [index, summary of
each part], random: numbers of the parts that are random, and order: checksum of what the sampler yields first."""


def fingerprint_of(data: Any, job: str, order: Callable[[], int] = lambda: 0) -> Fingerprint | None:
    """Fingerprint of a map-style data set; None for others.

    Samples are read in this process, as training does: a fork would share the position in open files, and connections.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return None
    with preserved_generators(), held.preserved(data):
        return {**_read(data, job), "order": order()}


def of_stream(job: str, samples: Sequence[Any]) -> Fingerprint:
    """Fingerprint of a stream, from samples that were read to train on them."""
    summaries = [[index, summary(sample)] for index, sample in enumerate(samples)]
    return {"job": job, "length": None, "draws": False, "samples": summaries, "random": []}


def check_same_on_all_ranks(own: Fingerprint | None, data: Any, order: Callable[[], int] = lambda: 0) -> None:
    """Compare the fingerprints of all ranks; every rank must call it.

    Args:
        own: taken without a process group, and taken again with it where `data` are map-style.
    Raises:
        Refused: on all ranks, if some have other data.
    """
    if own is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, (own, fingerprint_of(data, own["job"], order) or own))
    for rank, (first, again) in enumerate(fingerprints):
        if why := difference(fingerprints[0][0], first):
            raise Refused(f"the data of rank {rank} and rank 0 differ: {why}. {ADVICE}")
        if why := difference(first, again):
            raise Refused(f"rank {rank} of {len(fingerprints)} has other data than one process: {why}. {NO_SHARDS}")


NO_SHARDS = (
    "Data must not be sharded by rank or number of processes (dist.get_rank(), RANK, DistributedSampler): each process "
    "gets its share of every batch"
)
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
    if one.get("order", 0) != other.get("order", one.get("order", 0)):
        return "the sampler yields another order in the first epoch"
    if "random" not in one or "random" not in other:  # of an earlier version, whose samples were summarized otherwise
        return ""
    random = {*one["random"], *other["random"]}
    there = dict(other["samples"])
    for index, first in one["samples"]:
        second = there.get(index, first)  # another process may have had no time for it
        if not alike(*([p for i, p in enumerate(parts) if i not in random] for parts in (first, second))):
            return f"sample {index} is another one"
    return ""


def _read(data: Any, job: str) -> Fingerprint:
    length = len(data)
    indices = sorted({length * i // SAMPLES for i in range(SAMPLES)} | {length - 1}) if length else []
    samples: list[Any] = []
    random: set[int] = set()
    draws, began_s = False, time.monotonic()
    for index in indices:
        (first, left), (again, left_again) = (_reading(data, index, index) for _ in range(2))
        if not draws and any([*left, *left_again]):  # unless it seeds them itself, by the number of the sample
            other, left_then = _reading(data, index, index + 1)
            draws = left_then != left or not alike(first, other)
        random |= {i for i in range(len(first)) if len(first) != len(again) or not alike([first[i]], [again[i]])}
        samples.append([index, first])
        if (took_s := time.monotonic() - began_s) > LIMIT_S and index != indices[-1]:
            print(
                f"clusterd: reading {len(samples)} of the {len(indices)} samples that ranks compare took {took_s:.0f} "
                "seconds; the others are not compared",
                flush=True,
            )
            break
    return {"job": job, "length": length, "draws": draws, "samples": samples, "random": sorted(random)}


def _reading(data: Any, index: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Summary of a sample, and the states of the generators that reading it has changed, None for others."""
    seed_everything(seed)
    before = all_generator_states()
    read = summary(data[index])
    return read, [None if now == then else now for now, then in zip(all_generator_states(), before, strict=True)]


def summary(sample: Any, elements: int = 1 << 20) -> list[Any]:
    """Summary of each part of a nested sample or batch, from at most so many elements of a tensor."""
    parts: list[Any] = []
    _summarize(sample, parts, elements, ())
    return parts


def _summarize(value: Any, parts: list[Any], elements: int, around: tuple[int, ...]) -> None:
    """Append a summary of each part of a nested sample; `around`: objects that contain it."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            parts.append(str(key))
            _summarize(value[key], parts, elements, around)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _summarize(part, parts, elements, around)
    elif isinstance(value, (bool, int, float)):
        parts.append([float(value)])
    elif isinstance(value, (str, bytes)):
        parts.append(zlib.crc32(value.encode(errors="surrogatepass") if isinstance(value, str) else value))
    elif (array := _as_tensor(value)) is not None:
        flat = array.detach().reshape(-1)[:elements].to("cpu", torch.float64)
        parts.append(str(tuple(array.shape)))
        parts.append(
            [stretch.mean().item() for stretch in flat.tensor_split(min(MEANS, len(flat)))] if len(flat) else []
        )
    else:  # an object of the script's own, which only its collate_fn can read
        parts.append(type(value).__name__)
        if id(value) not in around and len(around) < held.DEPTH_MAX and not callable(value):
            _summarize(held.attributes(value), parts, elements, (*around, id(value)))


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
