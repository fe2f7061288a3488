"""Encryption of prefixes on disk: AES-GCM, with a key from a file."""

import hmac
import os
from pathlib import Path

from winnow.errors import ConfigError

_KEY_BYTES = 32
_NONCE_BYTES = 12


class WrongKeyError(Exception):
    """Failed decryption: the bytes were encrypted with another key, or changed since."""


class PrefixCipher:
    """Cipher of one key.

    Args:
        key: 32 bytes; one key that is derived from them names files, another encrypts them.

    Raises:
        ConfigError: the package `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "prefix_cache_key_file needs the package cryptography: pip install 'winnow-llm[encryption]'"
            ) from None
        self._invalid = InvalidTag
        self._names = hmac.digest(key, b"names", "sha256")
        self._aes = AESGCM(hmac.digest(key, b"content", "sha256"))

    @classmethod
    def from_file(cls, path: Path) -> "PrefixCipher":
        """Return the cipher of a file's key: 32 bytes, or 64 hexadecimal digits.

        Raises:
            ConfigError: it cannot be read, or holds no key.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"prefix_cache_key_file: cannot read {path}: {error.strerror}") from None
        if len(content) != _KEY_BYTES:
            try:
                content = bytes.fromhex(content.decode("ascii"))
            except ValueError:
                content = b""
        if len(content) != _KEY_BYTES:
            raise ConfigError(
                f"prefix_cache_key_file must hold {_KEY_BYTES} bytes or {2 * _KEY_BYTES} hexadecimal digits, and "
                f"{path} does not"
            )
        return cls(content)

    def digest(self, data: bytes) -> str:
        """Return a keyed digest of `data`, to name a file without revealing its content."""
        return hmac.digest(self._names, data, "sha256").hex()

    def seal(self, data: bytes, name: str) -> bytes:
        """Return `data` encrypted, for the file of that name alone."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aes.encrypt(nonce, data, name.encode())

    def open(self, sealed: bytes, name: str) -> bytes:
        """Return what `seal` encrypted for the file of that name. Raises WrongKeyError."""
        try:
            return self._aes.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name.encode())
        except (self._invalid, ValueError):
            raise WrongKeyError("it was encrypted with another key, or its bytes have changed") from None
