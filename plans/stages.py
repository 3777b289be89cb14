"""Cuts of a pipeline into stages, the same for ranks, memory estimate and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def split_layers(weights: Sequence[int], stages: int) -> list[range]:
    """Layers of each stage: consecutive ranges that minimise the heaviest stage.

    Every stage gets a layer with weight; among equal cuts the one with the earliest boundaries wins.

    Args:
        weights: of the layers, in proportion to their operations.
    Raises:
        ValueError: fewer layers with parameters than stages.
    """
    return list(_split(tuple(weights), stages))


@lru_cache(maxsize=1024)  # a model has few distinct cuts, each requested thousands of times
def _split(weights: tuple[int, ...], stages: int) -> tuple[range, ...]:
    count = len(weights)
    if sum(w > 0 for w in weights) < stages:
        raise ValueError(
            f"{stages} stages need {stages} layers with parameters, there are {sum(w > 0 for w in weights)}"
        )
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    # best[n]: minimal heaviest stage over layers [n:] with the stages so far, and the end of its first stage.
    best: list[tuple[int, int] | None] = [
        (before[count] - before[n], count) if before[count] > before[n] else None for n in range(count + 1)
    ]
    rounds = [best]
    for _ in range(stages - 1):
        longer: list[tuple[int, int] | None] = []
        for n in range(count + 1):
            options = [
                (max(before[end] - before[n], rest[0]), end)
                for end in range(n + 1, count)
                if before[end] > before[n] and (rest := best[end]) is not None
            ]
            longer.append(min(options, default=None))
        best = longer
        rounds.append(best)
    cuts: list[range] = []
    start = 0
    for table in reversed(rounds):
        choice = table[start]
        assert choice is not None
        cuts.append(range(start, choice[1]))
        start = choice[1]
    return tuple(cuts)
