"""Proofs of the service: worker processes that are killed, and changes under load."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks.system.request_load import LoadClient, encode_request
from etl.spec import load_spec
from etl.tables.lake import Lake
from ranking.feature_store.events import Event
from ranking.feature_store.wal import FeatureStoreHandle, feature_store_pointer
from ranking.registry.ranker import live_pointer
from ranking.serving.settings import Settings
from tests.conftest import LAST, ROOT
from tests.ranking.conftest import EVE
from tests.ranking.poster import times_counted
from tests.ranking.served import click_of, free_port, rank_body

SENDERS = 20  # a history holds 40 events


def serve(settings: Settings) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start a service of two workers; returns it with its port and the port of its health."""
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
    """Two workers are killed repeatedly after some responses, while the live store changes."""
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
        feature_store_pointer(settings.lake).promote(str(day))
        live = FeatureStoreHandle(settings.lake, lake.spec)
        payloads = [entry.payload for _, entry in live.wal.entries_after(0)]
        users = [payload.user for payload in payloads if isinstance(payload, Event)]
        counted = Counter(times_counted(live.store, user) for user in acknowledged)
        live.close()
        assert len(users) == len(set(users)) and set(acknowledged) <= set(users)
        assert counted == {(1, 1): len(acknowledged)}


async def post_until(port: int, settings: Settings, name: str, answers: int) -> list[str]:
    """Post events until some number are acknowledged; returns the users of these."""
    client = LoadClient(port, [])
    users: list[str] = []
    await client.wait_until_ready()

    async def poster(number: int) -> None:
        for n in itertools.count():
            event = click_of(f"{name}-{number}-{n}")
            request = encode_request("POST", "/events", {"events": [event]})
            if (await client.send(request))[0] == 200:
                users.append(event["user"])

    async def swapper() -> None:
        for n in itertools.count():
            await asyncio.sleep(0.05)
            feature_store_pointer(settings.lake).promote(str((LAST, EVE)[n // 20 % 2]))

    tasks = [asyncio.create_task(poster(number)) for number in range(8)]
    tasks.append(asyncio.create_task(swapper()))
    async with asyncio.timeout(120):
        while len(users) < answers:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    return users


@pytest.mark.proof
def test_no_request_or_event_is_lost_while_rankers_and_stores_change(settings: Settings) -> None:
    """Two workers under load; both pointers move and events are posted; then the service stops.

    All requests are answered, and every accepted event is in its user's history once.
    """
    service, port, health_port = serve(settings)
    client = LoadClient(
        port, [encode_request("POST", "/rank", rank_body(user=f"u{n}")) for n in range(50)]
    )
    try:
        answers, versions_seen, accepted = asyncio.run(change_under_load(client, settings))
        status, health = asyncio.run(send(health_port, encode_request("GET", "/health")))
    finally:
        service.terminate()
        assert service.wait(60) == 0
    assert {status for status, _ in answers} == {200} and len(answers) > 200
    assert len(versions_seen) > 1 and len(accepted) > 100
    assert status == 200 and json.loads(health)["status"] == "ok"
    assert len(json.loads(health)["workers"]) == 2
    assert stored_events(settings) == Counter(accepted)


def stored_events(settings: Settings) -> Counter[bytes]:
    """How often each posted event is in the histories of the senders."""
    store = FeatureStoreHandle(settings.lake, load_spec(settings.spec)).store
    counts: Counter[bytes] = Counter()
    with store.read_transaction() as txn:
        for n in range(SENDERS):
            rows = store.histories.visible_events(txn, f"sender{n}".encode(), 1 << 40)
            counts.update(row["event"] for row in rows)
    store.close()
    return counts


async def change_under_load(
    client: LoadClient, settings: Settings
) -> tuple[list[tuple[int, float]], set[int], list[bytes]]:
    """Responses to 30 requests a second, the data_until seen, and the ids of accepted events."""
    await client.wait_until_ready()
    load = asyncio.create_task(client.open_loop(30, 14))
    seen: set[int] = set()
    accepted: list[bytes] = []
    done = asyncio.Event()
    posting = asyncio.create_task(post_events(client, accepted, done))
    for number in range(12):
        live_pointer(settings.lake, "feed").promote(("two", "one")[number % 2])
        feature_store_pointer(settings.lake).promote(str((LAST, EVE)[number // 4 % 2]))
        await asyncio.sleep(1)
        status, state = await send(client.port, encode_request("GET", "/version"))
        assert status == 200
        seen.add(json.loads(state)["features_until"])
    answers = await load
    done.set()
    await posting
    return answers, seen, accepted


async def post_events(client: LoadClient, accepted: list[bytes], done: asyncio.Event) -> None:
    """Post events of some users one by one, each once, until `done` is set."""
    for number in itertools.count():
        if done.is_set():
            return
        name, user = f"posted-{number}", f"sender{number % SENDERS}"
        event = {"event_id": name, "user": user, "item": "ad-1", "surface": "feed",
                 "type": "ad_click"}  # fmt: skip
        request = encode_request("POST", "/events", {"events": [event]})
        status, answer = await send(client.port, request)
        assert (status, json.loads(answer)) == (200, {"accepted": 1})
        accepted.append(name.encode())
        await asyncio.sleep(0.05)


async def send(port: int, request: bytes) -> tuple[int, bytes]:
    """The status and the body of the response to a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    headers, body = (await reader.read(-1)).split(b"\r\n\r\n", 1)
    writer.close()
    return int(headers[9:12]), body
