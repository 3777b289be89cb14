"""Key file that encrypts what must not be readable in copies of the journal or on hosts."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from clusterd.errors import ClusterError

SECRETS_KEY = "secrets_key"
"""Name of the key file in the state directory."""


class SecretsKey:
    """Encryption with the key in a file, which is made when it is first needed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def seal(self, data: bytes) -> bytes:
        """Encrypt and authenticate `data`."""
        return self._cipher().encrypt(data)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt what was sealed with this key.

        Raises:
            ClusterError: it was sealed with another key, or changed since.
        """
        try:
            return self._cipher().decrypt(sealed)
        except InvalidToken:
            raise ClusterError(f"it cannot be read with {self.file}: restore that file") from None

    def _cipher(self) -> Fernet:
        if not self.file.exists():
            partial = self.file.with_suffix(".partial")
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(Fernet.generate_key())
            partial.replace(self.file)
        return Fernet(self.file.read_bytes())
