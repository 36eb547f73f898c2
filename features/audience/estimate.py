"""The `audience_quality` table: how good each provider's labels are, estimated from audits."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Float64, Int64
from etl.errors import UserError
from etl.spec.sections import UNKNOWN_LABEL, AudienceSpec
from etl.spec.units import DAY, date_range
from etl.tables import arrow, audience_schemas
from etl.tables.lake import Lake, arrow_schema
from etl.tables.table_schema import TableSchema
from features.audience.additive import AdditiveModel, CampaignAudits, fit_additive
from features.audience.quality import normalized_information


@dataclass(frozen=True)
class AudienceFit:
    """A fitted model, and counts (n) by combination of labels in the window.

    `users` are those of the impressions; a user counts once for each day and campaign.
    """

    spec: AudienceSpec
    model: AdditiveModel
    impressions: Float64
    users: Float64

    @property
    def class_shares(self) -> Float64:
        """P(class) (K) among all impressions of the window, as the model estimates them."""
        shares = self.impressions @ self.model.class_probabilities() / self.impressions.sum()
        return np.asarray(shares)

    @property
    def notes(self) -> list[str]:
        """What limits the estimates: coefficients that the prior decides, not the audits."""
        identified, total = self.model.audits.identified_directions(self.impressions)
        if identified == total:
            return []
        return [
            f"the {len(self.model.audits.mixtures)} audited campaigns identify {identified} of "
            f"{total} directions of the coefficients of all providers together, and the prior "
            f"decides the others (prior_weight of audience_quality): audit {total - identified} "
            "or more campaigns with other labels"
        ]

    def target_columns(self, target: Sequence[str]) -> list[int]:
        """The columns of the classes in a target; raises UserError if there are others, or none."""
        unknown = sorted(set(target) - set(self.spec.classes))
        if unknown or not target:
            known = ", ".join(self.spec.classes)
            named = ", ".join(unknown) or "no class"
            raise UserError(f"the target names {named}; the audited classes are {known}")
        return [self.spec.classes.index(name) for name in dict.fromkeys(target)]


def fit_audience(lake: Lake, name: str, until: date) -> AudienceFit:
    """Fit P(class | labels) of an audience to the audits of its window.

    Raises:
        UserError: There are no audits, or they cannot tell the labels of a provider apart, or are
            too small, or none is of a campaign in the logs.
    """
    spec = lake.spec.audiences[name]
    audits = _read_window(lake, audience_schemas.audits(lake.spec), name, until)
    if not audits.num_rows:
        raise UserError(
            f"audience {name} has no audits until {until} in its window: load an auditor's reports "
            "with `gemline audience count`"
        )
    counts = _read_window(lake, audience_schemas.audience_counts(lake.spec), name, until)
    labels, combination = _combinations(counts, len(spec.providers))
    counts = counts.drop_columns(["labels"]).append_column("combination", pa.array(combination))
    audits, audited_counts = _on_common_days(audits, counts)
    audits = _of_large_campaigns(audits, spec.min_count)
    if not audits.num_rows:
        raise UserError(
            f"no campaign with impressions until {until} has audits of {name} on the same days "
            f"of {spec.min_count} impressions or more: check that reports name values of "
            f"{spec.campaign}, or lower audiences.{name}.min_count"
        )
    audited_counts = _weighted_by_panel(audited_counts, audits)
    campaigns, audited = _audited_impressions(audits, spec.classes)
    label_names, label_index = _label_indexes(labels)
    mixtures, users = (
        _sum_by_combination(audited_counts, campaigns, column, len(labels))
        for column in ("impressions", "users")
    )
    totals = mixtures.sum(1, keepdims=True)
    mixtures /= totals
    audited *= users.sum(1, keepdims=True) / totals  # impressions of one user are one observation
    try:
        model = fit_additive(
            CampaignAudits(spec.providers, label_names, label_index, mixtures, audited)
        )
    except UserError as error:
        raise UserError(f"audience {name} cannot be estimated until {until}: {error}") from None
    totals_by_combination = (
        np.bincount(combination, counts[column].to_numpy(), len(labels)).astype(float)
        for column in ("impressions", "users")
    )
    return AudienceFit(spec, model, *totals_by_combination)


def _read_window(lake: Lake, schema: TableSchema, name: str, until: date) -> pa.Table:
    """The rows of an audience in its window of days."""
    days = -(-lake.spec.audiences[name].window // DAY)
    if not lake.exists(schema.name):
        return arrow_schema(schema).empty_table()
    window = list(date_range(until - timedelta(days=days - 1), until))
    rows = arrow.snapshot(lake, schema).read(day=window)
    return rows.filter(pc.equal(rows["audience"], name))


def _on_common_days(audits: pa.Table, counts: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The audits with impressions of their campaign and day, and the counts that are audited."""
    key = ["campaign", "day"]
    audited, counted = (rows.group_by(key).aggregate([]) for rows in (audits, counts))
    return audits.join(counted, key, join_type="inner"), counts.join(
        audited, key, join_type="inner"
    )


def _of_large_campaigns(audits: pa.Table, min_count: int) -> pa.Table:
    """The audits of campaigns with enough audited impressions."""
    reports = audits.group_by(["campaign", "day"]).aggregate([("impressions", "max")])
    totals = reports.group_by("campaign").aggregate([("impressions_max", "sum")])
    large = totals.filter(pc.greater_equal(totals["impressions_max_sum"], min_count))
    return audits.join(large.select(["campaign"]), "campaign", join_type="inner")


def _weighted_by_panel(counts: pa.Table, audits: pa.Table) -> pa.Table:
    """The counts of audited campaigns, of which each day counts as its audited impressions.

    Audits of several days are summed by their panels, not by all impressions of the days.
    """
    key = ["campaign", "day"]
    panels = audits.group_by(key).aggregate([("impressions", "max")])
    totals = counts.group_by(key).aggregate([("impressions", "sum")])
    counts = counts.join(panels, key, join_type="inner").join(totals, key, join_type="inner")
    panel = counts["impressions_max"].cast(pa.float64())
    weight = pc.divide(panel, counts["impressions_sum"].cast(pa.float64()))
    weighted = {name: pc.multiply(counts[name], weight) for name in ("impressions", "users")}
    return pa.table({name: counts[name] for name in ("campaign", "combination")} | weighted)


def _combinations(counts: pa.Table, providers: int) -> tuple[list[tuple[str, ...]], Int64]:
    """Distinct combinations (n) of labels, and the index of that of each row of `counts`."""
    flat = np.array(counts["labels"].combine_chunks().flatten().to_pylist(), dtype=str)
    distinct, index = np.unique(flat.reshape(-1, providers), axis=0, return_inverse=True)
    return [tuple(map(str, row)) for row in distinct], index.ravel().astype(np.int64)


def _label_indexes(labels: list[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], Int64]:
    """The names of the labels of each provider, and their indexes (n, S) in combinations."""
    by_provider = [np.unique(column, return_inverse=True) for column in zip(*labels, strict=True)]
    names = tuple(tuple(map(str, found)) for found, _ in by_provider)
    return names, np.stack([index.ravel() for _, index in by_provider], axis=1)


def _audited_impressions(
    audits: pa.Table, classes: tuple[str, ...]
) -> tuple[npt.NDArray[np.object_], Float64]:
    """Campaigns (C), sorted, and their audited impressions (C, K) by class."""
    campaigns, row = np.unique(audits["campaign"].to_numpy(), return_inverse=True)
    column = pc.index_in(audits["true_class"], pa.array(classes)).to_numpy()
    audited = np.zeros((len(campaigns), len(classes)))
    impressions = audits["share"].to_numpy() * audits["impressions"].to_numpy()
    np.add.at(audited, (row, column), impressions)
    return campaigns, audited


def _sum_by_combination(
    counts: pa.Table, campaigns: npt.NDArray[np.object_], column: str, combinations: int
) -> Float64:
    """A column summed by campaign, which are sorted, and combination of labels (C, n)."""
    counts = counts.filter(pc.is_in(counts["campaign"], pa.array(campaigns, pa.string())))
    row = np.searchsorted(campaigns, counts["campaign"].to_numpy())
    sums = np.zeros((len(campaigns), combinations))
    np.add.at(sums, (row, counts["combination"].to_numpy()), counts[column].to_numpy())
    return sums


def write_quality(lake: Lake, fits: dict[str, AudienceFit], until: date) -> int:
    """Replace the day `until` of `audience_quality`; returns the number of rows."""
    schema = audience_schemas.audience_quality(lake.spec)
    rows = [row for name, fit in fits.items() for row in quality_rows(name, fit, until)]
    table = pa.Table.from_pylist(rows, schema=arrow_schema(schema))
    inputs = [name for name in ("audits", "audience_counts") if lake.exists(name)]
    versions = {name: lake.version(name) for name in inputs}
    arrow.replace_rows(lake, schema, table, f"day = '{until}'", versions)
    return len(rows)


def quality_rows(name: str, fit: AudienceFit, until: date) -> list[dict[str, object]]:
    """The published rows of an audience: labels with enough users."""
    rows: list[dict[str, object]] = []
    for position, provider in enumerate(fit.spec.providers):
        confusion = fit.model.confusion(position, fit.impressions)
        lift = confusion.value / fit.class_shares
        one_hot = fit.model.audits.one_hot_labels(position)
        by_label, users = one_hot.T @ fit.impressions, one_hot.T @ fit.users
        labels = fit.model.audits.label_names[position]
        is_known = np.array([label != UNKNOWN_LABEL for label in labels])
        shared = {
            "audience": name,
            "provider": provider,
            "coverage": float(by_label[is_known].sum() / by_label.sum()),
            "information": normalized_information(confusion.value, by_label),
            "day": until,
        }
        for a, label in enumerate(labels):
            if users[a] >= fit.spec.min_count:
                of_label = shared | {"label": label, "impressions": int(by_label[a])}
                rows += [
                    of_label
                    | {
                        "true_class": true_class,
                        "precision": float(confusion.value[a, k]),
                        "low": float(confusion.low[a, k]),
                        "high": float(confusion.high[a, k]),
                        "lift": float(lift[a, k]),
                        "prior_weight": float(confusion.prior_weight[a, k]),
                    }
                    for k, true_class in enumerate(fit.spec.classes)
                ]
    return rows
