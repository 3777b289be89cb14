"""The daemon accepts the documented configuration, which shows every key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from clusterd import config
from clusterd.errors import ConfigError
from clusterd.types import Tenant
from tests.conftest import REPOSITORY


def test_the_documented_example_is_complete(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (REPOSITORY / "docs" / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "clusterd.toml"
    file.write_text(example)
    known = config.load(file)
    assert known.tenants == {"vision": Tenant(quota=16, share=2.0, device_hours=5000.0, members=("ann", "@vision"))}
    assert (known.host_lost_after_s, known.workdir_bytes_max) == (120.0, 256 * 10**6)
    shown = tomllib.loads(example)
    names = {config.SPELLED.get(f.name, f.name) for f in fields(config.Config)}
    assert names == set(shown["daemon"]) | set(shown) - {"daemon"}
    assert set(shown["hosts"]["gpu01"]) == {config.SPELLED.get(f.name, f.name) for f in fields(config.HostOptions)}


def test_settings_that_nobody_may_look_for_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is closed to the daemon was taken for a bug of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ("x" * 300)))  # the system refuses to look there for anybody
    monkeypatch.delenv("CLUSTERD_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=r"clusterd\.toml: File name too long"):
        config.load()
