"""Schemas for editors: they accept what clusterd accepts, and refuse what it refuses for its key or its type."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec import Struct

from clusterd import config as configuration
from clusterd.cli.head_node.schemas import (
    CheckpointKeys,
    DaemonFile,
    DaemonKeys,
    HostKeys,
    JobKeys,
    LimitKeys,
    NotifyKeys,
    PlanTable,
    ResourceKeys,
    TenantKeys,
    WebKeys,
    schema,
)
from clusterd.cli.main import cli
from clusterd.config import of_values
from clusterd.core.policies import POLICIES
from clusterd.daemon.api.validation import refuse_malformed
from clusterd.daemon.settings import refuse_unknown
from clusterd.errors import UsageError
from clusterd.plans.plan import Plan
from clusterd.submission.job_file import parse_job
from tests.conftest import REPOSITORY

PROBES: tuple[Any, ...] = (
    -1, 0, 1, 2, 300, 1.5, True, False, "", "x", "2", "90s", "1GiB", "a100:1", "dp=1", "own", "ssh", "info", "elastic",
    "env:HOME", "scheme://x", [], ["x"], [1], [300], [True], ["dp=1"], [{"dp": 1}], ["job failed"], ["scheme://x"],
    {}, {"a": "b"}, {"a": 1}, {"a": "env:HOME"}, {"a": "/b"}, {"dp": 1}, {"dp": 0}, {"a": ["scheme://x"]},
)  # fmt: skip

WRONG_TYPE = re.compile(r"it must be (text|a whole number|true or false|a list|a table|a number)\b|put it in quotes")

JOB: dict[str, Any] = {"command": ["true"]}
JOB_TABLES: list[tuple[tuple[str, ...], type[Struct]]] = [
    ((), JobKeys),
    (("resources",), ResourceKeys),
    (("resources", "plan"), PlanTable),
    (("limits",), LimitKeys),
    (("checkpoints",), CheckpointKeys),
]
DAEMON_TABLES: list[tuple[tuple[str, ...], type[Struct]]] = [
    ((), DaemonFile),
    (("daemon",), DaemonKeys),
    (("hosts", "gpu01"), HostKeys),
    (("tenants", "vision"), TenantKeys),
    (("notify",), NotifyKeys),
    (("web",), WebKeys),
]


@pytest.fixture(autouse=True)
def _own_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CLUSTERD_SOCKET", "CLUSTERD_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


def in_job(values: dict[str, Any]) -> str | None:
    """Message with which a job of these keys is refused."""
    try:
        refuse_malformed(parse_job(values, Path("job.toml"), "job.toml").spec)
    except UsageError as error:
        return str(error)
    return None


def in_daemon(values: dict[str, Any]) -> str | None:
    """Message with which these settings are refused."""
    try:
        refuse_unknown(of_values(values, None), "clusterd.toml")
    except UsageError as error:
        return str(error)
    return None


def in_schema(values: dict[str, Any], root: type[Struct]) -> str | None:
    """Message of the type that the schema describes."""
    try:
        msgspec.convert(values, root)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def at(path: tuple[str, ...], base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Content of a file with these values in the table at the path."""
    for key in reversed(path):
        values = {key: values}
    return {**base, **values}


def test_files_of_the_examples_and_pages_have_no_mistake() -> None:
    jobs = [tomllib.loads(file.read_text()) for file in (REPOSITORY / "examples").rglob("job.toml")]
    pages = [page.read_text() for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))]
    parts = [tomllib.loads(text) for page in pages for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    jobs += [part for part in parts if "command" in part]
    daemons = [part for part in parts if "daemon" in part]
    assert [in_schema(values, JobKeys) for values in jobs] == [None] * len(jobs) and len(jobs) >= 5
    assert [in_schema(values, DaemonFile) for values in daemons] == [None] * len(daemons) and daemons


@pytest.mark.parametrize("kind", ["job", "daemon"])
def test_a_value_is_underlined_if_its_type_is_refused_and_only_if_it_is_refused(kind: str) -> None:
    base, tables, root = (JOB, JOB_TABLES, JobKeys) if kind == "job" else ({}, DAEMON_TABLES, DaemonFile)
    refusal = in_job if kind == "job" else in_daemon
    wrong, accepted = [], 0
    for path, table in tables:
        for key in table.__struct_fields__:
            for value in PROBES:
                values = at(path, base, {key: value})
                message, underlined = refusal(values), in_schema(values, root)
                accepted += message is None
                if message is None and underlined:
                    wrong.append(f"{values}: {underlined}, but it is valid")
                elif message and WRONG_TYPE.search(message) and not underlined:
                    wrong.append(f"{values}: {message}, but the schema accepts it")
    assert wrong == []
    assert accepted > 100


@pytest.mark.parametrize("table", ["", "resources", "resources.plan", "limits", "checkpoints"])
def test_unknown_keys_of_a_job_are_underlined(table: str) -> None:
    values = at(tuple(filter(None, table.split("."))), JOB, {"nam": 1})
    assert in_job(values) and in_schema(values, JobKeys)


def test_keys_are_those_of_the_daemon() -> None:
    daemon = {configuration.SPELLED.get(f.name, f.name) for f in fields(configuration.Config)}
    assert set(DaemonFile.__struct_fields__) == {"daemon", *configuration.TABLES}
    assert set(DaemonKeys.__struct_fields__) == daemon - set(configuration.TABLES)
    for keys, known in (
        (HostKeys, configuration.HostOptions),
        (NotifyKeys, configuration.Notify),
        (WebKeys, configuration.Web),
        (TenantKeys, configuration.Tenant),
        (PlanTable, Plan),
    ):
        assert set(keys.__struct_fields__) == {configuration.SPELLED.get(f.name, f.name) for f in fields(known)}, keys


def defaults(kind: str, tables: list[tuple[tuple[str, ...], type[Struct]]]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of each default in the schema."""
    found = schema(kind)
    for path, table in tables:
        shown = found if table.__name__ == found["title"] else found["definitions"][table.__name__]
        for key, described in shown["properties"].items():
            assert described["description"].endswith((".", '"')), key
            if "default" in described:
                yield (*path, key), described["default"]


def test_defaults_are_those_in_force() -> None:
    seen = 0
    job = parse_job(JOB, Path("job.toml"), "job.toml")
    for path, value in defaults("job", [table for table in JOB_TABLES if table[1] is not PlanTable]):
        assert parse_job(at(path[:-1], JOB, {path[-1]: value}), Path("job.toml"), "job.toml") == job, path
        seen += 1
    for path, value in defaults("daemon", DAEMON_TABLES[:2]):
        assert of_values(at(path[:-1], {}, {path[-1]: value}), None) == of_values({}, None), path
        seen += 1
    assert seen > 20
    assert msgspec.to_builtins(PlanTable()) == {
        f.name: getattr(Plan(), f.name) for f in fields(Plan) if f.name != "shares"
    }


@pytest.mark.parametrize("kind", ["job", "daemon"])
def test_what_is_printed_is_a_schema_without_further_keys(kind: str) -> None:
    answer = CliRunner().invoke(cli, ["config", "schema", kind])
    assert answer.exit_code == 0, answer.output
    printed = json.loads(answer.output)
    assert "additionalProperties" in printed
    for name, part in {"": printed, **printed["definitions"]}.items():
        assert part["additionalProperties"] is False, name
    references = re.findall(r'"\$ref": "([^"]*)"', answer.output)
    assert {ref.removeprefix("#/definitions/") for ref in references} == set(printed["definitions"])
    if kind == "daemon":
        assert printed["definitions"]["DaemonKeys"]["properties"]["policy"]["enum"] == sorted(POLICIES)
