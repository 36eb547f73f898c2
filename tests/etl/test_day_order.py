"""A step refuses days after one that it did not finish, instead of leaving a gap in tables."""

import shutil
from datetime import date, timedelta
from pathlib import Path

import pytest

from etl.errors import UserError
from etl.ingest.run import ingest
from etl.tables.day_order import days_in_order, forget_days
from etl.tables.lake import Lake
from etl.tables.uri import resolve_uri
from gemline import main
from tests.conftest import FIRST, LAST

SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)


def finish(lake: Lake, first: date, last: date) -> None:
    with days_in_order(lake, "history", (first, last)):
        pass


@pytest.mark.spark
def test_a_day_after_an_unfinished_one_is_refused_until_both_are_built(
    own: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def index_items(days: str) -> int:
        flags = ["--spec", str(spec_path), "--lake", own.root, "--days", days]
        return main(["features", "items", *flags])

    assert index_items(f"{FIRST}:{SECOND}") == 0
    assert index_items(str(LAST)) == UserError.exit_code
    assert f"items of {THIRD} to {THIRD} was not finished" in capsys.readouterr().err
    assert index_items(f"{THIRD}:{LAST}") == 0


def test_a_step_that_fails_does_not_finish_its_days(own: Lake) -> None:
    finish(own, FIRST, FIRST)
    with pytest.raises(OSError), days_in_order(own, "history", (SECOND, SECOND)):  # noqa: PT011
        raise OSError
    with pytest.raises(UserError, match=f"--days {SECOND}:{THIRD}"):
        finish(own, THIRD, THIRD)


def test_after_a_first_build_that_failed_its_days_are_unfinished(own: Lake) -> None:
    """The failed build may have created the table."""
    with pytest.raises(OSError), days_in_order(own, "history", (FIRST, SECOND)):  # noqa: PT011
        raise OSError
    with pytest.raises(UserError, match=f"--days {FIRST}:{THIRD}"):
        finish(own, THIRD, THIRD)


def test_after_a_rebuild_that_failed_its_days_are_unfinished(own: Lake) -> None:
    finish(own, FIRST, THIRD)
    forget_days(own.root, ["history"])  # by an upgrade, which removes the table
    test_after_a_first_build_that_failed_its_days_are_unfinished(own)


def test_days_that_are_built_again_do_not_make_later_ones_unfinished(own: Lake) -> None:
    finish(own, FIRST, THIRD)
    finish(own, FIRST, FIRST)
    finish(own, LAST, LAST)


@pytest.mark.spark
def test_days_that_are_ingested_again_are_unfinished(own: Lake, raw: Path) -> None:
    """Otherwise a step that fails after a refresh of its day would leave the day half built."""
    finish(own, FIRST, LAST)
    ingest(own, str(raw), (THIRD, LAST))
    following = LAST + timedelta(days=1)
    with pytest.raises(UserError, match=f"history of {THIRD} to {LAST} was not finished"):
        finish(own, following, following)
    finish(own, THIRD, following)


def test_a_step_whose_tables_were_removed_starts_on_any_day(own: Lake) -> None:
    finish(own, FIRST, FIRST)
    shutil.rmtree(str(resolve_uri(own.root, "history")))
    finish(own, THIRD, THIRD)
