"""Ed25519 signatures of manifests: keys come from the environment alone, as hex digits."""

import os

from etl.errors import UserError

SECRET, PUBLIC = "GEMLINE_SIGNING_KEY", "GEMLINE_TRUSTED_KEY"


class SignatureError(UserError):
    """A text is not signed, or not by the key that is trusted."""


def signature_of(text: bytes) -> str | None:
    """The signature of a text by the private key of GEMLINE_SIGNING_KEY; None without a key."""
    key = os.environ.get(SECRET)
    if not key:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(_bytes(SECRET, key)).sign(text).hex()


def check_signature(text: bytes, signature: str | None, name: object) -> None:
    """Raise SignatureError unless the key of GEMLINE_TRUSTED_KEY, if any, has signed a text.

    `name` is what the message calls the text.
    """
    key = os.environ.get(PUBLIC)
    if not key:
        return
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    public = Ed25519PublicKey.from_public_bytes(_bytes(PUBLIC, key))
    if signature is None:
        raise SignatureError(f"{name} is not signed, and {PUBLIC} asks for a signature")
    try:
        public.verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError):
        raise SignatureError(f"{name} is not what the key of {PUBLIC} has signed") from None


def _bytes(name: str, key: str) -> bytes:
    try:
        found = bytes.fromhex(key)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise UserError(f"{name} is no Ed25519 key: 64 hex digits")
    return found
