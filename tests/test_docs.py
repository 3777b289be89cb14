"""Pages of the documentation name tests that exist, and files that are there."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from clusterd import config as configuration
from clusterd import projection
from clusterd.core import events as e
from clusterd.core.state import Migration
from clusterd.submission.job_keys import CheckpointKeys, JobKeys, LimitKeys, ResourceKeys
from clusterd.types import DeviceClaim, DeviceId, HostId, Tenant
from clusterd.units import TIMES
from plans.plan import Plan
from tests.core.conftest import Lab

ROOT = Path(__file__).parent.parent


def _tests() -> set[str]:
    trees = (ast.parse(file.read_text()) for file in (ROOT / "tests").rglob("test_*.py"))
    functions = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in functions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_tests_that_the_pages_name_exist() -> None:
    known = _tests()
    named = {
        (page.name, name)
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`(test_[a-z0-9_]+)`", page.read_text())
    }
    assert {(page, name) for page, name in named if name not in known} == set()
    assert len(named) > 50


def test_the_menu_of_the_site_has_every_page() -> None:
    menu = re.findall(r"^ +- .*: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_reference_of_job_files_has_every_key() -> None:
    page = (ROOT / "docs" / "job_file.md").read_text()
    named = {word for code in re.findall(r"`([^`]+)`", page) for word in re.split(r"[^a-z_]+", code)}
    keys = {key for table in (JobKeys, ResourceKeys, LimitKeys, CheckpointKeys) for key in table.__struct_fields__}
    assert keys - named == set()


def _rows() -> list[tuple[str, dict[str, Any]]]:
    """Rows as clients get them, with the heading that describes them in docs/json.md."""
    lab = Lab()
    host = HostId("a")
    lab.host("a", gpus=2)
    job, _ = lab.submit(devices=1)
    lab.run(job)
    state = lab.scheduler.state
    known, attempt = state.jobs[job], lab.attempt(job)
    plan = Plan()
    migration = Migration(number=1, generation=2, old_plan=plan, plan=plan, ranks={}, reason="", started_s=0.0)
    claim = DeviceClaim(id="1", devices=(DeviceId("a:gpu1"),), from_s=0.0, reason="demo")
    lab.tell(e.DevicesClaimed(**lab.at(), claim=claim))
    row = projection.host_row(state, state.hosts[host])
    return [
        ("## A job", projection.job_row(known, state)),
        ("## An attempt", projection.attempt_row(attempt)),
        ("## A migration", projection.migration_row(migration)),
        ("## A host", row),
        ("## A host", row["devices"][0]),
        ("## A host", row["claims"][0]),
    ]


def test_the_reference_of_json_has_every_field() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    for heading, row in _rows():
        section = page.partition(heading + "\n")[2].partition("\n## ")[0]
        assert set(row) - set(re.findall(r"`(\w+)`", section)) == set(), heading
    times = {name for _, row in _rows() for name in row if name in TIMES}
    assert {"started_s", "submitted_s", "since_s", "until_s"} <= times


def test_the_reference_of_settings_has_every_key() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    example = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    assert set(example) == {"daemon", *configuration.TABLES}
    daemon = {configuration.SPELLED.get(f.name, f.name) for f in fields(configuration.Config)}
    assert set(example["daemon"]) == daemon - set(configuration.TABLES)
    for table, kind in (
        (example["hosts"]["gpu01"], configuration.HostOptions),
        (example["notify"], configuration.Notify),
        (example["web"], configuration.Web),
        (example["tenants"]["vision"], Tenant),
    ):
        assert set(table) == {f.name for f in fields(kind)}, kind
    configuration.of_values({**example, "daemon": {**example["daemon"], "state_dir": "/x"}}, None)


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert [link for link in links if "://" not in link[1] and not (link[0].parent / link[1]).exists()] == []
