"""The manual page has every command and option, and is one that man can set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from clusterd.cli.main import _COMMANDS, _ELSEWHERE, cli
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def page() -> str:
    answer = CliRunner().invoke(cli, ["man"])
    assert answer.exit_code == 0, answer.output
    return answer.output


def commands(group: click.Group, path: str) -> list[tuple[str, click.Command]]:
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((f"{path} {name}", command))
        if isinstance(command, click.Group):
            found += commands(command, f"{path} {name}")
    return found


def test_every_command_and_option_is_in_it(page: str) -> None:
    plain = page.replace("\\-", "-")
    assert isinstance(cli, click.Group)
    for path, command in commands(cli, "clusterd"):
        assert f".SS {path} " in plain, path
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert all(name in plain for name in option.opts), (path, option.opts)


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff on PATH")
def test_groff_sets_it_without_a_warning(page: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8"], input=page, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("man") is None, reason="no man on PATH")
def test_man_finds_it_after_pip_install(page: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    tree, prefix = tmp_path / "tree", tmp_path / "prefix"
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/clusterd.1", "clusterd/__init__.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tree / name)
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(prefix), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PATH": f"{prefix}/bin:{os.environ['PATH']}", "MANPATH": ""}
    found = subprocess.run(["man", "-w", "clusterd"], env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == str(prefix / "share/man/man1/clusterd.1"), found.stderr
    installed = Path(found.stdout.strip()).read_text()
    assert installed.splitlines()[0] == page.splitlines()[0] and ".SS clusterd submit " in installed


def test_no_line_of_help_is_taken_for_a_request(page: str) -> None:
    known = (".TH", ".SH", ".SS", ".PP", ".TP", ".nf", ".fi", ".B ")
    assert [line for line in page.splitlines() if line[:1] in (".", "'") and not line.startswith(known)] == []


def test_commands_of_other_programs_lead_to_the_one_here() -> None:
    for typed, here in (
        ("squeue", "clusterd ls"),
        ("scancel", "clusterd cancel"),
        ("attach", "clusterd logs -f"),
        ("down", "clusterd cancel"),
        ("host rm", "clusterd host remove"),
        ("host cordon", "clusterd host drain"),
        ("cordon", "clusterd host drain"),
        ("qstat", "clusterd ls"),
        ("bkill", "clusterd cancel"),
    ):
        answer = CliRunner().invoke(cli, typed.split())
        word = typed.split()[-1]
        assert answer.exit_code == 2 and f"No such command '{word}'. Here it is: {here}" in answer.output
    for command, here in (("stop", "clusterd cancel JOB"), ("status", "clusterd show JOB")):
        assert f"extra argument (12). Here it is: {here}" in CliRunner().invoke(cli, [command, "12"]).output
    for here in {text.split()[0].strip(",") for text in _ELSEWHERE.values()}:
        assert here in _COMMANDS or here.startswith("--")
    assert not _ELSEWHERE.keys() & _COMMANDS.keys()


def test_options_of_other_programs_lead_to_the_one_here() -> None:
    for command, option, here in (
        ("submit", "-J", "--name"), ("submit", "--dependency", "--after JOB"), ("run", "--gres", "--gpus N"),
        ("run", "-t", "--time 12h"), ("run", "-l", "lines of several"), ("submit", "--chdir", "from that directory"),
        ("cancel", "-u", "clusterd cancel '*'"), ("cancel", "-t", "--state STATE"), ("ls", "--me", "--user ."),
        ("ls", "-j", "clusterd ls JOB"), ("logs", "--tail", "--lines N"), ("submit", "--parsable", "stdout is the id"),
        ("run", "--requeue", "leave it out"), ("submit", "--mail-type", "[notify]"), ("run", "--rm", "leave it out"),
        ("run", "-it", "clusterd shell"), ("cancel", "-y", "leave it out"), ("book", "--until", "--for TIME"),
    ):  # fmt: skip
        answer = CliRunner().invoke(cli, [command, option, "x"])
        assert answer.exit_code == 2
        option = option[:2] if option[:2] != "--" else option
        assert f"No such option {option!r}. Here it is: " in answer.output and here in answer.output
    assert "Here it is" not in CliRunner().invoke(cli, ["host", "ls", "-u", "x"]).output  # of the list of jobs
    assert "Did you mean" in CliRunner().invoke(cli, ["ls", "--sinse", "1d"]).output
