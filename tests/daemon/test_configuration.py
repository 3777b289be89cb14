"""The configuration that the documentation shows is one that the daemon takes, and shows every key there is."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from clusterd import config
from clusterd.types import Tenant
from tests.conftest import REPOSITORY


def test_the_documented_example_is_complete(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (REPOSITORY / "docs" / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "clusterd.toml"
    file.write_text(example)
    known = config.load(file)
    assert known.tenants == {"vision": Tenant(quota=16, share=2.0)}
    assert (known.host_lost_after_s, known.workdir_bytes_max) == (120.0, 256 * 10**6)
    shown = tomllib.loads(example)
    names = {config.SPELLED.get(f.name, f.name) for f in fields(config.Config)}
    assert names == set(shown["daemon"]) | set(shown) - {"daemon"}
    assert set(shown["hosts"]["gpu01"]) == {f.name for f in fields(config.HostOptions)}
