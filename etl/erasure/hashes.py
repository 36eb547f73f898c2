"""Salted hashes of users' ids, by which erased users are known without naming them."""

import hashlib
import secrets

from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import resolve_uri

SALT_FILE = "_pipeline", "erasure_salt"


def create_salt(lake: Lake) -> None:
    """Write the salt of a lake, unless it has one."""
    atomic_io.create_if_absent(resolve_uri(lake.root, *SALT_FILE), secrets.token_hex(32))


def read_salt(lake: Lake) -> str:
    """The salt of a lake that has erased users."""
    return resolve_uri(lake.root, *SALT_FILE).read_text()


def hash_user(lake: Lake, user_id: str) -> str:
    """The salted hash of a user's id, as `erased_users` has it."""
    return hashlib.sha256((read_salt(lake) + user_id).encode()).hexdigest()
