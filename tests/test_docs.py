"""Pages of the documentation name tests that exist, and files that are there."""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from dataclasses import fields
from pathlib import Path

import click
import msgspec
import pytest

from clusterd import config as configuration
from clusterd import projection
from clusterd.cli.head_node.schemas import CheckpointKeys, JobKeys, LimitKeys, ResourceKeys
from clusterd.cli.main import cli
from clusterd.core import events as e
from clusterd.core.state import Migration
from clusterd.plans.plan import Plan
from clusterd.rows import plain
from clusterd.types import DeviceClaim, DeviceId, HostId, Tenant
from clusterd.units import TIMES
from docs import charts
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


def _rows() -> list[tuple[str, msgspec.Struct]]:
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
        ("## A host", row.devices[0]),
        ("## A host", row.claims[0]),
    ]


def test_the_reference_of_json_has_every_field() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    for heading, row in _rows():
        section = page.partition(heading + "\n")[2].partition("\n## ")[0]
        assert set(plain(row)) - set(re.findall(r"`(\w+)`", section)) == set(), heading
    times = {name for _, row in _rows() for name in plain(row) if name in TIMES}
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
        assert set(table) == {configuration.SPELLED.get(f.name, f.name) for f in fields(kind)}, kind
    configuration.of_values({**example, "daemon": {**example["daemon"], "state_dir": "/x"}}, None)


PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md")

MADE_LATER = {"docs/measured/gpu.json", "dist/clusterd"}
"""Files that the pages name and that a command makes."""


def _cited(page: Path) -> list[str]:
    """Pieces of code in a page, in its lines and in its blocks."""
    text = page.read_text()
    blocks = re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in _typed(block.splitlines())]
    return [*re.findall(r"`([^`\n]+)`", text), *lines]


def _typed(lines: list[str]) -> list[str]:
    """Lines of a block that a user types: those with a prompt, if any has one."""
    return [line for line in lines if line.startswith("$ ")] or lines


def test_files_that_the_pages_name_are_there() -> None:
    """Paths from the top of the tree or of the package; a name in capitals stands for any."""
    roots = (ROOT, ROOT / "clusterd")
    tops = {folder.name for root in roots for folder in root.iterdir() if folder.is_dir()} - {"ssh"}
    path = re.compile(r"(?<![\w/.~-])(?:" + "|".join(sorted(tops)) + r")/[\w./-]*\w")
    named = {(page.name, name) for page in PAGES for code in _cited(page) for name in path.findall(code)}
    named = {(page, name) for page, name in named if not re.search(r"[A-Z]{3}|clusterd\.(?:sock|toml)", name)}
    there = {
        name for _, name in named if any((root / name).exists() or (root / f"{name}.py").exists() for root in roots)
    }
    assert {(page, name) for page, name in named if name not in there | MADE_LATER} == set()
    assert len(there) > 50


def _command(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """The command that these words of a command line begin with, and the words behind it; None: there is none."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name = words[0] if words and re.fullmatch(r"[a-z][a-z-]*", words[0]) else ""
        found = command.get_command(context, name or "add")  # of a claim, the devices may follow at once
        if found is None:
            return None if name else (command, words)
        command, words = found, words[1:] if name else words
    return command, words


def test_commands_that_the_pages_name_exist_with_their_options() -> None:
    wrong = []
    lines = [(page.name, code) for page in PAGES for code in _cited(page)]
    for page, line in lines:
        for words in (found.split() for found in re.findall(r"(?:^|[;|] |\()clusterd ([a-z][^#|;)]*)", line)):
            found = _command(words)
            if found is None:
                wrong.append((page, line))
                continue
            command, rest = found
            known = {"--help"}.union(*({*option.opts, *option.secondary_opts} for option in command.params))
            options = (word.strip("[].,").partition("=")[0] for word in rest[: (*rest, "--").index("--")])
            wrong += [(page, line) for option in options if option.startswith("--") and option not in known]
    assert wrong == []
    assert len(lines) > 1000


def test_commands_that_messages_name_exist() -> None:
    """Advice in a message is a command that can be typed."""
    wrong = []
    for file in (*(ROOT / "clusterd").rglob("*.py"), *(ROOT / "tui").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                advice = re.findall(r"(?:: |`|\(| or |, and )clusterd ([a-z][a-z-]*(?: [a-z-]+(?!\w))?)", node.value)
                wrong += [(file.name, node.lineno, words) for words in advice if _command(words.split()) is None]
    assert [each for each in wrong if each[2].split()[0] not in ("chooses", "is")] == []


def test_targets_of_make_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for code in _cited(page) for name in re.findall(r"^make ([a-z-]+)", code)}
    assert named - targets == set()


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert [link for link in links if "://" not in link[1] and not (link[0].parent / link[1]).exists()] == []


def test_a_page_that_says_other_than_what_was_measured_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and charts have no figures but those that benchmarks printed."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(charts, "DOCS", tmp_path / "docs")
    assert charts.main(["--check"]) == 0
    for name, figure in (("simulate.md", "| rubick | "), ("charts/completion.svg", ">rubick<")):
        file = tmp_path / "docs" / name
        written = file.read_text()
        file.write_text(written.replace(figure, figure.replace("rubick", "sia")))
        assert charts.main(["--check"]) == 1
        file.write_text(written)
    measured = tmp_path / "docs" / "measured" / "accuracy.json"
    measured.write_text(measured.read_text().replace("0.1", "0.2"))
    assert charts.main(["--check"]) == 1
    assert charts.main([]) == 0 == charts.main(["--check"])
