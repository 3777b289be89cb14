"""Data sheets of GPUs by their names."""

from __future__ import annotations

import pytest

from clusterd.profiling.fleet import CARDS, card, speed_up


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIE"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_reports(name: str, entry: str) -> None:
    assert card(name) is CARDS[entry]


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-80GB MIG 10gb", "a card", "cpu"]
)
def test_of_a_slice_and_of_an_unknown_card_nothing_is_said(name: str) -> None:
    """Regression: a seventh of a card was taken to be as fast as the whole."""
    assert card(name) is None
    assert speed_up(name, ["NVIDIA H100 PCIe"]) is None
    assert speed_up("NVIDIA H100 PCIe", [name]) is None
