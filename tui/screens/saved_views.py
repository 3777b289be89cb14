"""Filter, order and columns of a screen under a name, kept in the user's configuration directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from clusterd.errors import ClusterError, ConfigError


@dataclass(frozen=True, slots=True)
class SavedView:
    """How a screen looks at its rows."""

    name: str
    screen: str
    filter: str = ""
    sort: str = ""
    descending: bool = False
    columns: tuple[str, ...] = ()


_WAITING = ("id", "name", "priority", "user", "waited", "reason")

BUILT_IN = (
    SavedView("everything", "queue"),
    SavedView("not over", "queue", filter="!state:finished|failed|cancelled"),
    SavedView("waiting", "queue", "state:queued", "waited", False, _WAITING),
    SavedView("failed", "queue", filter="state:failed", columns=("id", "name", "state", "user", "reason")),
    SavedView("moves", "decisions", filter="decision:migration"),
    SavedView("turned down", "decisions", filter="decision:turned"),
    SavedView("with free devices", "fleet", filter="free:>0"),
    SavedView("not usable", "fleet", filter="!state:^up$"),
)  # fmt: skip


def path() -> Path:
    """Where they are kept."""
    if given := os.environ.get("CLUSTERD_VIEWS"):
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_config_dir("clusterd")) / "views.json"


def load(file: Path) -> list[SavedView]:
    """Those of this user.

    Raises:
        ConfigError: the file is there and is not ours.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[SavedView])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} holds no saved views ({error}): move it away") from None


def save(file: Path, view: SavedView) -> None:
    """Keep one; of the same name and screen it replaces the old one.

    Raises:
        ClusterError: the file cannot be written.
    """
    kept = [old for old in load(file) if (old.name, old.screen) != (view.name, view.screen)]
    _write(file, [*kept, view])


def forget(file: Path, view: SavedView) -> None:
    """Keep it no longer.

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
