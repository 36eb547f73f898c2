"""The Python API: `ranking.Ranker` ranks in process as the HTTP service does."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import ranking
from etl.errors import UserError
from ranking import Ranker, RankRequest
from ranking.feature_store.wal import feature_store_pointer
from ranking.serving.app import create_app
from ranking.serving.settings import SETTINGS_VARIABLE, Settings
from tests.conftest import LAST, ROOT
from tests.ranking.conftest import EVE
from tests.ranking.served import ITEMS, rank_body

CONTEXT = {"device": "phone", "position": 1}
REQUEST = RankRequest(user="u1", surface="feed", candidates=[*ITEMS, "unknown"], context=CONTEXT)


def load(settings: Settings) -> Ranker:
    return Ranker.load(settings.lake, surface="feed", spec=settings.spec)


def test_the_response_equals_that_of_the_http_service(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000
    monkeypatch.setattr(Settings, "now_us", lambda _: now * 1_000_000)
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    with TestClient(create_app(), "http://localhost") as client:  # closes the store at its end
        body = rank_body(candidates=REQUEST.candidates, context=CONTEXT)
        expected = client.post("/rank", json=body).json()
    with load(settings) as ranker:
        response = ranker.rank(replace(REQUEST, as_of=now))
        assert response.ranker_version == ranker.version
        assert {tuple(ad.probabilities) for ad in response.ranking} == {ranker.objectives}
    assert response.model_dump() == expected
    assert sorted(ad.item for ad in response.ranking) == ITEMS
    assert [(ad.item, ad.reason) for ad in response.excluded] == [("unknown", "unknown_item")]


def test_a_request_without_a_time_is_ranked_as_of_now(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.5)
    with load(settings) as ranker:
        expected = ranker.rank(replace(REQUEST, as_of=1_800_000_000))
        assert ranker.rank(REQUEST) == expected


def test_a_candidate_that_is_given_twice_is_refused(settings: Settings) -> None:
    request = replace(REQUEST, candidates=["ad-1", "ad-2", "ad-1"])
    with load(settings) as ranker, pytest.raises(UserError, match="'ad-1' is given twice"):
        ranker.rank(request)


def test_a_request_before_the_features_is_refused(settings: Settings) -> None:
    with load(settings) as ranker:
        store = ranker._feature_store
        assert store is not None
        earliest = store.store.earliest_request
        assert ranker.rank(replace(REQUEST, as_of=earliest)).ranking
        with pytest.raises(UserError, match=f"serves requests from {earliest} on"):
            ranker.rank(replace(REQUEST, as_of=earliest - 1))


def test_rankers_of_a_lake_share_its_store_until_the_last_is_closed(settings: Settings) -> None:
    first, second = load(settings), load(settings)
    first.close()
    first.close()
    with pytest.raises(ValueError, match="closed"):
        first.rank(REQUEST)
    assert second.rank(REQUEST).ranking
    second.close()
    with load(settings) as third:  # LMDB would refuse a folder that is still open
        assert third.rank(REQUEST).ranking


def test_a_ranker_reads_the_store_that_was_live_when_it_was_loaded(settings: Settings) -> None:
    with load(settings) as old:
        feature_store_pointer(settings.lake).promote(str(LAST))
        with load(settings) as new, load(settings) as newest:
            stores = [ranker._feature_store for ranker in (old, new, newest)]
            names = [shared.store.folder.name for shared in stores if shared]
            assert names == [str(EVE), str(LAST), str(LAST)]
            assert stores[1] is stores[2]
            assert old.rank(REQUEST).ranking and new.rank(REQUEST).ranking


def test_a_ranker_that_does_not_fit_the_store_leaves_no_store_open(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("reads more than the feature store holds")

    with monkeypatch.context() as patch:
        patch.setattr("ranking.ranker.require_compatible", refuse)
        with pytest.raises(UserError, match="reads more"):
            load(settings)
    with load(settings) as ranker:
        assert ranker.rank(REQUEST).ranking


@pytest.mark.parametrize(
    ("surface", "message"),
    [
        ("moon", "no ads on surface 'moon'; known: feed"),
        ("reels", "no ranker of reels is promoted"),
    ],
)
def test_a_surface_without_a_ranker_is_refused(
    settings: Settings, surface: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Ranker.load(settings.lake, surface=surface, spec=settings.spec)


def test_a_request_of_another_surface_is_refused(settings: Settings) -> None:
    with load(settings) as ranker, pytest.raises(UserError, match="load the ranker of that"):
        ranker.rank(replace(REQUEST, surface="reels"))


def test_the_api_needs_neither_torch_nor_deltalake_nor_a_web_server() -> None:
    code = (
        "import sys, ranking; assert 'lmdb' not in sys.modules\n"
        "ranking.Ranker, ranking.RankRequest, ranking.RankResponse\n"
        "print([m for m in ('torch', 'deltalake', 'fastapi', 'pyspark') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ranking' has no attribute 'Rankr'"):
        _ = ranking.Rankr  # type: ignore[attr-defined, unused-ignore]
    assert Path(str(ranking.__file__)).parent == ROOT / "ranking"
