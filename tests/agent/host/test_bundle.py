"""The code that is sent to hosts is reproducible and complete."""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clusterd.agent.host.bundle import bundle
from tests.agent.client import end_all
from tests.hang import HANG_S

REPOSITORY = Path(__file__).parents[3]
IMPORTS = """
import ast, importlib, pathlib, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/vendor"]
for file in pathlib.Path(sys.argv[1], "clusterd").rglob("*.py"):
    if file.name == "bundle.py":  # which the head node makes
        continue
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in sys.stdlib_module_names:
            found = importlib.import_module(node.module)
            for each in node.names:
                if not hasattr(found, each.name):
                    print(file, node.module, each.name)
    name = ".".join(file.relative_to(sys.argv[1]).with_suffix("").parts)
    try:
        if file.name != "__main__.py":
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "fsspec"):
            print(name, error)
    except Exception as error:
        print(name, error)
"""
MAKE = "from clusterd.agent.host.bundle import bundle; print(bundle().sha256)"


def test_the_bundle_is_the_same_in_every_process(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}
    made = subprocess.run(
        [sys.executable, "-c", MAKE], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == bundle().sha256


def test_the_bundle_holds_modules_of_hosts_and_none_of_the_daemon() -> None:
    names = zipfile.ZipFile(io.BytesIO(bundle().data)).namelist()
    assert {"__main__.py", "clusterd/agent/server/server.py", "clusterd/protocol/frames.py"} <= set(names)
    assert "clusterd/plans/plan.py" in names
    assert {"vendor/msgpack/fallback.py", "clusterd/train/process/preload.py"} <= set(names)
    assert not [n for n in names if n.startswith(("clusterd/core", "clusterd/daemon", "clusterd/ssh", "clusterd/cli"))]


def test_the_bundle_has_all_that_its_modules_import() -> None:
    """Regression: clusterd.units was missing, and only where clusterd is installed, as in tests, could a job train."""
    with zipfile.ZipFile(io.BytesIO(bundle().data)) as archive:
        code = {name: archive.read(name) for name in archive.namelist() if name.startswith("clusterd/")}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in code}
    missing = set[tuple[str, str]]()
    for name, text in code.items():
        for node in ast.walk(ast.parse(text)):
            found = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found += [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
            ours = {one for one in found if one.split(".")[0] == "clusterd" and _is_module(one)}
            missing |= {(name, one) for one in ours - modules}
    assert not missing


def _is_module(name: str) -> bool:
    place = REPOSITORY.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


def test_the_bundle_is_made_from_an_installed_package_too(tmp_path: Path) -> None:
    """From a zip, as from a wheel or the one-file binary: read as resources, not as paths."""
    installed = tmp_path / "installed.zip"
    with zipfile.ZipFile(installed, "w") as archive:
        for name, place in (("clusterd", "clusterd"), ("plans", "clusterd/plans")):
            root = Path(__file__).parents[3] / name
            for path in root.rglob("*.py"):
                archive.write(path, Path(place) / path.relative_to(root))
    command = f"import sys; sys.path.insert(0, {str(installed)!r}); {MAKE}"
    made = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == bundle().sha256


@pytest.mark.parametrize("version", ["python3", "python3.10", "python3.12", "python3.13"])
def test_the_bundle_runs_on_a_bare_python(tmp_path: Path, version: str) -> None:
    """Only the standard library there: the carried msgpack is used."""
    found = [shutil.which(version) or "", *map(str, Path.home().glob(f".pyenv/versions/*/bin/{version}"))]
    ask = "import sys; print(sys.executable)"
    asked = [subprocess.run([one, "-c", ask], capture_output=True, text=True, check=False) for one in found if one]
    python = next((each.stdout.strip() for each in asked if each.returncode == 0), "")
    if not python:
        pytest.skip(f"no {version} on this machine")
    code = tmp_path / f"agent-{bundle().version}"
    zipfile.ZipFile(io.BytesIO(bundle().data)).extractall(code)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CLUSTERD_AGENT_HOME": str(tmp_path / "agent")}
    program = [python, "-I", "-S", str(code)]
    imported = subprocess.run(
        [python, "-I", "-S", "-c", IMPORTS, str(code)], env=env, capture_output=True, text=True, check=False
    )
    assert imported.stdout == "", "only what is in the environment of a job, as torch, is missing"
    hello = (
        f"import subprocess, sys; sys.path[:0] = [{str(code)!r}, {str(code / 'vendor')!r}]\n"
        "from clusterd import protocol; import msgpack; assert 'vendor' in msgpack.__file__\n"
        "import os; from clusterd.protocol.proof import proof\n"
        "r, w = os.pipe(); os.write(w, b'key'); os.close(w)\n"
        f"p = subprocess.Popen({[*program, 'attach', '--key-fd']!r} + [str(r)], stdin=-1, stdout=-1, pass_fds=[r])\n"
        "assert p.stdout.readline().startswith(b'clusterd-attached')\n"
        "d = protocol.Decoder()\n"
        "def ask(**request):\n"
        "    p.stdin.write(protocol.encode({'id': 1, **request})); p.stdin.flush()\n"
        "    while not (m := d.feed(p.stdout.read1())): pass\n"
        "    return m[0]['ok']\n"
        "shown = proof('key', 'hello', ask(verb='challenge')['nonce'], 'd', 1)\n"
        "told = ask(verb='hello', protocol=1, daemon='d', epoch=1, proof=shown)\n"
        "print(told['version'], told['facts']['python'])\n"
        "p.stdin.close(); p.wait(); p.stdout.close()"
    )
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", hello], env=env, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.stdout.split()[:1] == [bundle().version], done.stderr
    finally:
        end_all(tmp_path / "agent")
