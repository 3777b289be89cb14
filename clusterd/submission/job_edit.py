"""Changes of a job as ``KEY=VALUE``, with the keys of a job file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clusterd.errors import UsageError
from clusterd.keys import NONE, Edit, keys_of, read_values
from clusterd.submission.job_file import fields_of
from clusterd.types import JobSpec


def parse_fields(given: Iterable[str]) -> dict[str, Any]:
    """Fields of a specification for ``time=2h``, ``gpus=a100:2``, ``after=12:any,prepare``.

    Raises:
        UsageError: names the invalid item.
    """
    keys = {key.short: key for key in keys_of(JobSpec) if key.edit is not Edit.NEVER}
    found: dict[str, Any] = {}
    items: dict[str, str] = {}
    for item in given:
        short, assigned, value = item.partition("=")
        if not assigned or short not in keys:
            raise UsageError(f"{item}: write KEY=VALUE with one of the keys {', '.join(keys)}")
        key = keys[short]
        items[key.name] = item
        if value in NONE and key.value.removable and not key.initial:
            found[key.name] = key.initial
        else:
            found |= read_values([(key, value)], lambda key: items[key.name], texts=True)
    if not found:
        raise UsageError(f"nothing to change: give KEY=VALUE with one of the keys {', '.join(keys)}")
    fields = fields_of(found, lambda key: items[key.name])
    return fields if fields["resources"] else {name: fields[name] for name in fields if name != "resources"}


def parse_changes(given: Iterable[str]) -> dict[str, Any]:
    """Changes for the verb ``edit``, in the form of the socket; see `parse_fields`."""
    import msgspec

    changes: dict[str, Any] = msgspec.to_builtins(parse_fields(given))
    for table in (changes, changes.get("resources", {})):
        table |= {name: list(value) for name, value in table.items() if isinstance(value, tuple)}
    return changes


def with_changes(spec: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """The specification with changes of `parse_changes`.

    Raises:
        UsageError: a value of the wrong type.
    """
    import msgspec

    before = msgspec.to_builtins(spec)
    resources = {**before["resources"], **changes.get("resources", {})}
    try:
        return msgspec.convert({**before, **changes, "resources": resources}, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"the change is not well-formed: {error}") from None
