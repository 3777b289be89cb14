"""Packing of a job's working directory into one immutable archive, so that the job runs the submitted code."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import pathspec

from clusterd.errors import UsageError
from clusterd.units import size

GIT_TIMEOUT_S = 60.0

TELLING_FILES = 20_000
"""Files after which a directory without git that is too large is not read on: a home has millions."""

OUR_PACKAGES = ("clusterd",)
"""Packages that ranks import; a module of the same name in the workdir would hide them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Packed workdir."""

    digest: str  # sha256 of the archive; depends on names, contents, modes and times
    size_bytes: int
    files: int
    secrets: tuple[str, ...]  # files that look like secrets, and stayed behind
    archive: IO[bytes]


def pack(directory: Path, bytes_max: int, *, imports_ours: bool = True) -> Snapshot:
    """Pack the files that git does not ignore, or all files, except those that `.clusterdignore` excludes.

    What looks like a secret stays behind unless git tracks it or the ignore file asks for it.

    Args:
        imports_ours: the job imports clusterd, which a module of the same name would hide.
    Raises:
        UsageError: not a directory, too large (names the largest files), or it would hide clusterd's modules.
    """
    refuse_missing(directory)
    for name in OUR_PACKAGES if imports_ours else ():
        for found in (directory / name / "__init__.py", directory / f"{name}.py"):
            if os.path.exists(found):
                raise UsageError(
                    f"workdir {directory} has a module {name!r} ({found.name}), which would hide clusterd's own on the "
                    "ranks: rename it, or set workdir to a directory below"
                )
    rules = IgnoreRules(directory)
    listed = _from_git(directory, rules)
    if listed is not None and listed.names:
        chosen, sizes, whole = listed, {name: _size(directory / name) for name in listed.names}, True
    else:
        sizes = _walked(directory, rules, bytes_max)
        chosen, whole = _Listed([*sizes]), len(sizes) < TELLING_FILES
    _refuse_large(directory, sizes, bytes_max, whole=whole)
    untracked = [name for name in chosen.names if name not in chosen.tracked]
    secrets = [name for name in untracked if rules.is_secret(name) or rules.holds_token(name)]
    files = sorted(set(chosen.names).difference(secrets))
    spool = tempfile.SpooledTemporaryFile(max_size=32 << 20)  # noqa: SIM115 - handed to the caller
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
        count = sum(_add(archive, directory, file) for file in files)
    size_bytes = spool.tell()
    spool.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: spool.read(1 << 20), b""):
        digest.update(chunk)
    spool.seek(0)
    return Snapshot(digest.hexdigest(), size_bytes, count, tuple(sorted(secrets)), spool)


def commit_of(directory: Path) -> str:
    """Commit of git that is checked out there, with ``-dirty`` where the files below differ; empty: none is known."""
    env = {name: value for name, value in os.environ.items() if name not in _git_variables()}
    answers = []
    for command in (["rev-parse", "--verify", "HEAD"], ["status", "--porcelain", "--", "."]):
        git = ["git", "--no-optional-locks", "-C", str(directory), *command]
        try:
            done = subprocess.run(git, env=env, capture_output=True, check=False, timeout=GIT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode:
            return ""
        answers.append(os.fsdecode(done.stdout).strip())
    commit, differences = answers
    return f"{commit}-dirty" if differences else commit


def refuse_missing(directory: Path) -> None:
    """Refuse a path that is not an existing directory.

    Raises:
        UsageError: no such directory.
    """
    if not os.path.isdir(directory):  # Path.is_dir raises if the name is too long
        raise UsageError(f"workdir {directory} is no directory: set workdir to where the job's code is")


def _add(archive: tarfile.TarFile, directory: Path, file: str) -> bool:
    """Add a file, a link or an empty folder without its owner.

    Returns: True for a file or link that was there.
    """
    path = directory / file
    info = tarfile.TarInfo(file.rstrip("/"))
    try:
        known = path.lstat()
        info.mtime, info.mode = int(known.st_mtime), stat.S_IMODE(known.st_mode) & 0o777
        if stat.S_ISDIR(known.st_mode):
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
            return False
        if stat.S_ISLNK(known.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(info)
            return True
        data = path.read_bytes()
    except OSError as error:
        _refuse_unreadable(error)
        return False
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
    return True


def _walked(directory: Path, rules: IgnoreRules, bytes_max: int) -> dict[str, int]:
    """Files below a directory with their bytes; of one that is too large, such as a home, the first ones."""
    sizes: dict[str, int] = {}
    total = 0
    for name in _walk(directory, rules):
        sizes[name] = _size(directory / name)
        total += sizes[name]
        if total > bytes_max and len(sizes) >= TELLING_FILES:
            break
    return sizes


def _refuse_large(directory: Path, sizes: dict[str, int], bytes_max: int, *, whole: bool) -> None:
    if (total := sum(sizes.values())) > bytes_max:
        largest = ", ".join(f"{name} ({size(sizes[name])})" for name in sorted(sizes, key=lambda n: -sizes[n])[:3])
        raise UsageError(
            f"workdir {directory} has {size(total)} in {'' if whole else 'the first '}{len(sizes)} files, the limit is "
            f"{size(bytes_max)}; largest: {largest}: exclude them in {IGNORE_FILE}, or submit from the folder of the "
            "job's code"
        )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class _Listed:
    """Files of a directory; a folder without files ends with a slash."""

    names: list[str]
    tracked: frozenset[str] = frozenset()  # by git


@cache
def _git_variables() -> frozenset[str]:
    """Variables by which git finds another repository than that of its directory, as in a hook of that one, or none."""
    done = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, check=False, text=True)
    return frozenset((*done.stdout.split(), "GIT_CEILING_DIRECTORIES"))


def _from_git(directory: Path, rules: IgnoreRules | None = None) -> _Listed | None:
    """Files that git does not ignore; None if the directory is not in a git tree or git is not installed.

    Raises:
        UsageError: git fails: without its .gitignore, data and secrets would go to the hosts.
    """
    command = ["git", "-C", str(directory), "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard"]
    try:
        env = {name: value for name, value in os.environ.items() if name not in _git_variables()}
        done = subprocess.run(
            command, env={**env, "LC_ALL": "C"}, capture_output=True, check=False, timeout=GIT_TIMEOUT_S
        )
    except (FileNotFoundError, PermissionError):  # no git; the latter if a folder of PATH is not readable
        return None
    except subprocess.TimeoutExpired:
        raise UsageError(f"workdir {directory}: git has not listed it after {GIT_TIMEOUT_S:.0f} s: try again") from None
    if done.returncode:
        message = " ".join(os.fsdecode(done.stderr).split())
        if "not a git repository (or any" in message:  # with a path instead, .git exists and is broken
            return None
        raise UsageError(f"workdir {directory}: git does not list its files: {message.removeprefix('fatal: ')}")
    tagged = [os.fsdecode(entry) for entry in done.stdout.split(b"\0") if entry]  # "H name", "? name"
    tracked = {entry[2:] for entry in tagged if not entry.startswith("?")}
    found: list[str] = []
    for name in dict.fromkeys(entry[2:].rstrip("/") for entry in tagged):  # a conflict is listed once per side
        path = directory / name
        is_folder = os.path.isdir(path) and not os.path.islink(path)  # a repository within this one
        # git lists only "./" within a submodule without .git
        if name == "." or (rules is not None and rules.ignores(f"{name}/" * is_folder or name, by_tools=False)):
            continue
        # git lists deleted files until the deletion is committed.
        if _is_packed(path):
            found.append(name)
        elif is_folder:
            within = _from_repository_within(directory, name)
            found += (n for n in within.names if rules is None or not rules.ignores(n, by_tools=False))
            tracked |= within.tracked
    return _Listed(found, frozenset(tracked))


def _from_repository_within(directory: Path, name: str) -> _Listed:
    """Files of a submodule or nested clone; git lists either only as a directory."""
    path = directory / name
    listed = _from_git(path) if os.path.lexists(path / ".git") else _Listed(list(_walk(path, IgnoreRules(path))))
    listed = listed or _Listed([])
    if not listed.names and not os.path.lexists(path / ".git"):
        raise UsageError(
            f"workdir: the submodule {path} is empty: git submodule update --init, or exclude it in {IGNORE_FILE}"
        )
    return _Listed([f"{name}/{file}" for file in listed.names], frozenset(f"{name}/{file}" for file in listed.tracked))


def _walk(directory: Path, rules: IgnoreRules) -> Iterator[str]:
    """Files and links that the rules do not exclude, and folders without any."""
    for parent, directories, files in os.walk(directory, onerror=_refuse_unreadable):
        relative = Path(parent).relative_to(directory)
        directories[:] = [d for d in directories if not rules.ignores(f"{(relative / d).as_posix()}/")]
        # os.walk lists a link to a directory but does not follow it: packed as a link, as under git.
        linked = [d for d in directories if os.path.islink(os.path.join(parent, d))]
        names = [(relative / file).as_posix() for file in (*linked, *files)]
        packed = [name for name in names if not rules.ignores(name) and _is_packed(directory / name)]
        yield from packed
        if not packed and not directories and relative.parts:
            yield f"{relative.as_posix()}/"


def _is_packed(path: Path) -> bool:
    """True for a regular file or a link; the target of a link is not read."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        _refuse_unreadable(error)
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _refuse_unreadable(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return  # removed since its parent was listed
    # Left out silently, it would be missing only on the host.
    raise UsageError(
        f"workdir: {error.filename} cannot be read: {error.strerror}: make it readable, or exclude it in {IGNORE_FILE}"
    )


IGNORE_FILE = ".clusterdignore"

_TOOLS = (
    ".git", "__pycache__/", "*.pyc", ".venv/", "venv/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", "*.egg-info/",
)  # fmt: skip
"""Files that tools make again; where git lists a directory, its own rules say so."""

_SECRETS = (
    ".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", ".envrc", ".netrc", ".pgpass", ".pypirc",
    ".git-credentials", ".ssh/", ".gnupg/", ".aws/", ".azure/", ".kube/", ".docker/", ".config/gcloud/",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "*.keytab",
    "*.jks", "*.ppk", ".npmrc", ".yarnrc.yml", ".s3cfg", ".boto", ".vault-token", ".htpasswd", ".my.cnf", ".dockercfg",
    ".databrickscfg", ".modal.toml", ".huggingface/", "huggingface/token", "kaggle.json", "hf_token", "hf_token.txt",
    "credentials.json", "credentials.toml", "application_default_credentials.json", "client_secret*.json",
    "*service[-_]account*.json", "secrets.toml", "secrets.json", "secrets.y*ml", "*.tfstate", "*.tfstate.*", "*.tfvars",
)  # fmt: skip
"""Files that hold passwords and keys by custom; a line such as ``!.env`` in the ignore file sends one all the same."""

_TOKEN = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\b(?:hf_[A-Za-z]{30,}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50,}"
    rb"|glpat-[\w-]{20}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|xox[abprs]-[\w-]{20,}|hvs\.[\w-]{24,})"
)
"""Keys and tokens of services by their form."""
TOKEN_FILE_BYTES_MAX = 4096
"""Larger files are not read for tokens."""


class IgnoreRules:
    """Decides for each path below a directory whether it stays behind."""

    def __init__(self, directory: Path) -> None:
        """Read the ignore file.

        Raises:
            UsageError: the ignore file cannot be read, or has a pattern that gitignore does not know.
        """
        self._directory = directory
        given = _lines(directory / IGNORE_FILE)
        patterns = {"given": given, "every": (*_TOOLS, *given), "secrets": (*_SECRETS, *given)}
        self._specs = {rules: _spec(directory, lines) for rules, lines in patterns.items()}
        self._folders: dict[tuple[str, str], bool] = {}

    def ignores(self, name: str, *, by_tools: bool = True) -> bool:
        """True for a path, or one below a path, that the rules exclude; a folder's name ends with a slash.

        Args:
            by_tools: also what tools make again, which git's own rules exclude where git listed the files.
        """
        return self._matches("every" if by_tools else "given", name)

    def is_secret(self, name: str) -> bool:
        """True for a path, or one below a path, that looks like a secret and that the ignore file does not ask for."""
        return self._matches("secrets", name)

    def _matches(self, rules: str, name: str) -> bool:
        """True if the patterns match a path, or a folder above it, which is asked once."""
        above = name.rstrip("/").rpartition("/")[0]
        if above and (rules, above) not in self._folders:
            self._folders[rules, above] = self._matches(rules, f"{above}/")
        if above and self._folders[rules, above]:
            return True
        is_ours = rules != "secrets" and name.endswith("/") and _is_state(self._directory / name)
        return is_ours or self._specs[rules].match_file(name)

    def holds_token(self, name: str) -> bool:
        """True for a small file with what looks like a key or token, unless the ignore file asks for it."""
        path = self._directory / name
        try:
            known = path.lstat()
            if not stat.S_ISREG(known.st_mode) or known.st_size > TOKEN_FILE_BYTES_MAX:
                return False
            return (
                _TOKEN.search(path.read_bytes()) is not None
                and self._specs["given"].check_file(name).include is not False
            )
        except OSError:
            return False  # packing it reports the error


def _is_state(folder: Path) -> bool:
    """True for a daemon's or agent's folder, and those in it: they hold every working directory that was sent."""
    own = (("daemon.lock", "journal.db"), ("agent.lock", "identity.json"))
    return any(all(os.path.lexists(at / file) for file in files) for at in (folder, folder.parent) for files in own)


def _spec(directory: Path, lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise UsageError(f"{directory / IGNORE_FILE}: {error}: write patterns as in .gitignore") from None


def _lines(file: Path) -> tuple[str, ...]:
    if not os.path.lexists(file):
        return ()
    try:
        if not file.is_file():  # reading a FIFO would block forever
            raise OSError(0, "it is no file")
        return tuple(file.read_text(encoding="utf-8").splitlines())
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"{file} cannot be read: {why}: make it a text file of patterns, or remove it") from None
