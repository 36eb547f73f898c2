"""Campaign days from a file: what each campaign spent on a day, and what came of it."""

from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from deltalake import DeltaTable

from etl.array_types import Bools, Float64
from etl.errors import UserError
from ranking.roi.curves import CampaignDays
from ranking.roi.value import value_per_conversion

REQUIRED = ("campaign", "day", "spend", "conversions", "value")
UNKNOWN = "unknown"  # the group of a day without impressions
MIN_DAYS = 2
CURRENT_DAYS = 7  # the latest days, whose mean is the current spend


@dataclass(frozen=True)
class CampaignTable:
    """Campaign days, and what plans need besides curves.

    Attributes:
        days: Days with spend, for curves.
        currency: Currency of spends and values.
        current: Mean daily spend (C) of the latest CURRENT_DAYS days with any spend.
        value_per_conversion: Attributed value (C) of a conversion, shrunk to that of all campaigns.
        value_deviation: Standard error (C) of the log of it.
        incremental_share: Share (C) of attributed conversions that an experiment found to be due to
            the campaign; 1 where none was made.
        is_incremental: Whether that of a campaign (C) is known.
    """

    days: CampaignDays
    currency: str
    current: Float64
    value_per_conversion: Float64
    value_deviation: Float64
    incremental_share: Float64
    is_incremental: Bools

    @property
    def incremental_value(self) -> Float64:
        """Incremental value (C) of an attributed conversion."""
        return self.value_per_conversion * self.incremental_share


def read_campaign_days(path: Path, groups: tuple[str, ...], currency: str | None) -> CampaignTable:
    """The campaign days of a CSV or Parquet file, or of the folder of the table `campaign_days`.

    Raises UserError if a column is missing, a value is negative or missing, a day is not a date,
    the currency is not given or not unique, or a campaign has too few days with spend, or none of
    late.
    """
    return campaign_table(str(path), _read_table(path, groups), groups, currency)


def campaign_table(
    source: str, table: pa.Table, groups: tuple[str, ...], currency: str | None
) -> CampaignTable:
    """The campaign days in the rows of `source`, which messages name; raises UserError as above."""
    _require_columns(source, table, (*REQUIRED, *groups))
    for name in ("campaign", "day"):
        _require_texts(source, table, name, "fill it in, or leave these rows out")
    table = _with_dates(source, table)
    optional = [name for name in ("arrived", "incremental_share") if name in table.column_names]
    for name in ("spend", "conversions", "value", *optional):
        _require_numbers(source, table, name)
        if name != "incremental_share":  # which few days have
            _require_present(source, table, name)
    currency = _currency(source, table, currency)
    arrived = _column(table, "arrived")
    if (arrived > 1).any():
        raise UserError(f"{source}: arrived is the share of conversions so far, from 0 to 1")
    names, rows = np.unique(table["campaign"].cast(pa.string()).to_numpy(), return_inverse=True)
    count = len(names)
    index, spend, conversions, value, arrived = _sum_by_day(table, rows)
    has_spend = (spend > 0) & (arrived > 0)  # else the day says nothing about the curve
    days_with_spend = np.bincount(index[has_spend], minlength=count)
    if (days_with_spend < MIN_DAYS).any():
        name = names[days_with_spend.argmin()]
        raise UserError(
            f"{source}: campaign {name} has {days_with_spend.min()} days with spend and "
            f"conversions that can have arrived, and a curve needs {MIN_DAYS}: leave the campaign "
            "out, or wait"
        )
    current = _current_spend(table, rows, count)
    if (current <= 0).any():
        raise UserError(
            f"{source}: campaign {names[current.argmin()]} has no spend in the last {CURRENT_DAYS} "
            "days, and plans change budgets by a share of them: leave the campaign out"
        )
    by_group = [_most_frequent_known(table[name], rows, count) for name in groups]
    days = CampaignDays(
        tuple(map(str, names)),
        np.stack(by_group, 1) if groups else np.zeros((count, 0), dtype=str),
        index[has_spend],
        spend[has_spend],
        conversions[has_spend],
        arrived[has_spend],
    )
    return CampaignTable(
        days,
        currency,
        current,
        *value_per_conversion(index, conversions, value, count),
        *_incremental_shares(source, table, rows, names),
    )


def _read_table(path: Path, groups: tuple[str, ...]) -> pa.Table:
    if path.is_dir() and DeltaTable.is_deltatable(str(path)):
        table = _without_decimals(DeltaTable(path).to_pyarrow_table())
        _require_columns(str(path), table, (*REQUIRED, *groups))
        return usable_campaigns(table)
    return read_rows(path, ("campaign", "currency", *groups))


def read_rows(path: Path, texts: tuple[str, ...]) -> pa.Table:
    """The rows of a CSV or Parquet file; raises UserError if it is neither, or repeats a column.

    The columns `texts` of a CSV file are read as they are written: 007 and 7 are two campaigns.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, but no Delta table: name a CSV or Parquet file")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else _read_csv(path, texts)
    except (pa.ArrowInvalid, OSError) as error:  # OSError: a damaged archive, or no permission
        raise UserError(f"{path} is neither CSV nor Parquet: {error}") from None
    repeated = [name for name, columns in Counter(table.column_names).items() if columns > 1]
    if repeated:
        raise UserError(f"{path} has several columns {repeated[0]}: keep one")
    return _without_decimals(table)


def _without_decimals(table: pa.Table) -> pa.Table:
    """The table with decimals, as which amounts of money are often stored, as floats."""
    fields = [
        field.with_type(pa.float64()) if pa.types.is_decimal(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def _read_csv(path: Path, texts: tuple[str, ...]) -> pa.Table:
    with pa.input_stream(str(path)) as stream:  # which reads compressed files, too
        content = stream.read()
    try:
        content.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not encoded in UTF-8: convert it, such as by iconv") from None
    as_text = pa_csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
    return pa_csv.read_csv(pa.py_buffer(content), convert_options=as_text)


def _require_columns(source: str, table: pa.Table, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise UserError(
            f"{source} has no column {', '.join(missing)}; it has {', '.join(table.column_names)}"
        )
    if not table.num_rows:
        raise UserError(f"{source} has no rows")


def _require_present(source: str, table: pa.Table, name: str) -> None:
    if table[name].null_count:
        raise UserError(f"{source}: {name} is missing in some rows")


def _require_numbers(source: str, table: pa.Table, name: str) -> None:
    """Raise UserError if a value that is there is not a number, not finite or negative."""
    values = table[name].drop_null()
    if not len(values):
        return
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise UserError(f"{source}: {name} is not a number in all rows")
    values = values.cast(pa.float64())
    if not pc.all(pc.is_finite(values)).as_py():
        raise UserError(f"{source}: {name} is not finite in some rows")
    if pc.min(values).as_py() < 0:
        raise UserError(f"{source}: {name} is negative in some rows")


def _require_texts(source: str, table: pa.Table, name: str, fix: str) -> None:
    """Raise UserError, with the fix, if a value is null or blank."""
    texts = pc.utf8_trim_whitespace(table[name].cast(pa.string()))
    if texts.null_count or pc.any(pc.equal(texts, "")).as_py():
        raise UserError(f"{source}: {name} is missing in some rows: {fix}")


def _with_dates(source: str, table: pa.Table) -> pa.Table:
    """The table with dates as `day`; raises UserError for a day that is not an ISO date."""
    days = table["day"]
    if pa.types.is_timestamp(days.type):
        dates = days.cast(pa.date32(), safe=False)  # without the time
    else:
        dates = pa.array([_date_of(source, text) for text in days.cast(pa.string()).to_pylist()])
    return table.set_column(table.column_names.index("day"), "day", dates)


def _date_of(source: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"{source}: the day {text!r} is not a date: write days as 2026-01-31"
        ) from None


def _currency(source: str, table: pa.Table, given: str | None) -> str:
    """The currency of the option, else the only one of the column."""
    if given is not None:
        if not given.strip():
            raise UserError("--currency is empty: name one, such as EUR")
        return given
    if "currency" not in table.column_names:
        raise UserError(f"{source} has no column currency: name the currency with --currency")
    _require_texts(source, table, "currency", "fill it in, or name the currency with --currency")
    found = sorted(map(str, pc.unique(table["currency"]).to_pylist()))
    if len(found) != 1:
        raise UserError(
            f"{source} has several currencies ({', '.join(found)}): convert them to one"
        )
    return found[0]


def _column(table: pa.Table, name: str) -> Float64:
    """A column of numbers; an absent one is 1."""
    if name not in table.column_names:
        return np.ones(table.num_rows)
    return np.asarray(table[name].cast(pa.float64()).to_numpy(), dtype=np.float64)


def _sum_by_day(
    table: pa.Table, index: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], Float64, Float64, Float64, Float64]:
    """Campaign, spend, conversions, value and share arrived (m) of each campaign and day.

    Rows of one campaign and day, such as those of its surfaces, are one point of its curve: they
    are summed, and the share that has arrived is their mean, weighted by spend.
    """
    _, day = np.unique(table["day"].cast(pa.string()).to_numpy(), return_inverse=True)
    _, first, row = np.unique(index * (day.max() + 1) + day, return_index=True, return_inverse=True)
    spend, conversions, value = (
        np.bincount(row, _column(table, name)).astype(float)
        for name in ("spend", "conversions", "value")
    )
    weight = _column(table, "spend") + (spend == 0)[row]
    arrived = np.bincount(row, weight * _column(table, "arrived")) / np.bincount(row, weight)
    return index[first], spend, conversions, value, np.asarray(arrived, dtype=float)


def _most_frequent_known(
    column: pa.ChunkedArray, index: npt.NDArray[np.intp], count: int
) -> npt.NDArray[np.str_]:
    """The most frequent value (C) of each campaign's rows that is known, else `unknown`."""
    texts = column.cast(pa.string()).fill_null("").to_numpy().astype(str)
    texts = np.where(np.char.strip(texts) == "", UNKNOWN, texts)
    values, code = np.unique(texts, return_inverse=True)
    rows = np.zeros((count, len(values)))
    np.add.at(rows, (index, code), texts != UNKNOWN)
    return np.where(rows.any(1), values[rows.argmax(1)], UNKNOWN)


def _incremental_shares(
    source: str, table: pa.Table, index: npt.NDArray[np.intp], names: npt.NDArray[np.object_]
) -> tuple[Float64, Bools]:
    """The latest share (C) of each campaign, 1 where none is known, and whether one is.

    Raises UserError if the rows of a campaign and day have several.
    """
    latest, is_known = np.ones(len(names)), np.zeros(len(names), bool)
    if "incremental_share" not in table.column_names:
        return latest, is_known
    has_share = table["incremental_share"].is_valid().to_numpy()
    index, table = index[has_share], table.filter(pa.array(has_share))
    share, day = _column(table, "incremental_share"), table["day"].to_numpy()
    by_day = np.argsort(day, kind="stable")
    latest[index[by_day]], is_known[index] = share[by_day], True
    latest_day = np.full(len(names), np.datetime64("nat"), day.dtype)
    latest_day[index[by_day]] = day[by_day]
    differs = (day == latest_day[index]) & (share != latest[index])
    if differs.any():
        row = differs.argmax()
        raise UserError(
            f"{source}: campaign {names[index[row]]} has several values of incremental_share on "
            f"{day[row]}: give one"
        )
    return latest, is_known


def _current_spend(table: pa.Table, index: npt.NDArray[np.intp], count: int) -> Float64:
    """Mean daily spend (C) over the latest days with any spend, a missing row counting as 0."""
    days, spend = table["day"].cast(pa.string()).to_numpy(), _column(table, "spend")
    latest = np.unique(days[spend > 0])[-CURRENT_DAYS:]
    is_recent = np.isin(days, latest)
    return np.bincount(index[is_recent], spend[is_recent], count) / max(len(latest), 1)


def usable_campaigns(table: pa.Table) -> pa.Table:
    """The rows of campaigns with spend on enough days that have final labels, and of late.

    Without a column `arrived`, labels of all days are final.
    """
    spent = table.filter(pc.greater(table["spend"], 0))
    days = np.unique(spent["day"].to_numpy())[-CURRENT_DAYS:]
    of_late = spent.filter(pa.array(np.isin(spent["day"].to_numpy(), days)))
    final = spent
    if "arrived" in table.column_names:
        final = spent.filter(pc.greater(spent["arrived"], 0))
    counts = final.group_by("campaign").aggregate([("day", "count")])
    enough = counts.filter(pc.greater_equal(counts["day_count"], MIN_DAYS))["campaign"]
    is_usable = pc.and_(
        pc.is_in(table["campaign"], enough.combine_chunks()),
        pc.is_in(table["campaign"], of_late["campaign"].combine_chunks()),
    )
    return table.filter(is_usable)
