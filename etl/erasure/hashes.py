"""Salted hashes of users' ids, by which erased users are known without naming them.

The salt is a property of the table `erased_users`, so that it is copied and kept with the hashes.
"""

import hashlib
import secrets

from etl.tables import user_schemas
from etl.tables.lake import Lake, create_table

SALT_PROPERTY = "gemline.erasure_salt"


def create_salt(lake: Lake) -> None:
    """Create the table of erased users with a salt, unless it has one.

    The table has its salt from its first version on: ingest reads it as soon as there is a table.
    """
    schema = user_schemas.erased_users(lake.spec)
    properties = {SALT_PROPERTY: secrets.token_hex(32)}
    create_table(lake, schema, properties)
    table = lake.open(schema.name)
    if SALT_PROPERTY not in table.metadata().configuration:  # by an earlier release
        table.alter.set_table_properties(properties, raise_if_not_exists=False)


def read_salt(lake: Lake) -> str:
    """The salt of a lake that has erased users."""
    configuration = lake.open(user_schemas.erased_users(lake.spec).name).metadata().configuration
    return str(configuration[SALT_PROPERTY])


def hash_user(salt: str, user_id: str) -> str:
    """The salted hash of a user's id, as `erased_users` has it."""
    return hashlib.sha256((salt + user_id).encode()).hexdigest()
