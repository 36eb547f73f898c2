from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.units import format_duration, parse_duration
from tests.conftest import ROOT, SPEC

DOMAIN = "everywhere: [feed, reels, messaging]"
USERS = """  users:
    kind: attributes
    entity: user
    format: json
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
        ("entity: user", "entity: item", "sources users, items all tell of items"),
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


@given(st.integers(0, 10**7))
def test_durations_round_trip(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
