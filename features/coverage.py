"""What examples lack, by the log of their table alone."""

from datetime import date

from etl.tables.lake import Lake


def without_attributes(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """How many examples knew nothing of their user or item, of those that the spec tells of."""
    told = {name: getattr(lake.spec.attributes, name) for name in ("user", "item")}
    return {
        f"without {name} attributes": lake.nulls("examples", f"{name}_since", days)
        for name, declared in told.items()
        if declared
    }
