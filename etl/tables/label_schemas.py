"""The schemas of impressions with their labels, and of outcomes that were retracted later."""

from etl.spec.model import DataSpec
from etl.tables.table_schema import PARTITION_COLUMNS, TableSchema, UserRows


def impressions(spec: DataSpec) -> TableSchema:
    """One ad impression; a label is null until its `label_mature_ts_…` (µs), then final.

    `value_…` and `dwell_ms_…` are sums over the outcomes; a dwell is null where none has one.
    """
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "user_id": "string",
        "item_id": "string",
        "surface": "tinyint",
        "event_ts": "bigint",
        "position": "int",
        "propensity": "double",
    }
    for name, (objective, _) in spec.label_windows.items():
        columns |= {f"label_{name}": "tinyint", f"label_mature_ts_{name}": "bigint"}
        summed = spec.all_objectives[objective].summed_column
        columns |= {f"{summed}_{name}": "double"} if summed else {}
    order = ("user_id", "event_ts", "impression_id")
    ids = ("impression_id", "request_id", "user_id", "item_id")
    return TableSchema(
        "impressions",
        columns | PARTITION_COLUMNS,
        ("day", "bucket"),
        order,
        required_columns={f"no {name}": name for name in (*ids, "surface", "event_ts")},
        constraints={
            f"label of {name} not 0 or 1": f"label_{name} IN (0, 1)" for name in spec.label_windows
        },
        user_rows=UserRows("user_id", None),
    )


def late_retractions(_spec: DataSpec) -> TableSchema:
    """One outcome that was retracted after a label that counts it was final, within `within`.

    Only specs with an objective that is `retracted_by` an event have the table. `outcomes_left` is
    how many other counted outcomes of the impression were not retracted by then; `retracted_ts`
    (seconds) is when the retraction became visible, on `day`.
    """
    columns = {
        "impression_id": "string",
        "user_id": "string",
        "objective": "string",
        "surface": "tinyint",
        "outcome_id": "string",
        "retraction_id": "string",
        "retracted_ts": "bigint",
        "label_mature_ts": "bigint",
        "outcomes_left": "int",
    }
    order = ("user_id", "impression_id", "outcome_id")
    required = {f"no {name}": name for name in columns}
    columns |= {"value": "double"}
    return TableSchema(
        "late_retractions",
        columns | PARTITION_COLUMNS,
        ("day", "bucket"),
        order,
        required,
        user_rows=UserRows("user_id", None),
    )
