"""TOML files of the daemon's settings and of jobs: reading, unknown keys."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterd.errors import ConfigError


def read_toml(file: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML; names line and column.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows marks texts so
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is no text: give the path of a TOML file") from None
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"{file}: {error}") from None
    return parse_toml(text, str(file))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ConfigError: it is not TOML; names line and column.
    """
    try:
        return tomllib.loads(text)
    except ValueError as error:  # not TOML, or a number with more digits than Python parses
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: a value is nested too deeply") from None


def check_keys(
    table: Mapping[str, Any], known: Iterable[str], where: str, sections: Mapping[str, str] | None = None
) -> None:
    """Refuse unknown keys and suggest the nearest known one.

    Args:
        sections: of keys that another one has.
    Raises:
        ConfigError: names the key and `where`.
    """
    names = sorted(known)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names)}"
            if section := (sections or {}).get(key):
                hint = f"it belongs into [{section}]"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
