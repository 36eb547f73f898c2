"""Output of benchmarks: metrics as a last line of JSON; unavailable ones with a reason."""

import asyncio
import gzip
import json
import math
import signal
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import (
    SIMULATOR_SPEC,
    BenchmarkResult,
    commits_of,
    interleaved_median_seconds,
)
from benchmarks.pipelines import fresh_copy
from benchmarks.studies.forecast_service import forecast_or_none
from benchmarks.system import etl_speed, reader_memory, scoring, table_builds
from benchmarks.system.history_storage import measure_storage
from benchmarks.system.request_load import stop, summarize_responses
from benchmarks.system.restarts import record_resume
from benchmarks.system.suites import shown_at_the_end
from dags.steps import PipelinePaths
from etl.errors import TemporaryError
from etl.spec import load_spec
from etl.tables.lake import Lake
from gemline import main
from tests.conftest import ROOT


@given(st.one_of(st.none(), st.floats(allow_infinity=False)))
def test_a_metric_is_a_number_or_null_with_a_reason(value: float | None) -> None:
    result = BenchmarkResult("", ())
    result.record("figure", value, "the disk is full")
    printed = json.loads(json.dumps(result.figures, allow_nan=False))
    if value is None or math.isnan(value):
        assert printed == {"figure": None, "figure_reason": "the disk is full"}
    else:
        assert printed == {"figure": pytest.approx(value, abs=1e-6)}


def test_without_its_data_kuairand_reports_every_metric_as_null(
    capsys: pytest.CaptureFixture[str],
) -> None:
    days = ["--train", "2022-04-25:2022-04-29", "--test", "2022-04-30:2022-04-30"]
    assert main(["bench", "kuairand", "--data", "nowhere", *days, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for objective in load_spec(ROOT / "conf/specs/kuairand.yaml").objectives:
        for model in ("gem", "lightgbm"):
            key = f"{model}_{objective}_auc"
            assert figures[key] is None and "nowhere is absent" in figures[f"{key}_reason"]


def test_test_days_must_come_after_training_days(capsys: pytest.CaptureFixture[str]) -> None:
    days = ["--train", "2022-04-25:2022-04-29", "--test", "2022-04-29:2022-04-30"]
    assert main(["bench", "kuairand", "--data", ".", *days]) == 2
    assert "must come after" in capsys.readouterr().err
    days[3] = "tomorrow"
    assert main(["bench", "kuairand", "--data", ".", *days]) == 2
    assert "--test tomorrow" in capsys.readouterr().err


def measure_two_parts(result: BenchmarkResult) -> None:
    result.record("first", 1, "")
    result.record("second", 1 / 0, "")


def test_a_failed_part_leaves_the_figures_of_the_parts_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = BenchmarkResult("", ())
    with pytest.raises(ZeroDivisionError), shown_at_the_end(result, as_json=True):
        measure_two_parts(result)
    assert json.loads(capsys.readouterr().out) == {"first": 1}


def test_memory_of_readers_is_measured_in_a_lake_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process = SimpleNamespace(get_context=lambda _: SimpleNamespace(Pool=ThreadPool))
    monkeypatch.setattr(reader_memory, "multiprocessing", in_this_process)
    for name, value in {"EVENTS": 2000, "USERS": 40, "BUCKETS": 2}.items():
        monkeypatch.setattr(reader_memory, name, value)
    reader_memory.write_bucket(Lake(str(tmp_path / "lake"), load_spec(SIMULATOR_SPEC)), 0)
    result = BenchmarkResult("", ())
    reader_memory.measure_reader_memory(result, tmp_path)
    assert isinstance(result.figures["reader_memory_mb"], float)


def test_variants_are_timed_in_alternating_order() -> None:
    order: list[str] = []
    variants = {name: lambda name=name: order.append(name) for name in "ab"}
    interleaved_median_seconds(variants, 3)
    assert "".join(order) == "abbaab"


def test_programs_of_a_ranker_are_timed_in_alternating_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[str] = []

    def time_ranking(ranker: str, _inputs: object) -> float:
        timed.append(ranker)
        return 1.0

    monkeypatch.setattr(scoring, "time_ranking", time_ranking)
    requests: Any = [None] * (scoring.WARMUP_REQUESTS + 4)
    rankers: Any = ("onnx ", "compiled ")
    seconds = scoring.time_requests(requests, lambda _: None, *rankers)  # type: ignore[arg-type]
    assert "".join(timed[:8]) == "onnx compiled compiled onnx onnx compiled compiled onnx "
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys(seconds, 4)


def test_small_and_large_histories_are_built_in_both_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    monkeypatch.setattr(table_builds, "_read_events", lambda _work, millions, _users: millions)
    monkeypatch.setattr(table_builds, "shuffle_sort_write", lambda *_: None)
    monkeypatch.setattr(
        table_builds, "write_packed_histories", lambda millions, _: built.append(millions)
    )
    table_builds.measure_history_build(BenchmarkResult("", ()), tmp_path, 2, 1)
    assert built[-4:] == [1, 6, 6, 1]


def test_duckdb_sorts_all_records_also_malformed_ones(tmp_path: Path, raw: Path) -> None:
    paths = PipelinePaths(SIMULATOR_SPEC, str(raw), str(tmp_path / "lake"))
    etl_speed.sort_and_write_in_duckdb(paths)
    table = pq.read_table(tmp_path / "lake-duckdb.parquet")
    files = (raw / "events").glob("*/*.json.gz")
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert len(table) == len(lines) and table["user_id"].null_count
    users = table["user_id"].drop_null().to_pylist()
    assert users == sorted(users)


@pytest.mark.parametrize("suite", ["data", "operations", "audience", "forecast", "precision"])
def test_unknown_parts_are_refused(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", suite, "--only", "magic"]) == 2
    assert "--only magic is no part of this benchmark: use " in capsys.readouterr().err


def test_a_copy_of_a_lake_leaves_out_what_an_earlier_copy_wrote(tmp_path: Path) -> None:
    paths = PipelinePaths(SIMULATOR_SPEC, "raw", str(tmp_path / "lake"))
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "day-10").touch()
    for _ in range(2):
        copy = fresh_copy(paths, tmp_path / "daily")
        assert [path.name for path in Path(copy.lake).iterdir()] == ["day-10"]
        Path(copy.lake, "day-11").touch()
    assert [path.name for path in Path(paths.lake).iterdir()] == ["day-10"]


def test_the_storage_ratio_is_that_of_the_smaller_copied_lists(tmp_path: Path) -> None:
    """A user's lists overlap: side by side they compress better than in order of time."""
    result = BenchmarkResult("", ())
    measure_storage(result, tmp_path, 40_000, 200)
    figures: dict[str, Any] = result.figures
    assert 1 < figures["storage_ratio"] < 0.7 * figures["storage_ratio_in_order_of_time"]


def test_a_training_that_was_not_killed_shows_nothing_about_resuming() -> None:
    result = BenchmarkResult("", ())
    record_resume(result, True, None)
    assert result.figures["resume_exact"] is None and result.figures["resume_exact_reason"]
    record_resume(result, False, "after a checkpoint")
    assert result.figures["resume_exact"] is False


def test_a_service_that_does_not_end_is_killed() -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignore}; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as service:
        assert service.stdout and service.stdout.readline()
        stop(service, 0.2)
        assert service.returncode == -signal.SIGKILL


def test_failed_requests_are_counted() -> None:
    class Failing:
        async def forecast(self, request: object) -> object:
            raise TemporaryError("no worker")

    assert asyncio.run(forecast_or_none(Failing(), None)) is None  # type: ignore[arg-type]
    assert summarize_responses([(503, 1.0)] * 3).startswith("3 x 503")


def test_a_study_names_the_commits_of_its_trainings(tmp_path: Path) -> None:
    trained_at = ["2026-01-02 b", "2026-01-01 c", "2026-01-03 c"]
    assert commits_of(trained_at) == "c, b"
    BenchmarkResult("", ()).save_study(tmp_path / "study.json", "", trained_at=trained_at)
    assert json.loads((tmp_path / "study.json").read_text())["commit"] == "c, b"
