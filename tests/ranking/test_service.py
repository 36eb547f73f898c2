"""The service: what it ranks, what it refuses, and what changes under it while it answers."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from benchmarks.serving.load import Client, encoded
from etl.errors import UserError
from etl.spec import load_spec
from etl.tables.lake import Lake
from gemline import main
from ranking.online import database
from ranking.online.assemble import Assembler
from ranking.online.live import Live, stores
from ranking.online.request import Asked
from ranking.package.versions import current
from ranking.serve.app import create
from ranking.serve.bodies import EventsBody, RankBody
from ranking.serve.settings import NAME, Settings
from ranking.serve.worker import Worker
from tests.conftest import LAST, ROOT
from tests.ranking.conftest import EVE, MOST_BYTES
from tests.ranking.poster import times_counted
from tests.ranking.served import ITEMS, JSON, LONG_AGO, asking, free_port, running

EXAMPLES = 300 if os.environ.get("GEMLINE_HYPOTHESIS") == "proof" else 20
SENDERS = 20  # a history holds 40 events


def test_a_ranking_is_what_the_ranker_says_of_the_store(client: TestClient) -> None:
    worker = client.app.state.worker
    answer = client.post("/rank", json=asking(context={"device": "phone", "position": 1}))
    assert answer.status_code == 200
    ranking = answer.json()["ranking"]
    assert sorted(one["item"] for one in ranking) == ITEMS
    values = [one["expected_value"] for one in ranking]
    assert values == sorted(values, reverse=True)
    ranker = worker.rankers.of("feed")
    asked = Asked("u1", "feed", worker.settings.now() // 1_000_000, ITEMS,
                  {"device": "phone", "position": 1})  # fmt: skip
    told = Assembler(worker.live.store, ranker.manifest.reads)(asked)
    for one in ranker.rank(told.requests, told.candidates, told.bids, told.goals):
        assert ranking[one.place]["item"] == ITEMS[one.row]
        said = list(ranking[one.place]["probabilities"].values())
        assert said == pytest.approx(one.probabilities, rel=1e-3)


def ranking_of(client: TestClient, *items: str) -> dict:
    answer = client.post("/rank", json=asking(candidates=list(items)))
    assert answer.status_code == 200, answer.text
    return answer.json()


def posted(client: TestClient, name: str, second: int = 0, **fields: object) -> None:
    """An item's new version, valid from a second long ago on."""
    since = LONG_AGO // 1000 + 1000 * second
    answer = client.post("/items", json={"name": name, "valid_from": since} | fields)
    assert answer.status_code == 204, answer.text


def test_a_posted_item_is_ranked_by_what_is_bid_for_it(client: TestClient) -> None:
    before = ranking_of(client, "new")
    assert before["ranking"] == []
    assert before["excluded"] == [{"item": "new", "reason": "unknown_item"}]
    posted(client, "new", values={"kind": "ad", "goal": "traffic"}, bid=2, goal="traffic")
    (found,) = ranking_of(client, "new")["ranking"]
    assert found["expected_value"] == pytest.approx(2 * found["probabilities"]["click"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"values": {"kind": "ad"}}, "no_bid"),
        ({"bid": 0, "goal": "traffic"}, "no_bid"),
        ({"goal": "traffic"}, "no_bid"),
        ({"bid": 1}, "no_goal"),
    ],
)
def test_an_ad_without_a_bid_or_a_goal_is_reported_and_not_ranked(
    client: TestClient, fields: dict, reason: str
) -> None:
    posted(client, "free", **fields)
    found = ranking_of(client, "free", *ITEMS)
    assert [one["item"] for one in found["ranking"]] != [] and found["excluded"] == [
        {"item": "free", "reason": reason}
    ]


def test_what_a_posted_item_leaves_out_stays_as_it_was(client: TestClient) -> None:
    values = {"kind": "ad", "goal": "traffic", "format": "video", "advertiser_id": "of ad-1"}
    posted(client, "new", bid=2, goal="traffic", values=values)
    (first,) = ranking_of(client, "new")["ranking"]
    posted(client, "new", 1, values=values)
    (same,) = ranking_of(client, "new")["ranking"]
    assert same["expected_value"] == pytest.approx(first["expected_value"], rel=1e-3)
    posted(client, "new", 2, bid=4)
    (doubled,) = ranking_of(client, "new")["ranking"]
    assert doubled["probabilities"] == pytest.approx(first["probabilities"], rel=1e-3)
    assert doubled["expected_value"] == pytest.approx(2 * first["expected_value"], rel=1e-3)
    posted(client, "new", 3, bid=0)
    assert ranking_of(client, "new")["excluded"] == [{"item": "new", "reason": "no_bid"}]


def test_ads_of_one_advertiser_do_not_compete(client: TestClient) -> None:
    """A second ad of the best ad's advertiser, just below it, leaves its price as it was."""
    ads = ranking_of(client, *ITEMS)["ranking"]
    best = ads[0]
    for name, advertiser in (("own", f"of {best['item']}"), ("other", "of nobody else")):
        values = {"kind": "ad", "goal": "traffic", "advertiser_id": advertiser}
        posted(client, name, bid=0.99 * float(best["item"][-1]), goal="traffic", values=values)
    with_own = ranking_of(client, *ITEMS, "own")["ranking"]
    with_other = ranking_of(client, *ITEMS, "other")["ranking"]
    assert [one["item"] for one in with_own[:2]] == [best["item"], "own"]
    assert with_own[0]["price"] == pytest.approx(best["price"], rel=1e-3)
    assert with_other[0]["price"] > 1.01 * best["price"]


def test_an_event_told_again_is_not_new(client: TestClient) -> None:
    event = {"event_id": "e", "user": "u", "item": "ad-1", "surface": "feed", "type": "ad_click"}
    assert client.post("/events", json={"events": [event, event]}).json() == {"taken": 1}
    assert client.post("/events", json={"events": [event]}).json() == {"taken": 0}


@pytest.mark.parametrize("name", ["ü" * 256, "a\0b", "💎", "a" * 256])
def test_names_of_any_letters_are_names(client: TestClient, name: str) -> None:
    told = {"name": name, "values": {"kind": "ad"}, "valid_from": 1_600_000_000_000, "bid": 1,
            "goal": "traffic"}  # fmt: skip
    assert client.post("/items", json=told).status_code == 204
    assert client.post("/users", json={"name": name}).status_code == 204
    event = {"event_id": name, "user": name, "item": name, "surface": "feed", "type": "ad_click"}
    assert client.post("/events", json={"events": [event]}).json() == {"taken": 1}
    asked = client.post("/rank", json=asking(user=name, candidates=[name]))
    assert asked.json()["ranking"][0]["expected_value"] > 0


def test_half_a_letter_is_no_name(client: TestClient) -> None:
    body = b'{"user": "\\ud800", "surface": "feed", "candidates": ["a"]}'
    answer = client.post("/rank", content=body, headers=JSON)
    assert answer.status_code == 422 and "user" in answer.json()["error"]


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("rank", asking(surface="moon"), 400, "no ads on surface 'moon'; known: feed"),
        ("rank", asking(surface="reels"), 503, "no ranker of surface 'reels' is loaded"),
        ("rank", asking(candidates=[]), 422, "candidates"),
        ("rank", asking(candidates=["a"] * 10_001), 422, "candidates"),
        ("rank", asking(candidates="a"), 422, "candidates"),
        ("rank", asking(user=7), 422, "user"),
        ("rank", asking(colour="red"), 422, "colour"),
        ("rank", asking(context={"device": 3}), 400, "it is a string"),
        ("rank", asking(context={"position": float("nan")}), 422, "context"),
        ("rank", asking(context=[{}, {}]), 400, "a context for each"),
        ("events", {"events": []}, 422, "events"),
        ("items", {"name": "i", "values": {"colour": "red"}}, 400, "no colour of items"),
        ("items", {"name": "i", "goal": "fame"}, 400, "unknown campaign goal 'fame'"),
        ("items", {"name": "i", "bid": -1}, 422, "bid"),
        ("items", {"name": "i", "bid": 1e308}, 422, "bid: Input should be less than or equal to"),
        ("items", {"name": "i", "bid": 1e12, "valid_from": 1_600_000_000}, 400, "in milliseconds"),
        ("users", {"name": "u", "valid_from": 1 << 47}, 400, "at most 30 days ahead"),
        ("users", {"name": "u", "valid_from": 1.7e12}, 422, "valid_from"),
        ("users", {"name": "u", "bid": 1}, 422, "bid"),
        ("users", {"name": "u", "values": {"age_band": 3}}, 400, "it is a string"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    client: TestClient, route: str, body: dict, status: int, said: str
) -> None:
    answer = client.post(f"/{route}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == status and said in answer.json()["error"], answer.text
    assert client.post("/rank", json=asking()).status_code == 200


def test_what_is_no_json_or_too_large_or_of_no_size_is_refused(client: TestClient) -> None:
    assert client.post("/rank", content=b"{", headers=JSON).status_code == 422
    assert client.post("/rank", content=b"[" * 50_000, headers=JSON).status_code in (400, 422)
    large = client.post("/rank", content=b" " * (MOST_BYTES + 1), headers=JSON)
    assert large.status_code == 413 and "at most 1,000,000" in large.json()["error"]
    assert client.post("/rank", content=iter([b"{}"]), headers=JSON).status_code == 411
    assert client.get("/nowhere").json() == {"error": "Not Found"}


def test_a_refusal_is_counted_and_says_when_to_ask_again(client: TestClient) -> None:
    queue = client.app.state.worker.queue
    queue.cost += queue.limits.queued_candidates
    answer = client.post("/rank", json=asking())
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert 'gemline_seconds_count{route="none",status="429"}' in client.get("/metrics").text


def test_a_promoted_ranker_takes_over_and_a_damaged_one_does_not(
    worker: Worker, settings: Settings
) -> None:
    pointer, body = current(settings.lake, "feed"), RankBody(**asking())
    before = worker.rankers.of("feed")
    pointer.swap("two")
    asyncio.run(worker.renew())
    after = worker.rankers.of("feed")
    assert after is not before and worker.rank(body).ranking
    table = pointer.folder / "one" / "tables.safetensors"
    table.write_bytes(table.read_bytes()[:-1])
    pointer.swap("one")
    asyncio.run(worker.renew())
    assert worker.rankers.of("feed") is after and worker.rank(body).ranking


def test_a_ranker_that_knows_more_items_than_the_store_waits_for_a_newer_store(
    worker: Worker,
) -> None:
    from ranking.serve.rankers import fitting

    ranker, meta = worker.rankers.of("feed"), worker.live.store.meta
    for changes in ({"items": ranker.manifest.items - 1}, {"length": 1}, {"sequence": "other"}):
        with pytest.raises(UserError, match="run `gemline rank store`"):
            fitting(ranker, meta.model_copy(update=changes))
    assert fitting(ranker, meta.model_copy(update={"items": ranker.manifest.items})) is ranker


def events_body(*names: str) -> EventsBody:
    return EventsBody(events=[event_body(name) for name in names])


def event_body(name: str) -> dict[str, str]:
    return {"event_id": name, "user": f"user-{name}", "item": "ad-1", "surface": "feed",
            "type": "ad_click"}  # fmt: skip


def test_rankings_go_on_while_commits_wait_and_what_waits_is_committed_at_once(
    worker: Worker,
) -> None:
    """The log is locked by a writer; ten posts wait for it."""
    env = worker.live.log.env

    async def waiting() -> list[int]:
        with env.begin(write=True):
            posts = [asyncio.create_task(worker.take(events_body("first")))]
            await asyncio.sleep(0.1)
            posts += [asyncio.create_task(worker.take(events_body(f"{n}"))) for n in range(9)]
            await asyncio.sleep(0.1)
            assert not any(post.done() for post in posts)
            assert worker.queue.waiting == 10 and worker.rank(RankBody(**asking())).ranking
        return [(await post).taken for post in posts]

    before = env.info()["last_txnid"]
    assert asyncio.run(waiting()) == [1] * 10
    assert env.info()["last_txnid"] - before == 2, "the first post, then all others together"


def test_a_clock_before_what_the_store_holds_is_refused(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--spec", str(settings.spec), "--lake", settings.lake]
    assert main(["rank", "serve", *where, "--clock", f"{EVE - timedelta(days=1)}T12:00"]) == 2
    assert f"what had landed by {LAST} 00:00 UTC" in capsys.readouterr().err


def test_a_full_store_is_a_507_and_goes_on_ranking(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Path(settings.lake, "online", str(EVE), "data.mdb").stat().st_size
    monkeypatch.setattr(database, "MAP_BYTES", size + (1 << 19))
    monkeypatch.setenv(NAME, settings.model_dump_json())
    local = "http://localhost"
    with TestClient(create(), local, raise_server_exceptions=False) as client:
        for number in range(100):
            names = [f"{number}-{n}" for n in range(100)]
            answer = client.post("/events", json={"events": [event_body(n) for n in names]})
            if answer.status_code != 200:
                break
        assert answer.status_code == 507
        assert "run `gemline rank store`" in answer.json()["error"]
        assert client.post("/rank", json=asking()).status_code == 200


def test_no_request_of_its_own_description_breaks_it(settings: Settings) -> None:
    """Requests made of the service's own description, over HTTP."""
    with running(settings) as service:
        url = f"http://localhost:{service.port}/openapi.json"
        for found in schemathesis.openapi.from_url(url).get_all_operations():
            modes = list(GenerationMode) if found.ok().body else [GenerationMode.POSITIVE]
            for mode in modes:

                @tried(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
                @given(case=found.ok().as_strategy(generation_mode=mode))
                def answers(case: schemathesis.Case) -> None:
                    case.call_and_validate(excluded_checks=[positive_data_acceptance])

                answers()


def serve(settings: Settings) -> tuple[subprocess.Popen, int, int]:
    """A service of two workers, its port, and the port of its health."""
    port, health_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "gemline", "rank", "serve", "--spec", str(settings.spec)),
        *("--lake", settings.lake, "--workers", "2", "--port", str(port)),
        *("--health-port", str(health_port)),
    ]
    service = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    return service, port, health_port


KILLS, ANSWERS = 50, 200


@pytest.mark.proof
def test_a_service_that_is_killed_loses_no_acknowledged_event_and_counts_none_twice(
    settings: Settings, lake: Lake
) -> None:
    """Two workers, killed again and again after some answers, while the store is swapped."""
    acknowledged: list[str] = []
    for kill in range(KILLS):
        service, port, _ = serve(settings)
        try:
            acknowledged += asyncio.run(post_until(port, settings, f"{kill}", ANSWERS))
        finally:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait()
    assert len(acknowledged) >= KILLS * ANSWERS
    for day in (EVE, LAST):
        stores(settings.lake).swap(str(day))
        live = Live(settings.lake, lake.spec)
        users = [one.content.user for _, one in live.log.after(0)]
        counted = Counter(times_counted(live.store, user) for user in acknowledged)
        live.close()
        assert len(users) == len(set(users)) and set(acknowledged) <= set(users)
        assert counted == {(1, 1): len(acknowledged)}


async def post_until(port: int, settings: Settings, name: str, answers: int) -> list[str]:
    """Users of the events that were answered by 200 until there were so many; all others wait."""
    client, found = Client(port, []), []
    await client.ready()

    async def poster(number: int) -> None:
        for n in itertools.count():
            event = event_body(f"{name}-{number}-{n}")
            request = encoded("POST", "/events", {"events": [event]})
            if (await client.send(request))[0] == 200:
                found.append(event["user"])

    async def swapper() -> None:
        for n in itertools.count():
            await asyncio.sleep(0.05)
            stores(settings.lake).swap(str((LAST, EVE)[n // 20 % 2]))

    tasks = [asyncio.create_task(poster(number)) for number in range(8)]
    tasks.append(asyncio.create_task(swapper()))
    async with asyncio.timeout(120):
        while len(found) < answers:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    return found


@pytest.mark.proof
def test_nothing_is_lost_while_rankers_and_stores_change_and_it_stops(settings: Settings) -> None:
    """Two workers under load; both pointers move; events are posted; then it is asked to stop.

    All requests are answered, and every event that was accepted is in its user's history once.
    """
    service, port, health_port = serve(settings)
    client = Client(port, [encoded("POST", "/rank", asking(user=f"u{n}")) for n in range(50)])
    try:
        answers, versions_seen, accepted = asyncio.run(changed_under_load(client, settings))
        status, health = asyncio.run(asked(health_port, encoded("GET", "/health")))
    finally:
        service.terminate()
        assert service.wait(60) == 0
    assert {status for status, _ in answers} == {200} and len(answers) > 200
    assert len(versions_seen) > 1 and len(accepted) > 100
    assert status == 200 and json.loads(health)["status"] == "ok"
    assert len(json.loads(health)["workers"]) == 2
    assert stored_events(settings) == Counter(accepted)


def stored_events(settings: Settings) -> Counter[bytes]:
    """How often each event that was posted is in the history of the user who has its name."""
    store = Live(settings.lake, load_spec(settings.spec)).store
    found: Counter[bytes] = Counter()
    with store.reading() as txn:
        for n in range(SENDERS):
            rows = store.histories.seen(txn.get("history", f"sender{n}".encode()), 1 << 40)
            found.update(row["event"] for row in rows)
    store.close()
    return found


async def changed_under_load(
    client: Client, settings: Settings
) -> tuple[list, set[int], list[bytes]]:
    """Answers to 30 requests a second, ends of the features served, the events accepted."""
    await client.ready()
    load = asyncio.create_task(client.poisson(30, 14))
    seen, accepted = set(), []
    done = asyncio.Event()
    posting = asyncio.create_task(post_events(client, accepted, done))
    for number in range(12):
        current(settings.lake, "feed").swap(("two", "one")[number % 2])
        stores(settings.lake).swap(str((LAST, EVE)[number // 4 % 2]))
        await asyncio.sleep(1)
        status, state = await asked(client.port, encoded("GET", "/version"))
        assert status == 200
        seen.add(json.loads(state)["features_until"])
    answers = await load
    done.set()
    await posting
    return answers, seen, accepted


async def post_events(client: Client, accepted: list[bytes], done: asyncio.Event) -> None:
    """Post events of some users one by one, each once, until it is done."""
    for number in itertools.count():
        if done.is_set():
            return
        name, user = f"posted-{number}", f"sender{number % SENDERS}"
        event = {"event_id": name, "user": user, "item": "ad-1", "surface": "feed",
                 "type": "ad_click"}  # fmt: skip
        request = encoded("POST", "/events", {"events": [event]})
        status, answer = await asked(client.port, request)
        assert (status, json.loads(answer)) == (200, {"taken": 1})
        accepted.append(name.encode())
        await asyncio.sleep(0.05)


async def asked(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    found, body = (await reader.read(-1)).split(b"\r\n\r\n", 1)
    writer.close()
    return int(found[9:12]), body
