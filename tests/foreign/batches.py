"""Data sets and batches: splits, iterables, mappings, different lengths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset, random_split

from tests.foreign.registry import script

SAMPLES = 64


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def points() -> TensorDataset:
    random = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=random), torch.randint(4, (SAMPLES,), generator=random))


class Graded(Dataset[Any]):
    """Noise that grows with a difficulty."""

    def __init__(self) -> None:
        self.points, self.difficulty = points(), 0.0

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return x * (1 + self.difficulty), y


def arguments(**others: Any) -> dict[str, Any]:
    """Arguments that the scripts of this module have in common."""
    return {
        "model": perceptron,
        "loss": F.cross_entropy,
        "data": points(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "global_batch": 8,
        "steps": 12,
        **others,
    }


@script()
def split_at_random() -> dict[str, Any]:
    """`random_split` before training, without a generator."""
    training, _ = random_split(points(), [0.75, 0.25])
    return arguments(data=training)


class Unnumbered(IterableDataset[Any]):
    """Samples without a number."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points())


@script(advice="`state_dict` and `load_state_dict`, as `stream`")
def iterable() -> dict[str, Any]:
    """`IterableDataset` without a position."""
    return arguments(data=Unnumbered())


class Stream(IterableDataset[Any]):
    """Samples without a number, with a position."""

    def __init__(self) -> None:
        self.points, self.read = points(), 0

    def __iter__(self) -> Iterator[Any]:
        while self.read < SAMPLES:
            self.read += 1
            yield self.points[self.read - 1]
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@script("dp=2,accumulation=2")
def stream() -> dict[str, Any]:
    """`IterableDataset` with `state_dict` and `load_state_dict`."""
    return arguments(data=Stream())


def shard() -> tuple[int, int]:
    """Rank and number of processes, as scripts for `torchrun` ask for them."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class StreamByRank(Stream):
    """Leaves out the samples of other ranks, once there are any."""

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = shard()
        yield from itertools.islice(super().__iter__(), rank, None, ranks)


@script(advice="leave sharding to clusterd")
def stream_by_rank() -> dict[str, Any]:
    """A stream that each epoch shards by the rank that it then has."""
    return arguments(data=StreamByRank(), global_batch=16)


class ByRank(Dataset[Any]):
    """The samples of this rank."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return SAMPLES // shard()[1]

    def __getitem__(self, index: int) -> Any:
        rank, ranks = shard()
        return self.points[index * ranks + rank]


@script(advice="leave sharding to clusterd")
def sharded_by_rank() -> dict[str, Any]:
    """A data set that shards by the rank that it has when a sample is read."""
    return arguments(data=ByRank())


class Mapped(Dataset[Any]):
    """Samples that are mappings, with a text beside the tensors."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.points[index]
        return {"x": x, "y": y, "name": f"sample {index}"}


class TakesNames(nn.Module):
    """Takes the entries of a batch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(x)}


@script("dp=2,accumulation=2")
def mappings() -> dict[str, Any]:
    """Batches that are mappings, with texts."""
    return arguments(
        model=TakesNames, data=Mapped(), loss=lambda output, batch: F.cross_entropy(output["logits"], batch["y"])
    )


class Tagger(nn.Module):
    """A tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 16, padding_idx=0), nn.Linear(16, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(words))


class Sentences(Dataset[Any]):
    """Sentences of 2 to 12 words, and a tag for each word."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        words = torch.randint(1, 32, (2 + index * 7 % 11,), generator=random)
        return words, words % 5


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences padded to the longest one."""
    words, tags = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(list(words), batch_first=True), pad(list(tags), batch_first=True, padding_value=-100)


@script(advice="return (sum, weight)")
def lengths() -> dict[str, Any]:
    """Sentences of different lengths, the mean over all words."""
    return arguments(
        model=Tagger, data=Sentences(), collate_fn=padded, loss=lambda out, tags: F.cross_entropy(out.mT, tags)
    )


@script("dp=2,accumulation=2")
def lengths_weighted() -> dict[str, Any]:
    """Sentences of different lengths, a loss of (sum, weight)."""

    def loss(out: torch.Tensor, tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(out.mT, tags, reduction="sum"), (tags >= 0).sum()

    return arguments(model=Tagger, data=Sentences(), collate_fn=padded, loss=loss)


class Noisy(Dataset[Any]):
    """Samples with noise of torch's generator, as augmentations draw it."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.points[index]
        return x + 0.1 * torch.randn(8), y


@script(advice="seed a generator of your own by the sample's number")
def augmented() -> dict[str, Any]:
    """A data set that draws augmentations from torch's generator."""
    return arguments(data=Noisy())


class Numbered(Dataset[Any]):
    """Points, with their numbers."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return (x, torch.tensor(index)), y


@script()
def python_augmentation() -> dict[str, Any]:
    """Augmentation by `random` in the data set."""

    class Noisy(Numbered):
        def __getitem__(self, index: int) -> Any:
            x, y = self.points[index]
            return x * random.uniform(0.5, 1.5), y

    return arguments(data=Noisy())


class CountsEpochs(Sampler[int]):
    """A permutation that depends on how often it was iterated."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return SAMPLES


@script()
def sampler_that_counts() -> dict[str, Any]:
    """A sampler that seeds itself by the epochs that it counts."""
    return arguments(sampler=CountsEpochs(), global_batch=32)
