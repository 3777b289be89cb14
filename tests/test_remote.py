"""Place of the socket that leads to a daemon on another machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterd import remote


def test_a_runtime_directory_with_a_long_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ssh refused to listen there, with words about a forwarding specification."""
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert remote._directory() == Path(f"/tmp/clusterd-remote-{os.getuid()}")
