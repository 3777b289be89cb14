"""Cards by their data sheets: how fast a type of GPU is beside another, before anything ran on it.

What a training step is bound by (matrix products in half or in single precision, memory) differs by model, and is not
known for one that ran on a single type. So the speed-up is the geometric mean of the three ratios, and their spread is
its uncertainty: small between cards of one generation, large between those that were built for different work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

UNEXPLAINED = 0.15
"""Standard deviation of the logarithm of a speed-up between cards whose three ratios are equal: clocks under load,
cooling, kernels that are tuned for one of them."""


@dataclass(frozen=True, slots=True)
class Card:
    """Peak rates of one GPU, without sparsity."""

    half: float  # TFLOP/s of matrix products in half precision, sums in single precision
    single: float  # TFLOP/s in single precision, without TF32
    memory: float  # GB/s


CARDS: Mapping[str, Card] = {
    "K80": Card(4.4, 4.4, 240),  # one of the two GPUs on the board
    "P100": Card(18.7, 9.3, 732),
    "V100": Card(125, 15.7, 900),
    "V100 PCIE": Card(112, 14, 900),
    "GTX 1080 Ti": Card(11.3, 11.3, 484),
    "RTX 2080 Ti": Card(53.8, 13.4, 616),
    "TITAN RTX": Card(130.5, 16.3, 672),
    "Quadro RTX 8000": Card(130.5, 16.3, 672),
    "T4": Card(65, 8.1, 320),
    "A10": Card(125, 31.2, 600),
    "A10G": Card(70, 35, 600),
    "A30": Card(165, 10.3, 933),
    "A40": Card(149.7, 37.4, 696),
    "A100": Card(312, 19.5, 2039),
    "A100 40GB": Card(312, 19.5, 1555),
    "A800": Card(312, 19.5, 2039),
    "RTX A4000": Card(76.7, 19.2, 448),
    "RTX A5000": Card(111.1, 27.8, 768),
    "RTX A6000": Card(154.8, 38.7, 768),
    "RTX 3080": Card(59.5, 29.8, 760),
    "RTX 3090": Card(71, 35.6, 936),
    "RTX 4080": Card(97.5, 48.7, 717),
    "RTX 4090": Card(165.2, 82.6, 1008),
    "RTX 5090": Card(209.5, 104.8, 1792),
    "RTX 6000 Ada": Card(364, 91.1, 960),
    "L4": Card(121, 30.3, 300),
    "L40": Card(181, 90.5, 864),
    "L40S": Card(362, 91.6, 864),
    "H100": Card(989, 67, 3350),
    "H100 PCIe": Card(756, 51, 2000),
    "H800": Card(989, 67, 3350),
    "H20": Card(148, 44, 4000),
    "H200": Card(989, 67, 4800),
    "GH200": Card(990, 67, 4000),
    "B200": Card(2250, 75, 8000),
}
"""Cards by the words of their name that NVML reports too; the vendors' data sheets."""


def card(name: str) -> Card | None:
    """Data sheet of a GPU by its name as NVML reports it; None if none is known, as of a MIG slice.

    The entry with the most words of which each stands in the name.
    """
    words = _words(name)
    if "mig" in words:  # a part of the card, at a part of its rates
        return None
    matching = [entry for entry in CARDS if _words(entry) <= words]
    return CARDS[max(matching, key=lambda entry: len(_words(entry)))] if matching else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", name.lower()))


def speed_up(new: str, known: Iterable[str]) -> tuple[str, float, float] | None:
    """The type among `known` that tells most about `new`, and what it tells; None without data sheets.

    Returns:
        its name, the logarithm of the speed of `new` relative to it, and that logarithm's standard deviation.
    """
    card_of_new = card(new)
    found = []
    for name in known:
        if card_of_new is not None and (other := card(name)) is not None:
            ratios = np.log([getattr(card_of_new, f) / getattr(other, f) for f in ("half", "single", "memory")])
            found.append((name, float(ratios.mean()), float(np.hypot(ratios.std(), UNEXPLAINED))))
    return min(found, key=lambda one: (one[2], one[0]), default=None)
