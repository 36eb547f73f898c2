"""Cleaning up: files of table versions that are old, and that no run holds, are removed."""

from etl.tables import pins
from etl.tables.lake import Lake
from etl.told import all_contracts


def vacuum(lake: Lake, keep_days: int) -> dict[str, int]:
    """Remove what no version of the last `keep_days` needs; returns files removed, by table.

    Versions that a run holds (`etl.tables.pins`) stay whole, however old.
    """
    held = pins.pinned(lake.root)
    found = {}
    for name in _tables(lake):
        table = lake.open(name)
        kept = {pin.versions[name] for pin in held if name in pin.versions}
        gone = table.vacuum(
            retention_hours=24 * keep_days,
            dry_run=False,
            enforce_retention_duration=False,
            keep_versions=sorted(kept | {table.version()}),
        )
        found[name] = len(gone)
    return found


def _tables(lake: Lake) -> list[str]:
    return [name for name in sorted(all_contracts(lake.spec)) if lake.exists(name)]
