"""The schemas of what models write: GEM's predictions and embeddings, and scores of rankers."""

from etl.spec.model import DataSpec
from etl.tables.table_schema import PARTITION_COLUMNS, TableSchema, UserRows


def teacher_predictions(spec: DataSpec) -> TableSchema:
    """GEM's predictions for one impression, by a version that was trained on earlier days only.

    The logit of an objective is null while no day of its labels had been trained on.
    """
    columns = {"impression_id": "string", "fm_version": "string", "fm_trained_until": "date"}
    columns |= {f"logit_{name}": "float" for name in spec.objectives}
    columns |= PARTITION_COLUMNS
    partitions = ("day", "bucket")
    user_rows = UserRows("impression_id", None)
    return TableSchema("teacher_predictions", columns, partitions, user_rows=user_rows)


def user_teacher_embeddings(_spec: DataSpec) -> TableSchema:
    """GEM's embedding of one impression (training/teacher/outputs.py), an input of later ones.

    It is visible from `visible_ts` (seconds) on, when its day has ended and it has been written.
    Embeddings of the same compressor can be compared.
    """
    columns = {
        "user_id": "string",
        "visible_ts": "bigint",
        "impression_ts": "bigint",
        "item_index": "int",
        "impression_id": "string",
        "fm_version": "string",
        "fm_trained_until": "date",
        "compressor_version": "string",
        "teacher_embedding_int4": "binary",
    }
    order = ("user_id", "visible_ts", "impression_ts", "impression_id")
    required = {f"no {name}": name for name in columns}
    return TableSchema(
        "user_teacher_embeddings",
        columns | PARTITION_COLUMNS,
        ("day", "bucket"),
        order,
        required,
        user_rows=UserRows("user_id", None),
    )


def scores(spec: DataSpec) -> TableSchema:
    """One candidate of a request as a surface's ranker scores it; `rank` orders the candidates.

    `price` is what the campaign pays for its event. Both are null where the candidate is excluded.
    `value_…` are expected values of outcomes, given that they occur; `bid` is per event; with
    a target return it is computed from the value.
    """
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "item_id": "string",
        "ranker": "string",
        **{f"p_{name}": "double" for name in spec.objectives},
        **{f"value_{name}": "double" for name, o in spec.objectives.items() if o.value},
        "bid": "double",
        "expected_value": "double",
        "rank": "int",
        "price": "double",
    }
    columns |= {"surface": "string", "day": "date"}
    user_rows = UserRows("impression_id", None)
    return TableSchema("scores", columns, ("surface", "day"), user_rows=user_rows)
