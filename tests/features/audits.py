"""Audience tables of a lake without Spark: impressions of campaigns by labels, and their audits."""

from collections.abc import Mapping
from datetime import date

import pyarrow as pa

from etl.tables import arrow, audience_schemas
from etl.tables.lake import Lake, arrow_schema

Labels = tuple[str, ...]  # of all providers


def write_audience(
    lake: Lake,
    name: str,
    day: date,
    impressions: Mapping[str, Mapping[Labels, int]],
    audits: Mapping[str, Mapping[str, float]],
    panel: int = 10_000,
) -> None:
    """Replace the counts and audits of a lake by those of one audience and day.

    Args:
        lake: The lake.
        name: The audience.
        day: The day of the impressions and audits.
        impressions: Impressions, each of another user, by campaign and labels.
        audits: Shares of the classes by audited campaign.
        panel: Audited impressions of each campaign.
    """
    counts = [
        {"campaign": campaign, "labels": labels, "impressions": size, "users": size}
        for campaign, by_labels in impressions.items()
        for labels, size in by_labels.items()
    ]
    reports = [
        {"campaign": campaign, "true_class": name, "share": share, "impressions": panel}
        for campaign, shares in audits.items()
        for name, share in shares.items()
    ]
    for schema, rows in (
        (audience_schemas.audience_counts(lake.spec), counts),
        (audience_schemas.audits(lake.spec), reports),
    ):
        complete = [row | {"audience": name, "day": day} for row in rows]
        table = pa.Table.from_pylist(complete, schema=arrow_schema(schema))
        arrow.replace_rows(lake, schema, table, "day IS NOT NULL", {})
