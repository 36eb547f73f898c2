"""The assets of a line, one partition a day: what each part of it has made."""

from typing import NamedTuple

from airflow.sdk import Asset

from dags.line import ATTRIBUTES, EXAMPLES, KNOWLEDGE
from etl.spec import DataSpec

TABLES = {
    "events": ("events", *ATTRIBUTES, "impressions", "flow"),
    "features": (*EXAMPLES, "events", *ATTRIBUTES),
    "knowledge": KNOWLEDGE,
}


class Assets(NamedTuple):
    """In the order in which they are made."""

    raw: Asset
    events: Asset
    features: Asset
    gem: Asset
    knowledge: Asset
    rankers: Asset


def assets_of(spec: DataSpec) -> Assets:
    """The assets of a spec."""
    return Assets(
        *(Asset(f"{spec.name}/{name}", f"gemline://{spec.name}/{name}") for name in Assets._fields)
    )
