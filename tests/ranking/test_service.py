"""The service: rankings, refusals, and updates of rankers and stores while it runs."""

import asyncio
import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.model import DataSpec
from etl.spec.sources import provides_attributes_of
from etl.spec.units import DAY
from gemline import main
from ranking.feature_store import storage
from ranking.feature_store.fetch import FeatureFetcher
from ranking.feature_store.request import RankRequest
from ranking.registry.ranker import live_pointer
from ranking.serving.app import create_app
from ranking.serving.loaded_rankers import require_compatible
from ranking.serving.schemas import EventPayload, EventsRequest, RankRequestBody
from ranking.serving.settings import SETTINGS_VARIABLE, Settings, clock_offset_seconds
from ranking.serving.worker import Worker, posted_event, posted_valid_from
from tests.conftest import LAST, ROOT
from tests.ranking.conftest import EVE, MOST_BYTES, other_inputs
from tests.ranking.served import ITEMS, JSON, LONG_AGO, click_of, rank_body, running

EXAMPLES = 300 if os.environ.get("GEMLINE_HYPOTHESIS") == "proof" else 20


def worker_of(client: TestClient) -> Worker:
    app = client.app
    assert isinstance(app, FastAPI)
    worker: Worker = app.state.worker
    return worker


def test_a_ranking_has_the_probabilities_of_the_ranker(client: TestClient) -> None:
    worker = worker_of(client)
    answer = client.post("/rank", json=rank_body(context={"device": "phone", "position": 1}))
    assert answer.status_code == 200
    ranking = answer.json()["ranking"]
    assert sorted(candidate["item"] for candidate in ranking) == ITEMS
    assert [candidate["rank"] for candidate in ranking] == [0, 1, 2]
    values = [candidate["expected_value"] for candidate in ranking]
    assert values == sorted(values, reverse=True)
    ranker = worker.rankers.for_surface("feed")
    assert answer.json()["ranker_version"] == ranker.manifest.version
    now = worker.settings.now_us() // 1_000_000
    request = RankRequest("u1", "feed", ITEMS, {"device": "phone", "position": 1}, now)
    inputs = FeatureFetcher(worker.feature_store.store, ranker.manifest.input_limits)(request)
    for ad in ranker.rank(inputs.requests, inputs.candidates, inputs.bids):
        assert ranking[ad.rank]["item"] == ITEMS[ad.candidate_index]
        probabilities = list(ranking[ad.rank]["probabilities"].values())
        assert probabilities == pytest.approx(ad.probabilities, rel=1e-3)


def test_a_record_is_ranked_as_its_context(client: TestClient) -> None:
    context = {"device": "phone", "position": 3}
    record = {"device": "phone", "position": "3", "column_of_no_attribute": [1]}
    bodies = rank_body(context=context), rank_body(record=record), rank_body(record={})
    answers = [client.post("/rank", json=body).json()["ranking"] for body in bodies]
    assert answers[0] == answers[1] != answers[2]


def rank_items(client: TestClient, *items: str) -> dict[str, Any]:
    answer = client.post("/rank", json=rank_body(candidates=list(items)))
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def post_item(client: TestClient, item: str, second: int = 0, **fields: object) -> None:
    """Post a version of an item, valid from a second in the past."""
    valid_from = LONG_AGO // 1000 + 1000 * second
    answer = client.post("/items", json={"item": item, "valid_from": valid_from} | fields)
    assert answer.status_code == 204, answer.text


def test_a_posted_item_is_ranked_by_its_bid(client: TestClient) -> None:
    before = rank_items(client, "new")
    assert before["ranking"] == []
    assert before["excluded"] == [{"item": "new", "reason": "unknown_item"}]
    post_item(client, "new", attributes={"kind": "ad", "goal": "traffic"}, bid=2, goal="traffic")
    (ranked,) = rank_items(client, "new")["ranking"]
    assert ranked["expected_value"] == pytest.approx(2 * ranked["probabilities"]["click"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attributes": {"kind": "ad"}}, "no_bid"),
        ({"bid": 0, "goal": "traffic"}, "no_bid"),
        ({"goal": "traffic"}, "no_bid"),
        ({"bid": 1}, "no_goal"),
    ],
)
def test_an_ad_without_a_bid_or_a_goal_is_excluded_with_the_reason(
    client: TestClient, fields: dict[str, Any], reason: str
) -> None:
    post_item(client, "free", **fields)
    response = rank_items(client, "free", *ITEMS)
    assert sorted(candidate["item"] for candidate in response["ranking"]) == ITEMS
    assert response["excluded"] == [{"item": "free", "reason": reason}]


def test_fields_that_a_posted_item_leaves_out_keep_their_values(client: TestClient) -> None:
    attributes = {"kind": "ad", "goal": "traffic", "format": "video", "advertiser_id": "of ad-1"}
    post_item(client, "new", bid=2, goal="traffic", attributes=attributes)
    (first,) = rank_items(client, "new")["ranking"]
    post_item(client, "new", 1, attributes=attributes)
    (same,) = rank_items(client, "new")["ranking"]
    assert same["expected_value"] == pytest.approx(first["expected_value"], rel=1e-3)
    post_item(client, "new", 2, bid=4)
    (doubled,) = rank_items(client, "new")["ranking"]
    assert doubled["probabilities"] == pytest.approx(first["probabilities"], rel=1e-3)
    assert doubled["expected_value"] == pytest.approx(2 * first["expected_value"], rel=1e-3)
    post_item(client, "new", 3, bid=0)
    assert rank_items(client, "new")["excluded"] == [{"item": "new", "reason": "no_bid"}]


def test_a_target_return_is_posted_and_removed(client: TestClient) -> None:
    """The ranker has learned no values: an ad with a target takes no part."""
    post_item(client, "new", bid=2, goal="sales", attributes={"kind": "ad"})
    (ranked,) = rank_items(client, "new")["ranking"]
    assert ranked["outcome_values"] == {}
    post_item(client, "new", 1, target_roas=3.0)
    post_item(client, "new", 2, bid=4)
    assert rank_items(client, "new")["excluded"] == [{"item": "new", "reason": "no_value"}]
    post_item(client, "new", 3, target_roas=0)
    (again,) = rank_items(client, "new")["ranking"]
    assert again["expected_value"] == pytest.approx(2 * ranked["expected_value"], rel=1e-3)
    clicks = {"item": "new", "bid": 1, "goal": "traffic", "target_roas": 2.0}
    answer = client.post("/items", json=clicks)
    assert answer.status_code == 400 and "have no values" in answer.json()["error"]


def test_ads_of_one_advertiser_do_not_compete(client: TestClient) -> None:
    """A second ad of the best ad's advertiser, just below it, leaves its price as it was."""
    ads = rank_items(client, *ITEMS)["ranking"]
    best = ads[0]
    for name, advertiser in (("own", f"of {best['item']}"), ("other", "of nobody else")):
        attributes = {"kind": "ad", "goal": "traffic", "advertiser_id": advertiser}
        post_item(
            client, name, bid=0.99 * float(best["item"][-1]), goal="traffic", attributes=attributes
        )
    with_own = rank_items(client, *ITEMS, "own")["ranking"]
    with_other = rank_items(client, *ITEMS, "other")["ranking"]
    assert [candidate["item"] for candidate in with_own[:2]] == [best["item"], "own"]
    assert with_own[0]["price"] == pytest.approx(best["price"], rel=1e-3)
    assert with_other[0]["price"] > 1.01 * best["price"]


def test_an_event_posted_again_is_not_new(client: TestClient) -> None:
    event = {"event_id": "e", "user": "u", "item": "ad-1", "surface": "feed", "type": "ad_click"}
    assert client.post("/events", json={"events": [event, event]}).json() == {"accepted": 1}
    assert client.post("/events", json={"events": [event]}).json() == {"accepted": 0}


@pytest.mark.parametrize("name", ["ü" * 256, "a\0b", "💎", "a" * 256])
def test_ids_may_contain_any_characters(client: TestClient, name: str) -> None:
    item = {"item": name, "attributes": {"kind": "ad"}, "valid_from": 1_600_000_000_000, "bid": 1,
            "goal": "traffic"}  # fmt: skip
    assert client.post("/items", json=item).status_code == 204
    assert client.post("/users", json={"user": name}).status_code == 204
    event = {"event_id": name, "user": name, "item": name, "surface": "feed", "type": "ad_click"}
    assert client.post("/events", json={"events": [event]}).json() == {"accepted": 1}
    answer = client.post("/rank", json=rank_body(user=name, candidates=[name]))
    assert answer.json()["ranking"][0]["expected_value"] > 0


def test_an_id_with_a_lone_surrogate_is_refused(client: TestClient) -> None:
    body = b'{"user": "\\ud800", "surface": "feed", "candidates": ["a"]}'
    answer = client.post("/rank", content=body, headers=JSON)
    assert answer.status_code == 422 and "user" in answer.json()["error"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attributes", {"format": "\ud800"}, "attributes.format"),
        ("attributes", {"format": ["\ud800"]}, "unable to parse"),
        ("attributes", {"\ud800": "a"}, "unable to parse"),
        ("goal", "\ud800", "goal"),
        ("attributes", {"format": "a" * 4097}, "at most 4096 characters"),
        ("attributes", {"format": ["a"] * 4097}, "at most 4096 items"),
    ],
)
def test_strings_that_cannot_be_encoded_or_are_too_long_are_refused(
    client: TestClient, field: str, value: object, message: str
) -> None:
    body = json.dumps({"item": "a", field: value})
    answer = client.post("/items", content=body, headers=JSON)
    assert answer.status_code == 422 and message in answer.json()["error"], answer.text
    assert client.post("/events", json={"events": [click_of("e")]}).json() == {"accepted": 1}


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("rank", rank_body(surface="moon"), 400, "no ads on surface 'moon'; known: feed"),
        ("rank", rank_body(surface="reels"), 503, "no ranker of surface 'reels' is loaded"),
        ("rank", rank_body(candidates=[]), 422, "candidates"),
        ("rank", rank_body(candidates=["a"] * 10_001), 422, "candidates"),
        ("rank", rank_body(candidates="a"), 422, "candidates"),
        ("rank", rank_body(candidates=["ad-2", "ad-1", "ad-2"]), 422, "ad-2 is given twice"),
        ("rank", rank_body(user=7), 422, "user"),
        ("rank", rank_body(colour="red"), 422, "colour"),
        ("rank", rank_body(context={"device": 3}), 400, "it is a string"),
        ("rank", rank_body(context={"position": float("nan")}), 422, "context"),
        ("rank", rank_body(context=[{}, {}]), 400, "or a context for each"),
        ("rank", rank_body(record={"position": "first"}), 400, "it is a numeric attribute"),
        ("rank", rank_body(record={}, context={"position": 1}), 400, "`context` or `record`"),
        ("rank", rank_body(source="events"), 400, "give the record, too"),
        ("rank", rank_body(record={}, source="logs"), 400, "logs is no source of events"),
        ("events", {"events": []}, 422, "events"),
        ("items", {"item": "i", "attributes": {"colour": "red"}}, 400, "no colour of items"),
        ("items", {"item": "i", "goal": "fame"}, 400, "unknown campaign goal 'fame'"),
        ("items", {"item": "i", "bid": -1}, 422, "bid"),
        ("items", {"item": "i", "bid": 1e308}, 422, "bid: Input should be less than or equal to"),
        ("items", {"item": "i", "bid": 1e12, "valid_from": 1_600_000_000}, 400, "in milliseconds"),
        ("users", {"user": "u", "valid_from": 1 << 47}, 400, "at most 30 days ahead"),
        ("users", {"user": "u", "valid_from": 1.7e12}, 422, "valid_from"),
        ("users", {"user": "u", "bid": 1}, 422, "bid"),
        ("users", {"user": "u", "attributes": {"age_band": 3}}, 400, "it is a string"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(
    client: TestClient, route: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = client.post(f"/{route}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == status and message in answer.json()["error"], answer.text
    assert client.post("/rank", json=rank_body()).status_code == 200


def test_a_body_that_is_not_json_or_too_large_or_without_length_is_refused(
    client: TestClient,
) -> None:
    assert client.post("/rank", content=b"{", headers=JSON).status_code == 422
    assert client.post("/rank", content=b"[" * 50_000, headers=JSON).status_code in (400, 422)
    large = client.post("/rank", content=b" " * (MOST_BYTES + 1), headers=JSON)
    assert large.status_code == 413 and "at most 1,000,000" in large.json()["error"]
    assert client.post("/rank", content=iter([b"{}"]), headers=JSON).status_code == 411
    assert client.get("/nowhere").json() == {"error": "Not Found"}


def test_a_refusal_is_counted_and_has_a_retry_after_header(client: TestClient) -> None:
    queue = worker_of(client).work_queue
    queue.queued_cost += queue.limits.max_queued_candidates
    answer = client.post("/rank", json=rank_body())
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert (
        'gemline_request_duration_seconds_count{route="none",status="429"}'
        in client.get("/metrics").text
    )


def test_a_promoted_ranker_is_served_and_a_damaged_one_is_not(
    worker: Worker, settings: Settings
) -> None:
    pointer, body = live_pointer(settings.lake, "feed"), RankRequestBody(**rank_body())
    before = worker.rankers.for_surface("feed")
    pointer.promote("two")
    asyncio.run(worker.refresh())
    after = worker.rankers.for_surface("feed")
    assert after is not before and worker.rank(body).ranking
    table = Path(str(pointer.folder)) / "one" / "tables.safetensors"
    table.write_bytes(table.read_bytes()[:-1])
    pointer.promote("one")
    asyncio.run(worker.refresh())
    assert worker.rankers.for_surface("feed") is after and worker.rank(body).ranking


def test_a_ranker_that_reads_more_than_the_store_holds_is_not_served(
    worker: Worker,
) -> None:
    ranker, metadata = worker.rankers.for_surface("feed"), worker.feature_store.store.metadata
    num_items = ranker.manifest.num_items
    for changes in ({"num_items": num_items - 1}, {"history_length": 1}, {"sequence": "other"}):
        with pytest.raises(UserError, match="run `gemline rank materialize`"):
            require_compatible(ranker, metadata.model_copy(update=changes))
    for key, other in other_inputs(metadata.spec).items():
        store = metadata.model_copy(update={"spec": metadata.spec.model_copy(update=other)})
        if key == "position_bias":  # requests are ranked as of the served position
            assert require_compatible(ranker, store) is ranker
            continue
        with pytest.raises(UserError, match=f"has other {key}.* than the feature store"):
            require_compatible(ranker, store)
    enough = metadata.model_copy(update={"num_items": num_items})
    assert require_compatible(ranker, enough) is ranker
    manifest = ranker.manifest.model_copy(update={"teacher_history_length": 6})
    reads_teacher = replace(ranker, manifest=manifest)
    assert metadata.teacher_history_length == 0
    with pytest.raises(UserError, match="run `gemline rank materialize`"):
        require_compatible(reads_teacher, metadata)
    older = metadata.model_copy(update={"teacher_history_length": None})
    for store in (older, metadata.model_copy(update={"teacher_history_length": 6})):
        assert require_compatible(reads_teacher, store) is reads_teacher


def events_body(*names: str) -> EventsRequest:
    return EventsRequest(events=[EventPayload.model_validate(click_of(name)) for name in names])


def test_requests_are_ranked_during_a_commit_and_pending_posts_are_committed_together(
    worker: Worker,
) -> None:
    """Another writer locks the log; ten posts wait for it."""
    env = worker.feature_store.wal.env

    async def post_while_locked() -> list[int]:
        with env.begin(write=True):
            posts = [asyncio.create_task(worker.ingest_events(events_body("first")))]
            await asyncio.sleep(0.1)
            posts += [
                asyncio.create_task(worker.ingest_events(events_body(f"{n}"))) for n in range(9)
            ]
            await asyncio.sleep(0.1)
            assert not any(post.done() for post in posts)
            assert worker.work_queue.queue_length == 10
            assert worker.rank(RankRequestBody(**rank_body())).ranking
        return [(await post).accepted for post in posts]

    before = env.info()["last_txnid"]
    assert asyncio.run(post_while_locked()) == [1] * 10
    assert env.info()["last_txnid"] - before == 2, "the first post, then all others together"


def test_a_start_time_before_the_features_is_refused(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--spec", str(settings.spec), "--lake", settings.lake]
    assert main(["rank", "serve", *where, "--start-time", f"{EVE - timedelta(days=1)}T12:00"]) == 2
    assert f"the end of their data, {LAST}T00:00:00+00:00, or later" in capsys.readouterr().err


def test_a_start_time_is_in_the_time_zone_of_the_spec() -> None:
    spec = load_spec(ROOT / "conf" / "specs" / "kuairand.yaml")
    local = clock_offset_seconds(spec, "2022-04-30T12:00")
    assert abs(local - clock_offset_seconds(spec, "2022-04-30T12:00+08:00")) <= 1
    assert abs(local - clock_offset_seconds(spec, "2022-04-30T04:00+00:00")) <= 1


def test_a_full_store_answers_507_and_still_ranks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Path(settings.lake, "feature_store", str(EVE), "data.mdb").stat().st_size
    monkeypatch.setattr(storage, "MAP_SIZE_BYTES", size + (1 << 19))
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    local = "http://localhost"
    with TestClient(create_app(), local, raise_server_exceptions=False) as client:
        for number in range(100):
            names = [f"{number}-{n}" for n in range(100)]
            answer = client.post("/events", json={"events": [click_of(n) for n in names]})
            if answer.status_code != 200:
                break
        assert answer.status_code == 507
        assert "run `gemline rank materialize`" in answer.json()["error"]
        assert client.post("/rank", json=rank_body()).status_code == 200


def test_the_service_conforms_to_its_openapi_schema(settings: Settings) -> None:
    """Requests generated from the schema, over HTTP."""
    with running(settings) as service:
        url = f"http://localhost:{service.port}/openapi.json"
        # A list over its limit may also be over the limit of bytes, which is checked first.
        rejections = {"expected-statuses": [400, 401, 404, 413, 422]}
        config = SchemathesisConfig.from_dict({"checks": {"negative_data_rejection": rejections}})
        for result in schemathesis.openapi.from_url(url, config=config).get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()
            modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
            for mode in modes:

                @hypothesis_settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: schemathesis.Case[Any]) -> None:
                    case.call_and_validate(excluded_checks=[positive_data_acceptance])

                check()


def test_a_posted_version_is_valid_after_the_delay_of_its_source(lake_spec: DataSpec) -> None:
    """As in the tables; the other entity has another source."""
    item_source = next(s for s in lake_spec.sources.values() if provides_attributes_of(s, "item"))
    name = next(n for n, source in lake_spec.sources.items() if source is item_source)
    delayed = item_source.model_copy(update={"delay": 3600})
    spec = lake_spec.model_copy(update={"sources": {**lake_spec.sources, name: delayed}})
    now = LONG_AGO + 10 * 10**6
    assert posted_valid_from(spec, "item", None, now) == now + 3600 * 10**6
    assert posted_valid_from(spec, "item", LONG_AGO // 1000, now) == LONG_AGO + 3600 * 10**6
    assert posted_valid_from(spec, "user", None, now) == now


def test_a_posted_event_names_its_log_where_ids_are_unique_in_one_log_only(
    lake_spec: DataSpec,
) -> None:
    def log_of(payload: EventPayload, **changes: object) -> str | None:
        sources = {**lake_spec.sources, "app": lake_spec.sources["events"]}
        spec = DataSpec.model_validate(lake_spec.model_dump() | {"sources": sources} | changes)
        return posted_event(spec, payload, LONG_AGO, ()).log

    click = EventPayload.model_validate(click_of("e") | {"source": "app"})
    assert log_of(click) == "app"
    assert log_of(click.model_copy(update={"source": None})) is None
    assert log_of(click, shared_event_ids=True) is None
    assert log_of(click.model_copy(update={"type": lake_spec.impression_type})) is None
    with pytest.raises(UserError, match="users is no log of events; there is events, app"):
        log_of(click.model_copy(update={"source": "users"}))


def test_a_posted_version_is_valid_from_the_day_of_the_post_unless_its_source_is_static(
    lake_spec: DataSpec,
) -> None:
    """As in the tables: etl/attributes.py."""
    stated, now = LONG_AGO - 30 * DAY * 10**6, LONG_AGO
    day_start = lake_spec.day_start(lake_spec.day_of(now // 10**6)) * 10**6
    assert posted_valid_from(lake_spec, "item", stated // 1000, now) == day_start
    sources = {
        name: source.model_copy(update={"delay": 3600, "static": True})
        if provides_attributes_of(source, "item")
        else source
        for name, source in lake_spec.sources.items()
    }
    static = lake_spec.model_copy(update={"sources": sources})
    assert posted_valid_from(static, "item", stated // 1000, now) == stated + 3600 * 10**6
    assert posted_valid_from(static, "user", stated // 1000, now) == day_start


def test_a_posted_bid_with_an_early_valid_from_replaces_the_bid_of_the_tables(
    client: TestClient,
) -> None:
    (before,) = rank_items(client, "ad-1")["ranking"]
    post_item(client, "ad-1", -1, bid=9)
    (after,) = rank_items(client, "ad-1")["ranking"]
    assert after["expected_value"] == pytest.approx(9 * before["expected_value"], rel=1e-3)
