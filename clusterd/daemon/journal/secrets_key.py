"""Key file that encrypts what must not be readable in copies of the journal or on hosts."""

from __future__ import annotations

from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from clusterd.durable_files import write_durably
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
            write_durably(self.file, Fernet.generate_key())
        return Fernet(self.file.read_bytes())
