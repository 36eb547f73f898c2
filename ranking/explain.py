"""`gemline explain`: a text page about one impression, with point-in-time features."""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.spec.counters import Counter
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, format_duration
from etl.tables import arrow, label_schemas, model_schemas, schemas
from etl.tables.lake import Lake
from etl.tables.table_schema import TableSchema
from etl.tables.uri import StoragePath, resolve_uri
from features.history.codec import dequantize_dwell
from ranking.scoring.calibration import sigmoid
from training.data.histories import load_histories

MAX_HISTORY_EVENTS = 20
NOT_FEATURES = {"user_id", "user_known_since", "item_index", "item_known_since"}
Row = dict[str, Any]


def explain_impression(lake: Lake, impression_id: str) -> str:
    """The page of an impression; raises UserError if the lake does not have it."""
    page = ImpressionPage.read(lake, impression_id)
    sections = {
        f"impression {impression_id}": page.event_lines(),
        "raw record": page.raw_record_lines(),
        "user, as of the impression": page.attribute_lines("user"),
        "item, as of the impression": page.attribute_lines("item"),
        "labels": page.label_lines(),
        "features, as of the impression": page.feature_lines(),
        f"history, the last {MAX_HISTORY_EVENTS} events before it": page.history_lines(),
        "GEM": page.teacher_lines(),
        "ranker": page.ranker_lines(),
    }
    return "\n".join(_section(title, lines) for title, lines in sections.items())


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, "-" * len(title), *(lines or ["none"]), ""])


@dataclass(frozen=True)
class ImpressionPage:
    """The rows of an impression, and the lines of each section of its page."""

    lake: Lake
    event: Row
    impression: Row | None
    example: Row | None

    @classmethod
    def read(cls, lake: Lake, impression_id: str) -> "ImpressionPage":
        """Find an impression in the tables; raises UserError if there is none."""
        spec = lake.spec
        event = _read_impression_row(
            lake,
            schemas.events(spec),
            impression_id,
            event_type_code=spec.event_codes[spec.impression_type],
        )
        if event is None:
            raise UserError(
                f"no impression {impression_id!r} in {lake.root}: ids are in column impression_id "
                "of table events"
            )
        partition = _partition_of(event)
        impression = _read_impression_row(
            lake, label_schemas.impressions(spec), impression_id, **partition
        )
        example = _read_impression_row(lake, schemas.examples(spec), impression_id, **partition)
        return cls(lake, event, impression, example)

    @property
    def spec(self) -> DataSpec:
        """The data spec."""
        return self.lake.spec

    @property
    def as_of(self) -> int:
        """The time as of which features are read, in µs."""
        return int(
            self.example["as_of_ts"] * MICROS["s"] if self.example else self.event["event_ts"]
        )

    @cached_property
    def surface(self) -> str:
        """The impression's surface."""
        return self._surface_names[self.event["surface"]]

    @cached_property
    def _surface_names(self) -> dict[int, str]:
        return {code: name for name, code in self.spec.surface_codes.items()}

    def event_lines(self) -> list[str]:
        """The impression, its times, and its context."""
        event = self.event
        context = [
            f"{name.removeprefix('ctx_')}: {value}"
            for name, value in event.items()
            if name.startswith("ctx_")
        ]
        return [
            f"user {event['user_id']}, item {event['item_id']}, surface {self.surface}, "
            f"position {event['position']}",
            f"occurred {exact_utc(event['event_ts'])}, ingested {exact_utc(event['ingest_ts'])}, "
            f"visible {exact_utc(event['visible_ts'] * MICROS['s'])}, landed {event['day']}",
            *context,
        ]

    def raw_record_lines(self) -> list[str]:
        """The file and line that the event was read from, if the file still exists."""
        path = resolve_uri(unquote(self.event["source_file"].removeprefix("file://")))
        if not path.is_file():
            return [f"{path} (no longer there)"]
        event_id = self.event["event_id"]
        full_id, parts = _word_pattern(event_id), [*map(_word_pattern, event_id.split("-"))]
        with_parts = None  # of an id that was made of several columns
        for number, line in enumerate(_read_lines(path), 1):
            if full_id.search(line):
                return [f"{path}:{number}", line.rstrip()]
            if with_parts is None and all(part.search(line) for part in parts):
                with_parts = [f"{path}:{number}", line.rstrip()]
        return with_parts or [f"{path} (not a text file, or changed since)"]

    def attribute_lines(self, entity: str) -> list[str]:
        """The attributes of the user or the item that were valid before the impression."""
        schema, key = schemas.attributes(self.spec, entity), f"{entity}_id"
        if not self.lake.exists(schema.name):
            return []
        rows = arrow.snapshot(self.lake, schema).read()
        is_valid = pc.and_(
            pc.equal(rows[key], self.event[key]), pc.less(rows["valid_from"], self.as_of)
        )
        versions = rows.filter(is_valid).sort_by("valid_from").to_pylist()
        if not versions:
            return ["no version of its attributes was valid before"]
        newest = versions[-1]
        values = [
            f"{name.removeprefix('attr_')}: {value}"
            for name, value in newest.items()
            if name not in {key, "valid_from", "day"}
        ]
        return [f"valid from {exact_utc(newest['valid_from'])}, landed {newest['day']}", *values]

    def label_lines(self) -> list[str]:
        """The labels and when they are final."""
        if self.impression is None:
            return []
        lines = []
        for name, objective in self.spec.objectives.items():
            label = self.impression[f"label_{name}"]
            mature = exact_utc(self.impression[f"label_mature_ts_{name}"])
            text = "not final yet" if label is None else f"{label}"
            if objective.value and label:
                text += f", value {self.impression[f'value_{name}']}"
            window = format_duration(objective.window)
            lines.append(f"{name} within {window}: {text} (final from {mature})")
        return lines

    def feature_lines(self) -> list[str]:
        """The encoded features of the example and its item, and counters that are not zero."""
        if self.example is None:
            return []
        features = self.example | self._item_version(self.example)
        encoded = [
            f"{name}: {value}"
            for name, value in features.items()
            if name.startswith(("user_", "ctx_", "item_")) and name not in NOT_FEATURES
        ]
        counters = self._counter_lines(self.example)
        return [f"encoded: {', '.join(encoded)}", "counters that are not zero:", *counters]

    def _item_version(self, example: Row) -> Row:
        """The version of the item's features that was valid before the example, if any."""
        rows = arrow.snapshot(self.lake, schemas.item_versions(self.spec)).read()
        is_valid = pc.and_(
            pc.equal(rows["item_index"], example["item_index"]),
            pc.less(rows["valid_from"], example["as_of_ts"] * MICROS["s"]),
        )
        versions = rows.filter(is_valid).sort_by("valid_from").to_pylist()
        return versions[-1] if versions else {}

    def _counter_lines(self, example: Row) -> list[str]:
        """One line for each key, aggregation and period, with the event types that have a value."""
        values: dict[str, list[str]] = {}
        for counter in self.spec.counters.columns:
            value = example[counter.column]
            if value:
                text = f"{value:.3g}" if isinstance(value, float) else str(value)
                label = f"{' x '.join(counter.key)}, {_period_label(counter)}"
                values.setdefault(label, []).append(f"{counter.event} {text}")
        return [f"{label}: {', '.join(of_events)}" for label, of_events in values.items()]

    def history_lines(self) -> list[str]:
        """The most recent events of the history that models read."""
        example = self.example
        if example is None or not example["history_length"]:
            return []
        lines = [f"{example['history_length']} events in all, version {example['history_version']}"]
        items = arrow.snapshot(self.lake, schemas.items(self.spec)).read(["item_id", "item_index"])
        item_ids = dict(
            zip(items["item_index"].to_pylist(), items["item_id"].to_pylist(), strict=True)
        )
        event_types = {code: name for name, code in self.spec.event_codes.items()}
        events = self._recent_events(example)
        for event, dwell in zip(events, dequantize_dwell(events["dwell"]), strict=True):
            seconds_before = example["as_of_ts"] - event["visible_ts"]
            line = (
                f"{seconds_before:>9,} s before  {event_types[event['type']]:<14} "
                f"{self._surface_names[event['surface']]:<10} {item_ids.get(event['item'])}"
            )
            lines.append(line if np.isnan(dwell) else f"{line}  {dwell / 1000:.1f} s")
        return lines

    def _recent_events(self, example: Row) -> np.ndarray:
        stored = load_histories(
            arrow.snapshot(self.lake, schemas.history(self.spec)), self.event["bucket"]
        )
        return stored.slices(
            stored.user_positions(pa.array([self.event["user_id"]])),
            np.array([example["as_of_ts"]]),
            np.array([example["history_length"]]),
            MAX_HISTORY_EVENTS,
        ).events

    def teacher_lines(self) -> list[str]:
        """GEM's probabilities, from before it learned from the impression."""
        row = _read_impression_row(
            self.lake,
            model_schemas.teacher_predictions(self.spec),
            self.event["impression_id"],
            **_partition_of(self.event),
        )
        if row is None:
            return []
        logits = {name: row[f"logit_{name}"] for name in self.spec.objectives}
        probabilities = [
            f"{name}: {sigmoid(np.asarray(logit)):.5f}"
            for name, logit in logits.items()
            if logit is not None
        ]
        return [f"{row['fm_version']}, trained until {row['fm_trained_until']}", *probabilities]

    def ranker_lines(self) -> list[str]:
        """The ranker's probabilities and the auction, as batch scoring wrote them."""
        row = _read_impression_row(
            self.lake,
            model_schemas.scores(self.spec),
            self.event["impression_id"],
            surface=self.surface,
            day=self.event["day"],
        )
        if row is None:
            return []
        probabilities = [f"{name}: {row[f'p_{name}']:.5f}" for name in self.spec.objectives]
        values = [
            f"expected value of {name}: {row[f'value_{name}']:.2f}"
            for name, objective in self.spec.objectives.items()
            if objective.value and row.get(f"value_{name}") is not None
        ]
        auction = [f"effective bid {row['bid']}"] if self.spec.auction else []
        auction.append(f"expected value {row['expected_value']:.6f}")
        is_ranked = row["rank"] is not None
        auction.append(f"rank {row['rank']} of its request" if is_ranked else "not in the auction")
        return [
            f"ranker {row['ranker']} of {self.surface}",
            *probabilities,
            *values,
            ", ".join(auction),
        ]


def _partition_of(event: Row) -> Row:
    return {"day": event["day"], "bucket": event["bucket"]}


def _read_impression_row(
    lake: Lake,
    schema: TableSchema,
    impression_id: str,
    event_type_code: int | None = None,
    **partition: object,
) -> Row | None:
    """The row of an impression in the given partitions of a table, if the table has it."""
    if not lake.exists(schema.name):
        return None
    snapshot = arrow.snapshot(lake, schema)
    columns = ["impression_id"] if event_type_code is None else ["impression_id", "type"]
    for path, values in snapshot.files:
        if any(values[key] != value for key, value in partition.items() if key in values):
            continue
        file = snapshot.single_file(path)
        ids = file.read(columns)
        is_row = pc.equal(ids["impression_id"], impression_id)
        if event_type_code is not None:
            is_row = pc.and_(is_row, pc.equal(ids["type"], event_type_code))
        if pc.any(is_row).as_py():
            row: Row = file.read().filter(is_row).to_pylist()[0]
            return row
    return None


def exact_utc(micros: int) -> str:
    """A time in microseconds, as text to the millisecond, in UTC."""
    return f"{datetime.fromtimestamp(micros / 1e6, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _period_label(counter: Counter) -> str:
    period = "" if counter.period is None else format_duration(counter.period)
    match counter.aggregation:
        case "count":
            return period
        case "decayed_count":
            return f"half-life {period}"
        case "time_since_last":
            return "seconds since the last"
        case "distinct_count":
            return f"distinct {counter.input_column}, {period}"
        case function:
            unit = "seconds of " if counter.input_column == "dwell" else ""
            return f"{function} of {unit}{counter.input_column}, {period}"


def _word_pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def _read_lines(path: StoragePath) -> Iterator[str]:
    """The lines of a text file, plain or gzip; none of a Parquet file."""
    if path.suffix == ".parquet":
        return
    if path.suffix == ".gz":
        with path.open("rb") as stored, gzip.open(stored, "rt", errors="replace") as text:
            yield from text
    else:
        with path.open(errors="replace") as plain:
            yield from plain
