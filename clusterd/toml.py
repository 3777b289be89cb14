"""TOML files of the daemon's settings and of jobs: reading, unknown keys, and every mistake with its line.

Mistakes are found by a validation that raises at the first. Every message names a key. The entry to blame is the one of
that name without which the message disappears; it is taken out, and the rest is validated again.
"""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterd.errors import ConfigError, UsageError


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
            hint = nearest(key, names) or f"known here: {', '.join(names)}"
            if section := (sections or {}).get(key):
                hint = f"it belongs into [{section}]"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def nearest(key: str, names: Iterable[str]) -> str:
    """Question for the known key that is most like this one; empty: none is."""
    near = difflib.get_close_matches(key, [*names], 1)
    return f"did you mean {near[0]!r}?" if near else ""


Keys = tuple[str, ...]
"""Keys from the top of the file to an entry."""

_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")


def refuse_mistakes(file: Path, values: dict[str, Any], validate: Callable[[dict[str, Any]], object]) -> None:
    """Refuse a file with a line for each mistake.

    Args:
        values, validate: as of `mistakes`.
    Raises:
        ConfigError: there are some.
    """
    if _first(values, validate) is None:
        return
    found = mistakes(file.read_text(encoding="utf-8-sig"), values, validate)
    raise ConfigError(
        "\n".join(f"{file}:{line}:{text.removeprefix(f'{file}:')}" if line else text for line, text in found)
    )


def mistakes(text: str, values: dict[str, Any], validate: Callable[[dict[str, Any]], object]) -> list[tuple[int, str]]:
    """Line and message of each mistake, in order of lines; line 0: of no single entry.

    Args:
        values: content of the file.
        validate: raises UsageError for the first mistake of such content.
    """
    tables, keys = _outline(text)
    lines = {**tables, **keys}
    values = copy.deepcopy(values)
    found: list[tuple[int, str]] = []
    removed: list[Keys] = []
    while (message := _first(values, validate)) is not None:
        blamed = next(
            (path for path in _named(values, message, tables) if _is_to_blame(values, path, message, validate)), None
        )
        said = message.partition("; did you mean")[0]  # a hint names keys that are right
        if not any(_names(said, path) for path in removed):  # else it is said of what was taken out
            found.append((_line(lines, blamed or ()), message))
        if blamed is None:
            break
        meant = re.search("did you mean '(.+?)'", message)  # that this one is missing follows
        removed += [blamed, (*blamed[:-1], meant[1])] if meant else [blamed]
        _remove(values, blamed)
    return sorted(found)


def _outline(text: str) -> tuple[dict[Keys, int], dict[Keys, int]]:
    """Lines, from 1, of the tables with a header and of the keys."""
    tables: dict[Keys, int] = {}
    keys: dict[Keys, int] = {}
    table: Keys = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            for depth in range(1, len(table) + 1):
                tables.setdefault(table[:depth], number)
        elif key := _KEY.match(line):
            keys.setdefault((*table, *_parts(key[1])), number)
    return tables, keys


def _parts(dotted: str) -> Keys:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _line(lines: dict[Keys, int], path: Keys) -> int:
    """Line of an entry, or of the inline table that it is in."""
    return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)


def _first(values: dict[str, Any], validate: Callable[[dict[str, Any]], object]) -> str | None:
    try:
        validate(values)
    except UsageError as error:
        return str(error)
    return None


def _named(values: dict[str, Any], message: str, tables: Container[Keys]) -> Iterator[Keys]:
    """Entries whose key is a word of the message, in the order of these words; tables, which come before keys, last."""
    entries = [(path in tables, _names(message, path), path) for path in _entries(values, ())]
    return (path for _, place, path in sorted(entries) if place)


def _names(message: str, path: Keys) -> int:
    """Place of the entry's key in the message, from 1; 0: it is not there."""
    found = re.search(rf"(?<![\w-]){re.escape(path[-1])}(?![\w-])", message)
    return found.start() + 1 if found else 0


def _entries(table: dict[str, Any], at: Keys) -> Iterator[Keys]:
    for key, value in table.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from _entries(value, (*at, key))


def _is_to_blame(
    values: dict[str, Any], path: Keys, message: str, validate: Callable[[dict[str, Any]], object]
) -> bool:
    without = copy.deepcopy(values)
    _remove(without, path)
    return _first(without, validate) != message


def _remove(values: dict[str, Any], path: Keys) -> None:
    for key in path[:-1]:
        values = values[key]
    del values[path[-1]]
