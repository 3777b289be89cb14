"""Where a pipeline is cut: the same answer for whoever asks (ranks, memory estimate, layouts)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def split_layers(weights: Sequence[int], stages: int) -> list[range]:
    """Layers of each stage: consecutive, and the heaviest stage as light as can be.

    Every stage gets a layer with weight; among equal cuts the one with the earliest boundaries is taken.

    Args:
        weights: parameter bytes of each layer.
    Raises:
        ValueError: fewer layers with parameters than stages.
    """
    return list(_split(tuple(weights), stages))


@lru_cache(maxsize=1024)  # the plans of a model are cut in a few ways, and each is asked for thousands of times
def _split(weights: tuple[int, ...], stages: int) -> tuple[range, ...]:
    count = len(weights)
    if sum(w > 0 for w in weights) < stages:
        raise ValueError(
            f"{stages} stages need {stages} layers with parameters, there are {sum(w > 0 for w in weights)}"
        )
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    # best[n] is the least heaviest stage over layers [n:] in the stages considered so far, and where its first ends.
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
