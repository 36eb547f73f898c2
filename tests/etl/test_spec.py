import random
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
from etl.spec.effects import EFFECTS, effect_of, keys_of
from etl.spec.units import format_duration, parse_duration
from etl.tables import contracts
from etl.tables.codes import Codes, bind
from etl.tables.create import create
from etl.tables.lake import Lake
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
    ):
        assert good in text
        text = text.replace(good, bad)
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    lines = text.splitlines()
    with pytest.raises(UserError) as error:
        load_spec(path)
    said = str(error.value).splitlines()
    hints = {
        "3x": "not a duration",
        "evnt": "did you mean 'event'?",
        "catgory": "did you mean 'category'?",
        "siez": "did you mean 'size'?",
        "buckets: 6": "it must be a power of two",
        "path: /events": "without the leading /",
        "surfaces:": "two surfaces are logged as 'feed'",
    }
    for mark, hint in hints.items():
        number = next(i for i, line in enumerate(lines, 1) if mark in line)
        assert any(f":{number}: " in s and hint in s for s in said), (mark, said)


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        ("role: impression", "role: outcome", "one event type needs role: impression"),
        ("buckets: 4", "buckets: 6", "buckets is 6; it must be a power of two"),
        ("reels: {}", "reels: {logged_as: feed}", "two surfaces are logged as 'feed'"),
        (USERS, "", "attributes.user: users have attributes, but no source"),
        ("entity: user", "entity: item", "sources items, users all tell of items"),
        ("numeric, transform: log}", "vector, width: 3}", "signup_days"),
        ("reels: {}", "reels: {}\n  feed: {}", "feed: this key is there twice"),
        ("windows: [1h, 1d, 7d]", "windows: []", "counters.windows: .*at least 1 item"),
        (DOMAIN, DOMAIN.replace("reels", "rels"), "domains.everywhere: no ads on surface 'rels'"),
        (
            DOMAIN,
            f"{DOMAIN}\n  two: [reels]",
            "domains.two: surface 'reels' is in a domain already",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, good: str, bad: str, sentence: str
) -> None:
    path = tmp_path / "bad.yaml"
    assert good in SPEC.read_text()
    path.write_text(SPEC.read_text().replace(good, bad))
    with pytest.raises(UserError, match=rf"bad.yaml:\d+: .*{sentence}"):
        load_spec(path)


def test_an_event_type_has_the_largest_delay_of_the_logs_that_declare_it() -> None:
    """An impression log declares the impression and its outcomes, a log of one type that one."""
    told = load_spec(ROOT / "conf/specs/kuairand.yaml").model_dump()
    log = told["sources"]["log"] | {"delay": "1h"}
    likes = log | {"kind": "event_log", "event": "like", "delay": "2h"}
    del likes["outcomes"]
    spec = DataSpec.model_validate(told | {"sources": told["sources"] | {"log": log, "x": likes}})
    assert spec.delays == dict.fromkeys(spec.events, 3600) | {"like": 7200}


def test_the_hash_ignores_where_data_lies_and_what_models_read(tmp_path: Path) -> None:
    def hash_of(text: str) -> str:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return load_spec(path).hash

    text = SPEC.read_text()
    same = text.replace("events/day=", "elsewhere/day=").replace("max_length: 256", "max_length: 9")
    assert hash_of(same) == hash_of(text)
    assert hash_of(text.replace("window: 3d", "window: 2d")) != hash_of(text)


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
    declared = {tuple(key.split(".")): effect for key, effect in EFFECTS.items()}
    keys = {path for path in leaf_keys(DataSpec) if "outcomes" not in path}
    assert ("sources", "*", "columns", "user") in keys
    assert ("attributes", "item", "*", "width") in keys
    for path in keys:
        effect_of(path)
        # What has no effect on tables is declared one by one, so that a new key below it is not.
        assert effect_of(path).is_hashed or path in declared, path
    unused = {d for d in declared if not any(path[: len(d)] == d for path in keys)}
    assert unused <= {("sources", "*", "outcomes")}


@given(data=st.data())
def test_the_hash_covers_the_keys_that_affect_tables(data: st.DataObject) -> None:
    spec = load_spec(SPEC)
    keys = [(path, value) for path, value in keys_of(spec.model_dump(mode="json"))]
    path, value = data.draw(st.sampled_from([k for k in keys if isinstance(k[1], int | float)]))
    changed = spec.model_dump()
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = not value if isinstance(value, bool) else value * 2 or 1
    try:
        new = DataSpec.model_validate(changed)
    except ValidationError:
        assume(False)
    assert (new.hash != spec.hash) == effect_of(path).is_hashed, path


def reordered(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    items = [(name, reordered(inner, chance)) for name, inner in value.items()]
    return dict(chance.sample(items, len(items)))


@pytest.mark.parametrize("path", sorted((ROOT / "conf/specs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_order_of_names_means_nothing(path: Path, tmp_path: Path) -> None:
    spec = load_spec(path)
    for seed in range(5):
        raw = reordered(yaml.safe_load(path.read_text()), random.Random(seed))
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
    registry = Codes(surfaces=tuple(order[:known]))
    bound = bind(spec, registry)
    codes = bound.surface_codes
    assert [codes[name] for name in order[:known]] == list(range(1, known + 1))
    assert sorted(codes.values()) == [1, 2, 3, 4, 5]
    assert bind(bound, Codes(surfaces=tuple(bound.surfaces))).surface_codes == codes
    assert (bound.hash == spec.hash) == (codes == spec.surface_codes)


def test_a_lake_keeps_codes_when_a_spec_gains_names(tmp_path: Path) -> None:
    root, spec = str(tmp_path / "lake"), load_spec(SPEC)
    create(Lake(root, spec), contracts.items(spec))
    raw = yaml.safe_load(SPEC.read_text())
    raw["surfaces"]["alerts"] = {}  # before all others by name
    more = DataSpec.model_validate(raw)
    assert Lake(root, more).spec.surface_codes == spec.surface_codes | {"alerts": 4}
    (tmp_path / "lake" / "codes.json").write_text("")
    with pytest.raises(UserError, match=r"codes\.json is damaged"):
        Lake(root, spec)
    (tmp_path / "lake" / "codes.json").write_text('{"surfaces": ["reels", "feed"]}')
    with pytest.raises(UserError, match="under another spec"):
        Lake(root, spec).open("items")


@pytest.mark.parametrize("kind", ["surfaces", "events"])
def test_more_names_than_a_code_can_hold_are_refused(tmp_path: Path, kind: str) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    value = {"ads": False} if kind == "surfaces" else {"kind": "organic"}
    raw[kind] |= {f"more_{i}": value for i in range(128)}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match=f"{kind}: .*at most 127"):
        load_spec(tmp_path / "s.yaml")


def test_what_ranks_without_an_auction_is_named(tmp_path: Path) -> None:
    raw = yaml.safe_load(SPEC.read_text())
    del raw["auction"]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match="name the objective that ranks, `rank_by`"):
        load_spec(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw | {"rank_by": "click"}))
    assert load_spec(tmp_path / "s.yaml").ranking_objective("feed") == "click"


@given(st.integers(0, 10**7))
def test_durations_round_trip(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
