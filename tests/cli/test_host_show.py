"""`clusterd host show`."""

from __future__ import annotations

from typing import Any, Self

import pytest
from click.testing import CliRunner

from clusterd.cli import hosts


class OneHost:
    """A daemon that knows one host, where somebody uses as much of the GPU as the driver does not say."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def call(self, verb: str, host: str) -> dict[str, Any]:
        assert (verb, host) == ("host", "a")
        row = {"name": "a", "state": "up", "why": "", "drained": None, "address": "10.0.0.1", "boot_id": "b"}
        process = {"pid": 42, "user": "bob", "memory_bytes": None, "ours": False}
        facts = {"disk_free_bytes": 1, "shm_free_bytes": 1, "shm_bytes": 1}
        facts |= {"gpus": [{"index": 0, "processes": [process]}]}
        return {**row, "cpu_cores": 0, "memory_bytes": 1, "devices": [], "link": {"facts": facts}}


def test_use_of_a_gpu_is_told_where_the_driver_does_not_say_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "Client", OneHost)
    answer = CliRunner().invoke(hosts.host, ["show", "a"], catch_exceptions=False)
    assert "gpu0: used outside the queue by bob (pid 42)" in answer.output
