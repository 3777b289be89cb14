"""The source tree obeys its own rules about first lines; sizes that are worth a look are warnings."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
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

ENTRY_POINTS = {"__init__", "__main__"}


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the product, parsed, by its path below the root."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}


@pytest.mark.filterwarnings("default")
def test_sizes_worth_a_look_are_named() -> None:
    """A size never fails: it names packages to be divided, modules to be split, and crumbs to be merged."""
    modules: dict[Path, int] = defaultdict(int)
    for file in trees():
        modules[file.parent] += file.stem not in ENTRY_POINTS
    found = [f"{p} has {n} modules" for p, n in modules.items() if n > MODULES_PER_PACKAGE]
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in trees()}
    found += [f"{f} has {n} lines" for f, n in lengths.items() if n > LINES_PER_MODULE]
    importers = _importers()
    found += [
        f"{f} is imported by {next(iter(importers[f]))} alone"
        for f, n in lengths.items()
        if n < LINES_WORTH_A_MODULE and len(importers[f]) == 1 and f.stem not in ENTRY_POINTS and f not in STANDS_ALONE
    ]
    for place in found:
        warnings.warn(place, stacklevel=1)


STANDS_ALONE = {
    Path("clusterd/agent/ranks/exec_in_rank.py"),  # the whole program of a process
    Path("clusterd/train/process/preload.py"),  # imported by name in a fork server
    Path("clusterd/train/process/torch_version.py"),  # importing it is the check
}
"""Short modules that are not a part of the one that names them: loaded by themselves in another process."""


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
                folder = re.sub(r"^clusterd\.(plans|profiling|tui)\b", r"\1", name)
                target = Path(folder.replace(".", "/") + ".py")
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


def test_scripts_beside_the_product_import_names_that_are_there() -> None:
    """Examples, benchmarks and documents are no part of what types are checked in."""
    missing: list[str] = []
    for folder in ("examples", "docs", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "clusterd":
                    names = [alias.name for alias in node.names if not _is_there(str(node.module), alias.name)]
                    missing += [f"{file.relative_to(ROOT)}: {node.module}.{name}" for name in names]
    assert missing == []


def _is_there(module: str, name: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return any((path / f).exists() for f in (f"{name}.py", f"{name}/__init__.py")) or name in _bound(path)


@cache
def _bound(path: Path) -> set[str]:
    """Names that a module, or the ``__init__`` of a package, binds."""
    source = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())) if source is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
