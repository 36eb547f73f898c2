"""Access to the service: tokens with scopes and rates, hosts, and addresses to listen on."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from etl.errors import UserError
from gemline import main
from ranking.serving.app import create_app
from ranking.serving.auth import TOKENS_VARIABLE, tokens_from_environment, validate_exposure
from ranking.serving.settings import SETTINGS_VARIABLE, Settings
from tests.cli import parse_command
from tests.ranking.served import rank_body

EVENTS = {
    "events": [
        {"event_id": "e", "user": "u", "item": "ad-1", "surface": "feed", "type": "ad_click"}
    ]
}
REQUESTS = {
    "rank": ("/rank", rank_body()),
    "events": ("/events", EVENTS),
    "users": ("/users", {"user": "u"}),
    "items": ("/items", {"item": "i"}),
}


def secret(name: str) -> str:
    return f"{name}-".ljust(40, "s")


def token_entry(*scopes: str, **fields: object) -> dict[str, object]:
    name = "+".join(scopes)
    return {"name": name, "token": secret(name), "scopes": scopes} | fields


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret(name)}"}


@pytest.fixture
def guarded_client(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    tokens = [
        token_entry("rank"),
        token_entry("events", "items"),
        token_entry("items", rate_per_second=0.5),
    ]
    monkeypatch.setenv(TOKENS_VARIABLE, json.dumps(tokens))
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    with TestClient(create_app(), "http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("token", "allowed"),
    [("rank", {"rank"}), ("events+items", {"events", "users", "items"}), ("items", {"users"})],
)
def test_a_token_allows_the_routes_of_its_scopes(
    guarded_client: TestClient, token: str, allowed: set[str]
) -> None:
    names = REQUESTS if token != "items" else ("rank", "users")  # its rate allows one request
    for name in names:
        path, body = REQUESTS[name]
        answer = guarded_client.post(path, json=body, headers=bearer(token))
        assert (answer.status_code < 300) == (name in allowed), answer.text
        assert answer.status_code in (200, 204, 403)
    assert guarded_client.get("/version", headers=bearer(token)).status_code == 200


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
def test_without_a_known_token_nothing_is_read_or_revealed(
    guarded_client: TestClient, headers: dict[str, str]
) -> None:
    for path in ("/rank", "/events", "/users", "/items"):
        answer = guarded_client.post(
            path, content=iter([b"{"]), headers=headers
        )  # the content-length is not checked either
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    for path in ("/version", "/metrics"):
        assert guarded_client.get(path, headers=headers).status_code == 401
    if not headers:
        for path in ("/health", "/ready", "/docs", "/openapi.json"):
            assert guarded_client.get(path).status_code == 200
        assert "bearer" in guarded_client.get("/openapi.json").text


def test_a_token_is_limited_to_its_rate(
    guarded_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item every two seconds; other tokens are not affected."""
    clock = SimpleNamespace(seconds=time.monotonic())
    frozen = SimpleNamespace(monotonic=lambda: clock.seconds)
    monkeypatch.setattr("ranking.serving.auth.time", frozen)

    def post(token: str) -> int:
        answer = guarded_client.post("/items", json={"item": "i"}, headers=bearer(token))
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1" and "'items'" in answer.json()["error"]
        return int(answer.status_code)

    assert [post("items"), post("items")] == [204, 429]
    assert [post("events+items") for _ in range(6)] == [204] * 6
    clock.seconds += 1.1
    assert post("items") == 204


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8080", 200), ("[::1]:80", 200), ("evil.test", 400),
     ("localhost.evil.test", 400), ("", 400)],
)  # fmt: skip
def test_only_requests_with_an_allowed_host_header_are_answered(
    client: TestClient, host: str, status: int
) -> None:
    assert client.get("/health", headers={"host": host}).status_code == status
    assert client.post("/rank", json=rank_body(), headers={"host": host}).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_token(host: str) -> None:
    validate_exposure(host, [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "rankers.example.com", ""])
def test_another_address_needs_tokens_and_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for no_tokens in ("", "[]"):
        monkeypatch.setenv(TOKENS_VARIABLE, no_tokens)
        with pytest.raises(UserError, match=f"reached from other machines: set {TOKENS_VARIABLE}"):
            validate_exposure(host, ["rankers.example.com"])
    monkeypatch.setenv(TOKENS_VARIABLE, json.dumps([token_entry("rank")]))
    with pytest.raises(UserError, match="needs --allowed-hosts"):
        validate_exposure(host, [])
    validate_exposure(host, ["rankers.example.com"])


@pytest.mark.parametrize("service", ["rank", "forecast"])
def test_only_host_names_are_allowed_hosts(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [service, "serve", "--spec", "spec.yaml", "--lake", "lake", "--allowed-hosts"]
    for host in ("a*", "*a", "a.*.com", "https://a.com", "a b"):
        with pytest.raises(SystemExit) as refusal:
            main([*flags, host])
        assert refusal.value.code == 2
        printed = capsys.readouterr()
        assert "allowed_hosts" in printed.out + printed.err
    for host in ("*", "*.a.com", "a-1.com", "[::1]"):
        assert parse_command([*flags, host])


def test_a_service_without_protection_does_not_start(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--spec", str(settings.spec), "--lake", settings.lake, "--host", "0.0.0.0"]
    assert main(["rank", "serve", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and f"set {TOKENS_VARIABLE}" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        (json.dumps([token_entry("rank", token="short-secret")]), "0.token: "),
        (json.dumps([token_entry("fame")]), "0.scopes"),
        (json.dumps([token_entry()]), "0.name"),
        (json.dumps([token_entry("rank", rate_per_second=0)]), "0.rate_per_second"),
        (json.dumps([token_entry("rank", colour="red")]), "0.colour"),
        (json.dumps([token_entry("rank"), token_entry("rank")]), "the same name"),
        (
            json.dumps([token_entry("rank"), token_entry("items", token=secret("rank"))]),
            "the same secret",
        ),
    ],
)
def test_invalid_tokens_are_named_without_their_secret(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKENS_VARIABLE, text)
    with pytest.raises(UserError, match=TOKENS_VARIABLE) as raised:
        tokens_from_environment()
    assert message in str(raised.value)
    assert "sss" not in str(raised.value) and "short-secret" not in str(raised.value)
