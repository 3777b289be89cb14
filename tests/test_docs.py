"""Pages of the documentation name tests that exist, and files that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from clusterd.submission import job_file

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
    keys = job_file._TOP | job_file._RESOURCES | job_file._LIMITS | job_file._CHECKPOINTS
    assert keys - named == set()


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert [link for link in links if "://" not in link[1] and not (link[0].parent / link[1]).exists()] == []
