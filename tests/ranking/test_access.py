"""Who may ask for what: tokens with scopes and rates, hosts, and where the service may listen."""

import json
import time
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from etl.errors import UserError
from gemline import main
from ranking.serve.access import TOKENS, check_exposure, tokens_of_environment
from ranking.serve.app import create
from ranking.serve.settings import NAME, Settings
from tests.ranking.served import asking

EVENTS = {
    "events": [
        {"event_id": "e", "user": "u", "item": "ad-1", "surface": "feed", "type": "ad_click"}
    ]
}
ASKED = {
    "rank": ("/rank", asking()),
    "events": ("/events", EVENTS),
    "users": ("/users", {"name": "u"}),
    "items": ("/items", {"name": "i"}),
}


def secret(name: str) -> str:
    return f"{name}-".ljust(40, "s")


def named(*scopes: str, **fields: object) -> dict:
    name = "+".join(scopes)
    return {"name": name, "token": secret(name), "scopes": scopes} | fields


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret(name)}"}


@pytest.fixture
def guarded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    tokens = [named("rank"), named("events", "items"), named("items", per_second=0.5)]
    monkeypatch.setenv(TOKENS, json.dumps(tokens))
    monkeypatch.setenv(NAME, settings.model_dump_json())
    with TestClient(create(), "http://localhost") as found:
        yield found


@pytest.mark.parametrize(
    ("token", "allowed"),
    [("rank", {"rank"}), ("events+items", {"events", "users", "items"}), ("items", {"users"})],
)
def test_a_token_is_good_for_its_scopes(guarded: TestClient, token: str, allowed: set) -> None:
    wanted = ASKED if token != "items" else {name: ASKED[name] for name in ("rank", "users")}
    for name, (path, body) in wanted.items():
        answer = guarded.post(path, json=body, headers=bearer(token))
        assert (answer.status_code < 300) == (name in allowed), answer.text
        assert answer.status_code in (200, 204, 403)
    assert guarded.get("/version", headers=bearer(token)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {secret('other')}"},
        {"authorization": f"Bearer {secret('rank')}x"},
        {"authorization": f"Basic {secret('rank')}"},
        {"authorization": secret("rank")},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_a_known_token_nothing_is_read_or_told(guarded: TestClient, headers: dict) -> None:
    for path in ("/rank", "/events", "/users", "/items"):
        answer = guarded.post(path, content=iter([b"{"]), headers=headers)  # not even its length
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    for path in ("/version", "/metrics"):
        assert guarded.get(path, headers=headers).status_code == 401
    if not headers:
        for path in ("/health", "/ready", "/docs", "/openapi.json"):
            assert guarded.get(path).status_code == 200
        assert "bearer" in guarded.get("/openapi.json").text


def test_a_token_is_held_to_its_rate(guarded: TestClient) -> None:
    """An item every two seconds: the next one waits, whatever another token does."""

    def post(token: str) -> int:
        answer = guarded.post("/items", json={"name": "i"}, headers=bearer(token))
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1" and "'items'" in answer.json()["error"]
        return answer.status_code

    assert [post("items"), post("items")] == [204, 429]
    assert [post("events+items") for _ in range(6)] == [204] * 6
    time.sleep(1.1)
    assert post("items") == 204


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8080", 200), ("[::1]:80", 200), ("evil.test", 400),
     ("localhost.evil.test", 400), ("", 400)],
)  # fmt: skip
def test_only_requests_that_name_an_allowed_host_are_answered(
    client: TestClient, host: str, status: int
) -> None:
    assert client.get("/health", headers={"host": host}).status_code == status
    assert client.post("/rank", json=asking(), headers={"host": host}).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_token(host: str) -> None:
    check_exposure(host, [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "rankers.example.com", ""])
def test_another_address_needs_tokens_and_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for none in ("", "[]"):
        monkeypatch.setenv(TOKENS, none)
        with pytest.raises(UserError, match=f"reached from other machines: set {TOKENS}"):
            check_exposure(host, ["rankers.example.com"])
    monkeypatch.setenv(TOKENS, json.dumps([named("rank")]))
    with pytest.raises(UserError, match="needs --allowed-hosts"):
        check_exposure(host, [])
    check_exposure(host, ["rankers.example.com"])


def test_an_open_service_is_refused_at_the_start(
    settings: Settings, capsys: pytest.CaptureFixture
) -> None:
    words = ["--spec", str(settings.spec), "--lake", settings.lake, "--host", "0.0.0.0"]
    assert main(["rank", "serve", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and f"set {TOKENS}" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON"),
        (json.dumps([named("rank", token="short-secret")]), "0.token: "),
        (json.dumps([named("fame")]), "0.scopes"),
        (json.dumps([named()]), "0.name"),
        (json.dumps([named("rank", per_second=0)]), "0.per_second"),
        (json.dumps([named("rank", colour="red")]), "0.colour"),
        (json.dumps([named("rank"), named("rank")]), "the same name"),
        (json.dumps([named("rank"), named("items", token=secret("rank"))]), "the same secret"),
    ],
)
def test_bad_tokens_are_named_without_their_secret(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKENS, text)
    with pytest.raises(UserError, match=TOKENS) as refused:
        tokens_of_environment()
    assert said in str(refused.value)
    assert "sss" not in str(refused.value) and "short-secret" not in str(refused.value)
