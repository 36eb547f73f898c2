"""The feature registry: each feature with its type, owner, sources, freshness and models."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from typing import NamedTuple

from rich.table import Table

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.sources import Source, provides_attributes_of
from etl.tables import feature_schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from etl.tables.schemas import STATIC_DAY
from features.drift import read_histograms
from features.schema import FeatureSchema, feature_schema
from ranking.registry.manifest import read_manifest
from ranking.registry.ranker import live_pointer
from training.trainer.checkpoint import list_checkpoints

GEM = "gem"
FEATURE_TABLES = ("attributes_user", "attributes_item", "events", "examples", "history")


@dataclass(frozen=True)
class RegisteredFeature:
    """A feature of a lake.

    Attributes:
        type: `categorical`, `numeric`, `vector`, `clock`, `counter` or `sequence`.
        key: What its value is looked up by: `user`, `item`, `request`, `event`, or the key of a
            counter.
        sources: The sources of the spec from which it is computed.
        owners: The owners that these sources name.
        newest_day: The latest day of data in it; None before its table is written, and for static
            sources.
        missing_share: The share of rows without a value on the latest day of
            `feature_statistics`; None without statistics.
        models: Models that read it: `gem`, and the surfaces of live rankers. Attributes of events
            are read in histories, or by counters that a model reads.
    """

    name: str
    type: str
    key: str
    sources: tuple[str, ...]
    owners: tuple[str, ...]
    newest_day: date | None
    missing_share: float | None
    models: tuple[str, ...]


def registered_features(lake: Lake) -> list[RegisteredFeature]:
    """The features of a lake's spec: those of users, items, requests and events, then counters."""
    missing, models = _missing_shares(lake), _features_by_model(lake)
    newest = {name: lake.latest_day(name) for name in FEATURE_TABLES}
    features = []
    for declared in _declared_features(lake.spec):
        name, newest_day = declared.name, newest[declared.table]
        owners = dict.fromkeys(lake.spec.sources[source].owner for source in declared.sources)
        features.append(
            RegisteredFeature(
                name=name,
                type=declared.type,
                key=declared.key,
                sources=declared.sources,
                owners=tuple(owner for owner in owners if owner),
                newest_day=None if newest_day == STATIC_DAY else newest_day,
                missing_share=missing.get(name),
                models=tuple(model for model, names in models.items() if name in names),
            )
        )
    return features


class DeclaredFeature(NamedTuple):
    """A feature of a spec, and the table that holds it."""

    name: str
    type: str
    key: str
    sources: tuple[str, ...]
    table: str


def _declared_features(spec: DataSpec) -> Iterator[DeclaredFeature]:
    logs = tuple(spec.log_sources)
    for entity in ("user", "item"):
        sources = tuple(_providers(spec.sources, entity))
        for name, attribute in getattr(spec.attributes, entity).items():
            table = f"attributes_{entity}"
            yield DeclaredFeature(f"{entity}_{name}", attribute.type, entity, sources, table)
    for name, attribute in spec.attributes.context.items():
        yield DeclaredFeature(f"ctx_{name}", attribute.type, "request", logs, "examples")
    for name, attribute in spec.attributes.event.items():
        table = "history" if name in spec.history.attributes else "events"
        yield DeclaredFeature(f"event_{name}", attribute.type, "event", logs, table)
    for name in spec.sequences:
        yield DeclaredFeature(name, "sequence", "user", logs, "history")
    item_sources, user_sources = (tuple(_providers(spec.sources, e)) for e in ("item", "user"))
    for counter in spec.counters.columns:
        sources = logs
        parts = {*counter.key, counter.input_column}
        if not spec.item_counter_keys.keys().isdisjoint(parts):
            sources += item_sources
        if not spec.user_counter_keys.keys().isdisjoint(parts):
            sources += user_sources
        key = ", ".join(counter.key)
        yield DeclaredFeature(counter.column, "counter", key, sources, "examples")


def _providers(sources: Mapping[str, Source], entity: str) -> Iterator[str]:
    return (name for name, source in sources.items() if provides_attributes_of(source, entity))


def _missing_shares(lake: Lake) -> dict[str, float]:
    """The share of rows without a value by feature, over all surfaces of the latest day."""
    schema = feature_schemas.feature_statistics(lake.spec)
    latest = lake.latest_day(schema.name)
    if latest is None:
        return {}
    num_rows: dict[str, int] = {}
    num_missing: dict[str, int] = {}
    (histograms,) = read_histograms(lake.spec, snapshot(lake, schema), [latest]).values()
    for (name, _), histogram in histograms.items():
        num_rows[name] = num_rows.get(name, 0) + histogram.num_rows
        num_missing[name] = num_missing.get(name, 0) + histogram.num_missing
    return {name: num_missing[name] / rows for name, rows in num_rows.items() if rows}


def _features_by_model(lake: Lake) -> dict[str, set[str]]:
    """The features that GEM and each live ranker read."""
    by_model = {}
    checkpoints = list_checkpoints(lake.root, spec_hash=None)
    if checkpoints:
        manifest = checkpoints[-1][1]
        sequence = manifest.training.sequence or next(iter(lake.spec.sequences))
        names = _names_of(lake.spec, manifest.features, [sequence])
        in_histories = manifest.features.history_attributes
        by_model[GEM] = names | {f"event_{name.removeprefix('attr_')}" for name in in_histories}
    for surface in lake.spec.ad_surfaces:
        folder = live_pointer(lake.root, surface).live_folder
        if folder is not None:
            ranker = read_manifest(folder)
            schema = feature_schema(ranker.spec)
            by_model[surface] = _names_of(lake.spec, schema, [ranker.sequence])
    return by_model


def _names_of(spec: DataSpec, schema: FeatureSchema, sequences: Iterable[str]) -> set[str]:
    """The features of a schema, and the attributes of events that its counters are computed of."""
    groups = (schema.user, schema.item, schema.context)
    counted = {
        f"event_{counter.input_column}"
        for counter in spec.counters.columns
        if counter.input_column in spec.attributes.event and counter.column in schema.counters
    }
    columns = {name for group in groups for name in group.columns}
    return {*schema.counters, *sequences, *counted, *columns}


def select_features(features: Iterable[RegisteredFeature], text: str) -> list[RegisteredFeature]:
    """The features whose name, key, source, owner or model contains a text; UserError if none.

    An empty text selects all.
    """
    selected = [
        f
        for f in features
        if any(text in value for value in (f.name, f.key, *f.sources, *f.owners, *f.models))
    ]
    if text and not selected:
        raise UserError(f"no feature, key, source, owner or model has {text!r} in its name")
    return selected


def registry_table(features: Iterable[RegisteredFeature]) -> Table:
    """Features as a table of the console."""
    table = Table("feature", "type", "key", "sources", "owner", "newest day", "missing", "models")
    for feature in features:
        table.add_row(
            feature.name,
            feature.type,
            feature.key,
            ", ".join(feature.sources),
            ", ".join(feature.owners),
            str(feature.newest_day or ""),
            "" if feature.missing_share is None else f"{feature.missing_share:.1%}",
            ", ".join(feature.models),
        )
    return table


def registry_json(features: Iterable[RegisteredFeature]) -> str:
    """Features as a JSON list."""
    return json.dumps([asdict(feature) for feature in features], default=str, indent=1)
