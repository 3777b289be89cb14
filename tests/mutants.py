"""Change one operator, constant or call of the code at a time, and see whether its tests notice.

python -m tests.mutants [--count 60] [--seed 1] [--code clusterd/core] [--tests tests/core tests/simulate] [--json]

Runs in a copy of the tree, one process for each core. Prints the changes that no test noticed: each is a behaviour that
no test asserts, or code that does nothing. A change under which tests do not end within `LIMIT` times their usual time
counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 4.0
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "dist", "build", "*.egg-info")

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    path: str
    line: int
    before: str
    after: str
    start: int  # of the expression in the file's bytes
    stop: int


def mutants(path: Path) -> Iterator[Mutant]:
    """All changes of one module."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    of_types = {id(part) for node in ast.walk(tree) for hint in _hints(node) for part in ast.walk(hint)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or id(node) in of_types:
            continue
        for changed in _changed(node):
            start, stop = starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1]
            stop += node.end_col_offset or 0
            name = str(path.relative_to(ROOT))
            before = source[start:stop].decode()
            yield Mutant(name, node.lineno, before, f"({ast.unparse(changed)})", start, stop)


def _hints(node: ast.AST) -> list[ast.expr]:
    """Parts that do nothing when the code runs, and options of decorators, which protect from faults."""
    found = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", ())]
    return [hint for hint in found if hint is not None]


def _changed(node: ast.expr) -> Iterator[ast.expr]:
    """The expression with one thing changed, in each way."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(op)](), *node.ops[1:]], node.comparators)
        case ast.BoolOp(op=ast.And()):
            yield ast.BoolOp(ast.Or(), node.values)
        case ast.BoolOp(op=ast.Or()):
            yield ast.BoolOp(ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp(op=op) if type(op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name]), node.args, node.keywords)


def passes(tree: Path, tests: list[str], limit_s: float | None = None) -> bool:
    """True if all tests pass in this copy of the tree."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu",
        *tests,
    ]
    environment = {**os.environ, "CI": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def survivors(drawn: list[Mutant], tests: list[str], processes: int) -> Iterator[Mutant]:
    """Mutants that no test notices, as they are found."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(processes) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(processes):
            copied = shutil.copytree(ROOT, Path(scratch) / str(number), symlinks=True, ignore=LEFT_OUT)
            trees.put(copied)
        first = trees.get()
        began_s = time.monotonic()
        if not passes(first, tests):
            raise SystemExit("the tests fail without any change")
        limit_s = LIMIT * processes * (time.monotonic() - began_s)
        trees.put(first)

        def survives(mutant: Mutant) -> bool:
            tree = trees.get()
            file = tree / mutant.path
            original = file.read_bytes()
            file.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.stop :])
            try:
                return passes(tree, tests, limit_s)
            finally:
                file.write_bytes(original)
                trees.put(tree)

        for mutant, survived in zip(drawn, pool.map(survives, drawn), strict=True):
            print("." if not survived else "S", end="", file=sys.stderr, flush=True)
            if survived:
                yield mutant
        print(file=sys.stderr)


def main() -> None:
    """Draw, run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--code", nargs="+", default=["clusterd/core"])
    parser.add_argument("--tests", nargs="+", default=["tests/core", "tests/simulate"])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    files = sorted(file for folder in given.code for file in (ROOT / folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants(file)]
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    found: list[Mutant] = []
    for mutant in survivors(drawn, given.tests, given.processes):
        found.append(mutant)
        if not given.json:
            print(f"\n{mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    if given.json:
        print(json.dumps({"drawn": len(drawn), "of": len(every), "survivors": [asdict(m) for m in found]}, indent=1))
        return
    print(f"{len(drawn) - len(found)} of {len(drawn)} changes noticed ({len(every)} possible), seed {given.seed}")


if __name__ == "__main__":
    main()
