"""Ed25519 signatures of manifests; keys are hex digits in environment variables."""

import os

from etl.errors import UserError

SIGNING_KEY_VARIABLE, TRUSTED_KEY_VARIABLE = "GEMLINE_SIGNING_KEY", "GEMLINE_TRUSTED_KEY"


class SignatureError(UserError):
    """The signature is missing or does not match the trusted key."""


def sign(content: bytes) -> str | None:
    """Sign with the private key in GEMLINE_SIGNING_KEY; None if that is not set."""
    key = os.environ.get(SIGNING_KEY_VARIABLE)
    if not key:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private_key = Ed25519PrivateKey.from_private_bytes(_decode_key(SIGNING_KEY_VARIABLE, key))
    return private_key.sign(content).hex()


def verify_signature(content: bytes, signature: str | None, name: object) -> None:
    """Verify with the public key in GEMLINE_TRUSTED_KEY; without that key, accept everything.

    Args:
        content: The signed bytes.
        signature: Hex digits; None if there is no signature.
        name: What the error message calls the content.

    Raises:
        SignatureError: If the signature is missing or wrong.
    """
    key = os.environ.get(TRUSTED_KEY_VARIABLE)
    if not key:
        return
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    public_key = Ed25519PublicKey.from_public_bytes(_decode_key(TRUSTED_KEY_VARIABLE, key))
    if signature is None:
        raise SignatureError(
            f"{name} is not signed, but {TRUSTED_KEY_VARIABLE} requires a signature"
        )
    try:
        public_key.verify(bytes.fromhex(signature), content)
    except (InvalidSignature, ValueError):
        raise SignatureError(
            f"{name} was not signed by the key in {TRUSTED_KEY_VARIABLE}, "
            "or was changed after signing"
        ) from None


def _decode_key(name: str, key: str) -> bytes:
    try:
        key_bytes = bytes.fromhex(key)
    except ValueError:
        key_bytes = b""
    if len(key_bytes) != 32:
        raise UserError(f"{name} is not an Ed25519 key of 64 hex digits")
    return key_bytes
