"""Rules for the files of a working directory that stay behind: `.clusterdignore`, by gitignore's rules, and secrets."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import pathspec

from clusterd.errors import UsageError

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

    def __init__(self, directory: Path, left_out: Iterable[Path] = ()) -> None:
        """Read the ignore file.

        Args:
            left_out: paths, below the directory or not, that stay behind too.
        Raises:
            UsageError: the ignore file cannot be read, or has a pattern that gitignore does not know.
        """
        self._directory = directory
        given = _lines(directory / IGNORE_FILE)
        here = directory.resolve()
        self._left_out = {
            path.relative_to(here).as_posix() for path in (p.resolve() for p in left_out) if here in path.parents
        }
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
        return (rules != "secrets" and name.rstrip("/") in self._left_out) or self._specs[rules].match_file(name)

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
