"""`gemline rank check-consistency`: online and offline features of a day's logged requests."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from etl.tables.lake import Lake
from gemline import main
from ranking.feature_store import events
from ranking.registry.ranker import live_pointer, rankers_folder
from tests.conftest import FIRST, LAST

MICROS = 1_000_000


@pytest.fixture
def command(own: Lake, folder: Path, spec_path: Path) -> list[str]:
    """The command for a lake with a promoted ranker."""
    shutil.copytree(folder, Path(str(rankers_folder(own.root, "feed"))) / "one")
    live_pointer(own.root, "feed").promote("one")
    flags = ["--spec", str(spec_path), "--lake", own.root, "--max-requests", "60"]
    return ["rank", "check-consistency", *flags, "--day"]


@pytest.mark.parametrize("day", [FIRST, LAST])
def test_online_features_of_logged_requests_are_those_of_the_tables(
    command: list[str], capsys: pytest.CaptureFixture[str], day: object
) -> None:
    assert main([*command, str(day)]) == 0
    assert f"compared 60 requests of {day}" in capsys.readouterr().out


def test_differences_are_named_with_a_request(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that shows events a day late."""
    late = 86_400
    monkeypatch.setattr(events, "visible_ts", lambda _, e: e.ingest_ts // MICROS + late)
    assert main([*command, str(LAST)]) == 2
    assert "online and offline features differ: " in capsys.readouterr().err


def test_a_day_without_examples_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"{LAST + timedelta(days=1)}"]) == 2
    assert "has no examples of" in capsys.readouterr().err
