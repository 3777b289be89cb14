"""Saved views: a screen's filter, order and columns under a name, in the user's configuration directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from clusterd.errors import ClusterError, ConfigError


@dataclass(frozen=True, slots=True)
class SavedView:
    """Filter, order and columns of a screen."""

    name: str
    screen: str
    filter: str = ""
    sort: str = ""
    descending: bool = False
    columns: tuple[str, ...] = ()


_WAITING = ("id", "place", "name", "priority", "user", "waited", "why")

BUILT_IN = (
    SavedView("usual", "queue"),
    SavedView("waiting", "queue", "state:queued", "place", False, _WAITING),
    SavedView("failed", "queue", filter="state:failed", columns=("id", "name", "state", "user", "why")),
    SavedView("moves", "decisions", filter="decision:start migration"),
    SavedView("turned down", "decisions", filter="decision:hold"),
    SavedView("with free devices", "fleet", filter="free:>0"),
    SavedView("not usable", "fleet", filter="!state:^up$"),
)  # fmt: skip


def path() -> Path:
    """File of the saved views."""
    if given := os.environ.get("CLUSTERD_VIEWS"):
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_config_dir("clusterd")) / "views.json"


def load(file: Path) -> list[SavedView]:
    """Read the saved views.

    Raises:
        ConfigError: the file exists but is not a list of views.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[SavedView])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} holds no saved views ({error}): move it away") from None


def save(file: Path, view: SavedView) -> None:
    """Add a view; replaces the one of the same name and screen.

    Raises:
        ClusterError: the file cannot be written.
    """
    others = [old for old in load(file) if (old.name, old.screen) != (view.name, view.screen)]
    _write(file, [*others, view])


def forget(file: Path, view: SavedView) -> None:
    """Delete a view.

    Raises:
        ClusterError: the file cannot be written.
    """
    _write(file, [old for old in load(file) if old != view])


def _write(file: Path, views: list[SavedView]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps([asdict(view) for view in views], indent=1), encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise ClusterError(f"{file} cannot be written: {error.strerror}: set CLUSTERD_VIEWS") from None
