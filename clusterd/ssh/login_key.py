"""Key pair with which the daemon logs in as people who added its public half to their authorized keys."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import asyncssh

from clusterd.ssh.resolve import Route


class LoginKey:
    """The cluster's key pair, made when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def authorized_line(self) -> str:
        """Line for a person's authorized keys; with it the key starts programs, but no terminal and no forwarding."""
        public = asyncssh.read_private_key(self._made()).export_public_key().decode().strip()
        return f"restrict {public}"

    def route(self, route: Route, account: str) -> Route:
        """The same route, with this key and as another account at its end."""
        return replace(
            route,
            user=account,
            identity_files=(str(self._made()),),
            certificate_files=(),
            identity_agent=None,
            identities_only=True,
            remedy="`clusterd login` shows that user the key to authorize",
        )

    def _made(self) -> Path:
        if not self._path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519", comment="clusterd")
            partial = self._path.with_suffix(".partial")
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(key.export_private_key())
            partial.replace(self._path)
        return self._path
