"""Implausible link measurements are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterd.train.process import probe


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda data: None)


def test_a_link_on_which_more_takes_no_longer_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise would give petabytes per second, and plans would be chosen by it."""
    times = iter([2e-5, 1.9e-5])

    def seconds(work: Callable[[], object], device: torch.device, repeats: int = 0) -> float:
        return next(times) if repeats else 1.0

    monkeypatch.setattr(probe, "_seconds", seconds)
    figures = probe.probe(torch.device("cpu"), hosts=1)
    assert "local_rate" not in figures
    assert figures["local_latency_s"] == pytest.approx(1e-5)


def test_links_between_gpus_are_measured_with_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, reduced = torch.ones, []

    def on_the_host(count: int, device: torch.device) -> Any:
        reduced.append(4 * count)
        return ones(1)

    monkeypatch.setattr(torch, "ones", on_the_host)
    monkeypatch.setattr(probe, "_seconds", lambda *_, **__: 2e-5 + reduced[-1] / 300e9)
    rate, delay_s = probe._ring_rate(torch.device("cuda"))
    assert max(reduced) == 64 << 20
    assert (rate, delay_s) == (pytest.approx(300e9), pytest.approx(1e-5, rel=0.01))
