"""Ed25519 signatures of manifests: keys come from the environment alone, as hex digits."""

import os
from pathlib import Path

from etl.errors import UserError

SECRET, PUBLIC = "GEMLINE_SIGNING_KEY", "GEMLINE_TRUSTED_KEY"


def sign(path: Path, text: bytes) -> None:
    """Write the signature beside a file, if GEMLINE_SIGNING_KEY holds a private key."""
    key = os.environ.get(SECRET)
    if not key:
        return
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(_bytes(SECRET, key))
    _beside(path).write_text(private.sign(text).hex())


def check(path: Path, text: bytes) -> None:
    """Raises UserError unless the key of GEMLINE_TRUSTED_KEY, if there is one, has signed it."""
    key = os.environ.get(PUBLIC)
    if not key:
        return
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    public = Ed25519PublicKey.from_public_bytes(_bytes(PUBLIC, key))
    if not _beside(path).is_file():
        raise UserError(f"{path} is not signed, and {PUBLIC} asks for a signature")
    try:
        public.verify(bytes.fromhex(_beside(path).read_text()), text)
    except (InvalidSignature, ValueError):
        raise UserError(f"{path} is not what the key of {PUBLIC} has signed") from None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def _bytes(name: str, key: str) -> bytes:
    try:
        found = bytes.fromhex(key)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise UserError(f"{name} is no Ed25519 key: 64 hex digits")
    return found
