"""Specs report all errors at once, hashes cover keys that affect tables, codes never change."""

import random
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.effects import KEY_EFFECTS, effect_of, flatten_keys
from etl.spec.sections import HistorySpec
from etl.spec.units import MAX_DURATION, format_duration, parse_duration
from etl.tables import label_schemas, schemas
from etl.tables.code_registry import CodeRegistry, assign_codes
from etl.tables.declared_columns import counter_columns
from etl.tables.lake import Lake, create_table
from etl.tables.schemas import table_registry, table_schema
from tests.conftest import ROOT, SPEC

DOMAIN = "everywhere: [feed, reels, messaging]"
USERS = """  users:
    kind: attributes
    entity: user
    format: json
    unchanged_for: 0s
    path: users/day={day}.json.gz
    key: user_id
    valid_from: changed_time
"""


@pytest.mark.parametrize("path", sorted((ROOT / "conf/specs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_spec_loads(path: Path) -> None:
    assert load_spec(path).ad_surfaces


def test_all_errors_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = SPEC.read_text()
    for good, bad in (
        ("window: 3d", "window: 3x"),
        ("{event: ad_click, window: 1h}", "{evnt: ad_click, window: 1h}"),
        ("[user, category]", "[user, catgory]"),
        ("sales]}", "sales], siez: 3}"),
        ("buckets: 4", "buckets: 6"),
        ("path: events/", "path: /events/"),
        ("reels: {}", "reels: {logged_as: feed}"),
        ("{type: categorical, size: 32}", "{type: text, analyser: char}"),
    ):
        assert good in text
        text = text.replace(good, bad)
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    lines = text.splitlines()
    with pytest.raises(UserError) as error:
        load_spec(path)
    messages = str(error.value).splitlines()
    hints = {
        "3x": "not a duration",
        "evnt": "did you mean 'event'?",
        "catgory": "did you mean 'category'?",
        "siez": "did you mean 'size'?",
        "buckets: 6": "it must be a power of two",
        "path: /events": "without the leading /",
        "surfaces:": "two surfaces are logged as 'feed'",
        "analyser": "attributes.user.country.analyser: unknown key; did you mean 'analyzer'?",
    }
    for mark, hint in hints.items():
        number = next(i for i, line in enumerate(lines, 1) if mark in line)
        assert any(f":{number}: " in m and hint in m for m in messages), (mark, messages)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("role: impression", "role: outcome", "one event type needs role: impression"),
        ("buckets: 4", "buckets: 6", "buckets is 6; it must be a power of two"),
        ("reels: {}", "reels: {logged_as: feed}", "two surfaces are logged as 'feed'"),
        (USERS, "", "attributes.user: users have attributes, but no source"),
        ("entity: user", "entity: item", "sources items, users all hold items"),
        ("numeric, transform: log}", "vector, width: 0}", "signup_days.*width"),
        (
            "numeric, transform: log}",
            "text, ngram_range: [3, 2]}",
            "signup_days.*first number is at most the second",
        ),
        (
            "{type: categorical, size: 32}",
            "{type: multi_categorical, vocabulary: [a, b, a]}",
            "country.vocabulary: a is listed twice",
        ),
        (
            "{type: categorical, size: 32}",
            "{type: multi_categorical}",
            "'country' is not among the attributes of users and of the context with one value",
        ),
        ("reels: {}", "reels: {}\n  feed: {}", "feed: duplicate key"),
        ("windows: [1h, 1d, 7d]", "windows: []", "counters.windows: .*at least 1 item"),
        ("windows: [1h, 1d, 7d]", "windows: [36501d]", "36501d is too long: write at most 36500d"),
        (
            "counters:",
            "counters:\n  half_lives: [0s]",
            "half_lives.0: .*greater than or equal to 1",
        ),
        ("windows: [1h, 1d, 7d]", "windows: [1h, 60m]", "windows: a value is listed twice"),
        ("counters:", "counters:\n  time_since_last: [yawn]", "'yawn' is not among the events"),
        (DOMAIN, DOMAIN.replace("reels", "rels"), "domains.everywhere: no ads on surface 'rels'"),
        (
            DOMAIN,
            f"{DOMAIN}\n  two: [reels]",
            "domains.two: surface 'reels' is in a domain already",
        ),
        (
            "event: ad_view, window: 1h",
            "event: ad_view, window: 4d",
            "auxiliary_objectives.view_time: its labels on feed are final after .* may be 3d",
        ),
        (
            "event: ad_view, window: 1h",
            "event: ad_view, window: 3d, label_grace_period: 1s",
            "auxiliary_objectives.view_time: its labels on feed are final after",
        ),
        ("view_time:", "click:", "auxiliary_objectives.click: an objective has a label of this"),
        (
            "      dwell: dwell_ms\n",
            "",
            "auxiliary_objectives.view_time: no source has a dwell of ad_view events",
        ),
        ("event: ad_view,", "event: ad_viw,", "'ad_viw' is not among the events"),
        (
            "attribution: [{touch: ad_click}]",
            "attribution: [{touch: ad_click}, {touch: ad_impression}]",
            "attribution.0: give touch ad_click a window: only the last touch may have none",
        ),
        ("traffic: click", "traffic: view_time", "'view_time' is not among the objectives"),
        (
            "tier, device, new_item]",
            "tier, position]",
            "calibration_segments.*'position' is not among the categorical attributes and new_item",
        ),
        (
            "hour: {type: clock, part: hour}",
            "hour: {type: clock, part: hour}\n    format: {type: categorical}",
            "calibration_segments: format is a segment of item and of context: rename an attribute",
        ),
        (
            "hour: {type: clock, part: hour}",
            "hour: {type: clock, part: hour}\n    new_item: {type: categorical}",
            "calibration_segments: new_item is a segment of context and of new items",
        ),
        (
            "calibration_segments:",
            "history: {compact_every: 30h}\ncalibration_segments:",
            "history.compact_every: write whole days, such as 30d",
        ),
    ],
)
def test_an_inconsistent_spec_is_refused_with_the_line_of_the_problem(
    tmp_path: Path, good: str, bad: str, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    assert good in SPEC.read_text()
    path.write_text(SPEC.read_text().replace(good, bad))
    with pytest.raises(UserError, match=rf"bad.yaml:\d+: .*{message}"):
        load_spec(path)


@pytest.mark.parametrize(
    ("entity", "name", "conflict"),
    [
        ("user", "id", "tables have a column `user_id`"),
        ("user", "known_since", "the table examples has a column `user_known_since`"),
        ("item", "id", "tables have a column `item_id`"),
        ("item", "index", "tables have a column `item_index`"),
        ("item", "known_since", "the table examples has a column `item_known_since`"),
        ("item", "surface", "counters have a key of this name"),
    ],
)
def test_attribute_names_that_collide_with_columns_or_counter_keys_are_refused(
    tmp_path: Path, entity: str, name: str, conflict: str
) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    raw["attributes"][entity][name] = {"type": "numeric"}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    message = f"attributes.{entity}.{name}: '{name}' is reserved: {conflict}; choose another name"
    with pytest.raises(UserError) as error:
        load_spec(tmp_path / "s.yaml")
    assert message in str(error.value)


@pytest.mark.parametrize("entity", ["user", "item", "context"])
def test_no_attribute_that_is_accepted_shares_its_column_with_another(
    tmp_path: Path, entity: str
) -> None:
    """All suffixes of the columns of all tables are tried as names of attributes."""
    raw = yaml.safe_load(SPEC.read_text())
    spec = load_spec(SPEC)
    columns = {c for schema in table_registry(spec).values() for c in schema.columns}
    prefix = {"user": "user_", "item": "item_", "context": "ctx_"}[entity]
    names = {c.removeprefix(prefix) for c in columns if c.startswith(prefix)}
    for name in names - {*raw["attributes"][entity]}:
        raw["attributes"][entity][name] = {"type": "numeric"}
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
        with pytest.raises(UserError, match=f"{name!r} is reserved"):
            load_spec(tmp_path / "s.yaml")
        del raw["attributes"][entity][name]


def spec_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and all models of its fields."""
    yield model
    for field in model.model_fields.values():
        for inner in _models_in(field.annotation):
            yield from spec_models(inner)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def test_every_section_and_key_of_a_spec_has_a_description() -> None:
    models = {*spec_models(DataSpec)}
    assert len(models) > 15
    for model in models:
        assert model.__doc__
        for name, field in model.model_fields.items():
            summary = (field.description or "").partition("\n\n")[0]
            assert summary and "\n" not in summary, (model, name)


def test_a_copy_of_a_model_with_an_unknown_field_is_refused() -> None:
    history = HistorySpec()
    assert history.model_copy(update={"max_events": 3}).max_events == 3
    assert history.model_copy() == history
    message = "HistorySpec has no field 'max_event'; did you mean 'max_events'?"
    with pytest.raises(TypeError, match=re.escape(message)):
        history.model_copy(update={"max_event": 3})


def test_a_copy_has_no_cached_property_of_the_original() -> None:
    spec = load_spec(SPEC)
    assert "click" in spec.all_objectives
    copy = spec.model_copy(update={"objectives": {}})
    assert set(copy.all_objectives) == set(spec.auxiliary_objectives)


def test_an_event_type_has_the_largest_delay_of_the_logs_that_declare_it() -> None:
    """An impression log declares the impression and its outcomes; a typed log declares one type."""
    dump = load_spec(ROOT / "conf/specs/kuairand.yaml").model_dump()
    log = dump["sources"]["log"] | {"delay": "10m"}
    likes = log | {"kind": "event_log", "event": "like", "delay": "20m"}
    del likes["outcomes"]
    dump["sources"] |= {"log": log, "likes": likes}
    spec = DataSpec.model_validate(dump)
    assert spec.visibility_delays == dict.fromkeys(spec.events, 600) | {"like": 1200}


def test_labels_are_not_final_before_their_impression_is_visible() -> None:
    """They wait for the delay of impressions, and not for that of other events."""
    dump = load_spec(ROOT / "conf/specs/kuairand.yaml").model_dump()
    log = dump["sources"]["log"]
    log["outcomes"] = [outcome | {"delay": None} for outcome in log["outcomes"]]
    likes = log | {"kind": "event_log", "event": "like", "delay": "9d"}
    del likes["outcomes"]
    dump["sources"]["likes"] = likes
    maturities = {}
    for delay in ("0s", "20m", "1d", "60h"):
        dump["sources"]["log"] = log | {"delay": delay}
        spec = DataSpec.model_validate(dump)
        maturities[delay] = spec.label_maturity_seconds, spec.label_maturity_days
        assert spec.label_delay_days >= spec.visibility_delay_days
    assert maturities == {
        "0s": (1800, 1), "20m": (1800, 1), "1d": (86_400, 1), "60h": (60 * 3600, 3)
    }  # fmt: skip


def test_the_hash_ignores_paths_and_model_inputs(tmp_path: Path) -> None:
    def hash_of(text: str) -> str:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return load_spec(path).hash

    text = SPEC.read_text()
    same = text.replace("events/day=", "elsewhere/day=").replace("max_length: 256", "max_length: 9")
    assert hash_of(same) == hash_of(text)
    assert hash_of(text.replace("window: 3d", "window: 2d")) != hash_of(text)


@pytest.mark.parametrize(("column", "event"), [("dwell", "ad_view"), ("value", "conversion")])
def test_a_function_of_a_column_needs_a_source_with_it(
    tmp_path: Path, column: str, event: str
) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    declared = {"function": "mean", "column": column, "event": event}
    raw["counters"]["aggregations"] = [declared]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    spec = load_spec(tmp_path / "s.yaml")
    assert f"mean_{column}_user_{event}_1h" in counter_columns(spec)
    del raw["sources"]["events"]["columns"][column]
    raw["objectives"]["conversion"].pop("value", None)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    message = rf"s.yaml:\d+: counters.aggregations: no source has a {column} of {event} events"
    with pytest.raises(UserError, match=message):
        load_spec(tmp_path / "s.yaml")


def test_counters_that_a_spec_does_not_declare_change_neither_tables_nor_hash() -> None:
    spec = load_spec(SPEC)
    names = [name for name in schemas.examples(spec).columns if name.startswith("cnt_")]
    assert names == list(counter_columns(spec))
    keys = dict(flatten_keys(spec.model_dump(mode="json")))
    assert not [path for path in keys if path[-1] in ("half_lives", "time_since_last")]
    for added in ({"half_lives": ["1h"]}, {"time_since_last": ["ad_click"]}):
        raw = yaml.safe_load(SPEC.read_text())
        raw["counters"] |= added
        assert DataSpec.model_validate(raw).hash != spec.hash


def leaf_keys(annotation: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all keys that a spec can have, `*` for any name."""
    arguments = typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from leaf_keys(field.annotation, (*path, name))
    elif typing.get_origin(annotation) is dict:
        yield from leaf_keys(arguments[1], (*path, "*"))
    elif typing.get_origin(annotation) is typing.Annotated:
        yield from leaf_keys(arguments[0], path)
    elif any(_holds_keys(choice) for choice in arguments):
        for choice in arguments:
            if choice is not type(None):
                yield from leaf_keys(choice, path)
    else:
        yield path


def _holds_keys(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _holds_keys(typing.get_args(annotation)[0])
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_model or any(_holds_keys(a) for a in typing.get_args(annotation) if a is not ...)


def test_every_key_of_a_spec_has_a_declared_effect() -> None:
    declared = {tuple(key.split(".")): effect for key, effect in KEY_EFFECTS.items()}
    keys = {path for path in leaf_keys(DataSpec) if "outcomes" not in path}
    assert ("sources", "*", "columns", "user") in keys
    assert ("attributes", "item", "*", "width") in keys
    for path in keys:
        effect_of(path)
        # Keys without an effect on tables are declared one by one, so that new keys are not
        # covered.
        assert effect_of(path).is_hashed or path in declared, path
    unused = {d for d in declared if not any(path[: len(d)] == d for path in keys)}
    assert unused <= {("sources", "*", "outcomes")}


@given(data=st.data())
def test_the_hash_covers_the_keys_that_affect_tables(data: st.DataObject) -> None:
    spec = load_spec(SPEC)
    keys = flatten_keys(spec.model_dump(mode="json"))
    numeric_keys = [key for key in keys if isinstance(key[1], int | float)]
    path, value = data.draw(st.sampled_from(numeric_keys))
    changed = spec.model_dump()
    section = changed
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = not value if isinstance(value, bool) else value * 2 or 1
    try:
        new = DataSpec.model_validate(changed)
    except ValidationError:
        assume(False)
    assert (new.hash != spec.hash) == effect_of(path).is_hashed, path


def shuffle_keys(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    items = [(name, shuffle_keys(inner, rng)) for name, inner in value.items()]
    return dict(rng.sample(items, len(items)))


@pytest.mark.parametrize("path", sorted((ROOT / "conf/specs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_order_of_names_has_no_effect(path: Path, tmp_path: Path) -> None:
    spec = load_spec(path)
    for seed in range(5):
        raw = shuffle_keys(yaml.safe_load(path.read_text()), random.Random(seed))
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
        other = load_spec(tmp_path / "s.yaml")
        assert other.hash == spec.hash
        assert other.model_dump_json() == spec.model_dump_json()
        assert other.surface_codes == spec.surface_codes
        assert other.event_codes == spec.event_codes


@given(st.permutations(["feed", "reels", "messaging", "stories", "alerts"]), st.integers(0, 5))
def test_codes_are_append_only(order: list[str], known: int) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    raw["surfaces"] |= {"stories": {}, "alerts": {}}
    spec = DataSpec.model_validate(raw)
    registry = CodeRegistry(surfaces=tuple(order[:known]))
    bound = assign_codes(spec, registry)
    codes = bound.surface_codes
    assert [codes[name] for name in order[:known]] == list(range(1, known + 1))
    assert sorted(codes.values()) == [1, 2, 3, 4, 5]
    assert assign_codes(bound, CodeRegistry(surfaces=tuple(bound.surfaces))).surface_codes == codes
    assert (bound.hash == spec.hash) == (codes == spec.surface_codes)


def test_a_lake_keeps_codes_when_a_spec_gains_names(tmp_path: Path) -> None:
    root, spec = str(tmp_path / "lake"), load_spec(SPEC)
    create_table(Lake(root, spec), schemas.items(spec))
    raw = yaml.safe_load(SPEC.read_text())
    raw["surfaces"]["alerts"] = {}  # sorts before all other names
    extended = DataSpec.model_validate(raw)
    assert Lake(root, extended).spec.surface_codes == spec.surface_codes | {"alerts": 4}
    (tmp_path / "lake" / "codes.json").write_text("")
    with pytest.raises(UserError, match=r"codes\.json is damaged"):
        Lake(root, spec)
    (tmp_path / "lake" / "codes.json").write_text('{"surfaces": ["reels", "feed"]}')
    with pytest.raises(UserError, match="under another spec"):
        Lake(root, spec).open("items")


@pytest.mark.parametrize(("section", "value"), [("surfaces", {"ads": False}), ("events", {})])
def test_more_names_than_a_code_can_hold_are_refused(
    tmp_path: Path, section: str, value: dict[str, bool]
) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    raw[section] |= {f"more_{i}": value for i in range(128)}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match=f"{section}: .*at most 127"):
        load_spec(tmp_path / "s.yaml")


def test_without_an_auction_rank_by_names_the_objective_that_ranks(tmp_path: Path) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    del raw["auction"]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match="name the objective that ranks, `rank_by`"):
        load_spec(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw | {"rank_by": "click"}))
    assert load_spec(tmp_path / "s.yaml").ranking_objective("feed") == "click"


def test_auxiliary_objectives_change_the_labels_alone() -> None:
    """They are no objectives: nothing else of a spec, and no other table, depends on them."""
    raw = yaml.safe_load(SPEC.read_text())
    with_them = DataSpec.model_validate(raw)
    del raw["auxiliary_objectives"]
    plain = DataSpec.model_validate(raw)
    assert with_them.hash != plain.hash
    tables = table_registry(plain)
    changed = {n for n, schema in table_registry(with_them).items() if schema != tables[n]}
    assert changed == {"impressions"}
    added = set(label_schemas.impressions(with_them).columns) - set(
        label_schemas.impressions(plain).columns
    )
    names = ("label", "label_mature_ts", "dwell_ms")
    assert added == {f"{name}_view_time" for name in names}
    assert list(with_them.objectives) == list(plain.objectives)
    assert with_them.label_maturity_days == plain.label_maturity_days
    raw["auxiliary_objectives"] = {"view": {"event": "ad_view", "window": "1h", "surfaces": []}}
    assert DataSpec.model_validate(raw).surfaces_of("view") == plain.ad_surfaces


def test_an_empty_section_of_auxiliary_objectives_changes_no_hash() -> None:
    raw = yaml.safe_load(SPEC.read_text())
    del raw["auxiliary_objectives"]
    plain = DataSpec.model_validate(raw)
    raw["auxiliary_objectives"] = {}
    assert DataSpec.model_validate(raw).hash == plain.hash


def test_a_key_of_a_later_release_that_is_not_set_ingests_no_day_again() -> None:
    spec = yaml.safe_load(SPEC.read_text())
    before = DataSpec.model_validate(spec).ingest_settings
    later = {"table", "partition_column", "where", "select", "touch"}
    assert not later & set(before["sources"]["events"])
    assert "touch" not in before["sources"]["events"]["columns"]
    assert "event" not in before["attributes"]
    spec["sources"]["events"]["owner"] = "ads"
    assert DataSpec.model_validate(spec).ingest_settings == before
    spec["sources"]["events"]["where"] = "user_id <> 'bot'"
    assert DataSpec.model_validate(spec).ingest_settings != before


def test_a_table_that_the_spec_does_not_have_is_refused() -> None:
    spec = load_spec(SPEC)
    assert table_schema(spec, "attributes_user") == schemas.attributes(spec, "user")
    with pytest.raises(UserError, match="no table is called imprints; known: events"):
        table_schema(spec, "imprints")


@given(st.integers(0, MAX_DURATION))
def test_durations_round_trip(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
