"""A Python package that builds itself without a network: its build backend is in its own source."""

from __future__ import annotations

from pathlib import Path

_PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "{name}"
version = "1.0"
requires-python = ">=3.10"
"""

_BACKEND = """\
import os, time, zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    {before}
    name = "{name}-1.0-py3-none-any.whl"
    about = "{name}-1.0.dist-info"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.write("{name}.py")
        wheel.writestr(about + "/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        wheel.writestr(about + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(about + "/entry_points.txt", "[console_scripts]\\n{name}-greet = {name}:greet\\n")
        wheel.writestr(about + "/RECORD", "")
    return name

def build_sdist(directory, config_settings=None):
    raise NotImplementedError
"""


def write_package(directory: Path, greeting: str = "hello", *, name: str = "greeter", before: str = "pass") -> None:
    """Write a package with a module that has `GREETING`, and a script that prints it.

    Args:
        before: a statement of the build, in one line.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pyproject.toml").write_text(_PYPROJECT.format(name=name))
    (directory / "backend.py").write_text(_BACKEND.format(name=name, before=before))
    (directory / f"{name}.py").write_text(f"GREETING = {greeting!r}\n\ndef greet():\n    print(GREETING)\n")


def wait_for_file(path: Path) -> str:
    """Statement of a build that notes its start in `PATH.begun`, and waits until the file is there."""
    return (
        f"open({f'{path}.begun'!r}, 'a').write('begun\\n'); "
        f"[time.sleep(0.05) for _ in iter(lambda: os.path.exists({str(path)!r}), True)]"
    )
