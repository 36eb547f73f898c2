"""How many examples lack attributes, read from the statistics of the table's log alone."""

from etl.spec.units import DayRange
from etl.tables.lake import Lake


def missing_attribute_counts(lake: Lake, days: DayRange) -> dict[str, int]:
    """Number of examples without user or item attributes, if the spec declares such attributes."""
    declared = {name: getattr(lake.spec.attributes, name) for name in ("user", "item")}
    return {
        f"without {name} attributes": lake.count_nulls("examples", f"{name}_known_since", days)
        for name, attributes in declared.items()
        if attributes
    }
