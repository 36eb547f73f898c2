"""Schema of the statistics of features."""

from etl.spec.model import DataSpec
from etl.tables.table_schema import TableSchema


def feature_statistics(_spec: DataSpec) -> TableSchema:
    """One feature on one day and surface: missing values, distinct ones, and a histogram.

    `surface` is null for attributes of items, whose versions are counted on the day on which they
    landed. `bins` are categories, or ranges of numbers (see features/feature_statistics.py), the
    fullest first; `num_bins` is how many there are, kept or not. `least` and `greatest` are null
    for categories. Vectors are counted by their norm, several values and n-grams each in its
    bin.
    """
    columns = {
        "surface": "tinyint",
        "feature": "string",
        "num_rows": "bigint",
        "num_missing": "bigint",
        "num_bins": "int",
        "least": "double",
        "greatest": "double",
        "bins": "array<int>",
        "counts": "array<bigint>",
        "day": "date",
    }
    optional = ("surface", "least", "greatest")
    required = {f"no {name}": name for name in columns if name not in optional}
    rules = {"more missing than rows": "num_missing <= num_rows"}
    order = ("feature",)
    return TableSchema(
        *("feature_statistics", columns, ("day",), order, required, rules), user_rows=None
    )
