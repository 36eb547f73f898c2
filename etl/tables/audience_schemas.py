"""The schemas of audiences: labels of data providers, audits, counts, and the estimated quality."""

from collections.abc import Callable
from dataclasses import replace

from etl.event_time import day_start_sql
from etl.spec.model import DataSpec
from etl.tables.table_schema import TableSchema, UserRows


def audience_labels(spec: DataSpec) -> TableSchema:
    """What a data provider states of a user from `valid_from` (µs) on, until its next label.

    `label` is `unknown` where the provider does not know the user.
    """
    columns = {
        "audience": "string",
        "provider": "string",
        "user_id": "string",
        "label": "string",
        "valid_from": "bigint",
        "day": "date",
    }
    order = ("audience", "user_id", "provider", "valid_from")
    rule = _one_of(spec, "provider", lambda name: spec.audiences[name].providers)
    required = {"no user": "user_id", "no time": "valid_from", "no provider": "provider"}
    return TableSchema(
        "audience_labels",
        columns,
        ("day",),
        order,
        required,
        {"unknown provider": rule},
        user_rows=UserRows("user_id", day_start_sql(spec)),
    )


def audience_label_snapshots(spec: DataSpec) -> TableSchema:
    """The labels that may be valid after a day, once a week.

    These are the latest label of each provider and user at the end of the day, and those that
    become valid later. `landing_day` is the day of the label in `audience_labels`.
    """
    labels = audience_labels(spec)
    columns = {name: type_ for name, type_ in labels.columns.items() if name != "day"}
    return replace(
        labels,
        name="audience_label_snapshots",
        columns=columns | {"landing_day": "date", "day": "date"},
        required_columns=labels.required_columns | {"no landing day": "landing_day"},
        user_rows=UserRows("user_id", day_start_sql(spec, "landing_day")),
    )


def audits(spec: DataSpec) -> TableSchema:
    """The share of a true class among the audited `impressions` of a campaign on a day."""
    columns = {
        "audience": "string",
        "campaign": "string",
        "true_class": "string",
        "share": "double",
        "impressions": "bigint",
        "day": "date",
    }
    order = ("audience", "campaign", "true_class")
    names = ("campaign", "true_class", "share", "impressions")
    rules = {
        "unknown class": _one_of(spec, "true_class", lambda name: spec.audiences[name].classes),
        "share is not between 0 and 1": "share >= 0 AND share <= 1",
        "negative count": "impressions >= 0",
    }
    required = {f"no {name}": name for name in names}
    return TableSchema("audits", columns, ("day",), order, required, rules, user_rows=None)


def audience_counts(_spec: DataSpec) -> TableSchema:
    """Impressions of a campaign on a day, and their users, by the labels of all providers.

    `labels` are in the order of `audiences.*.providers`, as of each impression.
    """
    columns = {
        "audience": "string",
        "campaign": "string",
        "labels": "array<string>",
        "impressions": "bigint",
        "users": "bigint",
        "day": "date",
    }
    required = {f"no {name}": name for name in columns}
    order = ("audience", "campaign")
    return TableSchema("audience_counts", columns, ("day",), order, required, user_rows=None)


def audience_quality(_spec: DataSpec) -> TableSchema:
    """How good a label of a provider is for a class, estimated from the audits until `day`.

    `precision` is P(class | label) with its 95 % interval (`low`, `high`), `lift` its ratio to
    P(class) among all impressions of the window, `impressions` how many the label covers,
    `coverage` the share of impressions whose users the provider knows, and `information` the
    provider's I(label; class) / H(class). `prior_weight` is 0 where the audits decide `precision`,
    and 1 where the prior of the model does.
    """
    figures = ("precision", "low", "high", "lift", "coverage", "information", "prior_weight")
    columns = {
        "audience": "string",
        "provider": "string",
        "label": "string",
        "true_class": "string",
        "impressions": "bigint",
        **dict.fromkeys(figures, "double"),
        "day": "date",
    }
    order = ("audience", "provider", "label", "true_class")
    required = {f"no {name}": name for name in columns}
    return TableSchema("audience_quality", columns, ("day",), order, required, user_rows=None)


AUDIENCE_SCHEMAS = (
    audience_labels,
    audience_label_snapshots,
    audits,
    audience_counts,
    audience_quality,
)


def _one_of(spec: DataSpec, column: str, names_of: Callable[[str], tuple[str, ...]]) -> str:
    """SQL: `column` is one of the names of its audience."""
    by_audience = [
        f"(audience = '{audience}' AND {column} IN ({', '.join(map(_quoted, names_of(audience)))}))"
        for audience in spec.audiences
    ]
    return " OR ".join(by_audience) or "false"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
