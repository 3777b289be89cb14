"""The source tree obeys its own rules: sizes, first lines, and the field's nouns."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("clusterd", "plans", "profiling", "tui")
MODULES_PER_PACKAGE = 16
LINES_PER_MODULE = 500
LINES_WORTH_A_MODULE = 60

VAGUE_OPENING = re.compile(
    r"(What|Whether|How|That|Which|Who|Whom|Whose|Where|When|Why|"
    r"(From|Of|On|By|In|With|For|To) (what|which|whom|that))\b"
)
"""A first line names the thing; these words make the reader guess what the sentence is about."""

EVERYDAY = {
    "apart", "bargain", "chore", "chores", "forever", "growing", "heard", "hears", "kept", "menu", "news",
    "onward", "outlook", "outlooks", "pieces", "prospect", "prospects", "realise", "room", "rooms", "said",
    "saying", "seat", "seated", "strangers", "told", "unwritten", "wish", "wishes", "yielding",
}  # fmt: skip
"""Everyday words that stood in the place of a term of the field: ledger, candidates, report, replica, shard."""

EVERYDAY_ALONE = {"late", "lasts", "past", "tell", "what", "who", "whose", "whom", "word", "words"}
"""Vague as the whole of a name, harmless as a part of one."""

STORED_NAMES = {"what", "makes_room", "rooms", "said"}
"""Fields of the journal and of messages, which other versions and other programs read."""

ENTRY_POINTS = {"__init__", "__main__"}


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the product, parsed, by its path below the root."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}


def test_packages_are_small_enough_to_be_read_as_a_list() -> None:
    modules: dict[Path, int] = defaultdict(int)
    for file in trees():
        modules[file.parent] += file.stem not in ENTRY_POINTS
    assert {str(p): n for p, n in modules.items() if n > MODULES_PER_PACKAGE} == {}


def test_modules_are_neither_too_long_nor_crumbs_of_their_only_importer() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in trees()}
    assert {str(f): n for f, n in lengths.items() if n > LINES_PER_MODULE} == {}
    importers = _importers()
    crumbs = {
        str(f): str(*importers[f])
        for f, n in lengths.items()
        if n < LINES_WORTH_A_MODULE and len(importers[f]) == 1 and f.stem not in ENTRY_POINTS and f not in STANDS_ALONE
    }
    assert crumbs == {}


STANDS_ALONE = {
    Path("clusterd/agent/ranks/exec_in_rank.py"),  # the whole program of a process
    Path("clusterd/train/process/preload.py"),  # imported by name in a fork server
    Path("clusterd/train/process/torch_version.py"),  # importing it is the check
    Path("clusterd/simulate/importers/a800.py"),  # one of the formats, each of which has its module
}
"""Short modules that are not a part of the one that names them: loaded by themselves in another process, or one of a
family."""


def _importers() -> dict[Path, set[Path]]:
    """Modules of the product that import each module."""
    found: dict[Path, set[Path]] = defaultdict(set)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                target = Path(name.replace(".", "/") + ".py")
                if target in trees() and target != file:
                    found[target].add(file)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_first_lines_of_docstrings_obey_the_style(package: str) -> None:
    wrong = []
    for file, tree in trees().items():
        if file.parts[0] != package:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = ast.get_docstring(node)
            name = getattr(node, "name", "module")
            if doc is None:
                if isinstance(node, ast.Module) and tree.body:
                    wrong.append(f"{file}: has no docstring")
                continue
            first, _, rest = doc.partition("\n")
            if VAGUE_OPENING.match(first):
                wrong.append(f"{file}: {name}: {first}")
            if not first.rstrip().endswith((".", ":", "?", "!")) or rest[:1] not in ("", "\n"):
                wrong.append(f"{file}: {name}: the first line is no whole sentence: {first}")
    assert wrong == []


def test_test_modules_have_a_first_line() -> None:
    wrong = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text())
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        if tree.body and not first.endswith((".", ":")):
            wrong.append(f"{file.relative_to(ROOT)}: {first}")
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and VAGUE_OPENING.match(ast.get_docstring(node) or ""):  # type: ignore[arg-type]
                wrong.append(f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}")
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_terms_of_the_field(package: str) -> None:
    wrong = {f"{file}: {name}" for file, name in _names(package) if _is_everyday(name)}
    assert wrong == set()


def _names(package: str) -> Iterator[tuple[Path, str]]:
    """Every name that a package gives: modules, classes, functions, parameters, variables, attributes."""
    for file, tree in trees().items():
        if file.parts[0] != package:
            continue
        yield from ((file, part) for part in (file.stem, file.parent.name))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node.name
            elif isinstance(node, ast.arg):
                yield file, node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield file, node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield file, node.attr


def _is_everyday(name: str) -> bool:
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return name not in STORED_NAMES and (bool(parts & EVERYDAY) or name.strip("_").lower() in EVERYDAY_ALONE)
