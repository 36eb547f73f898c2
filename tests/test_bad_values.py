"""Values that cannot be meant are refused with exit code 2, before anything is read or written."""

import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pydantic import ValidationError

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.sample import read_records
from gemline import main
from ranking.erasure import EraseArgs
from ranking.forecast.schemas import ForecastRequest
from ranking.roi.campaign_days import read_campaign_days
from ranking.roi.campaign_limits import read_limits
from ranking.serving.server import require_free_port
from tests.conftest import FIRST, LAST, SPEC

Run = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must be refused; returns its error."""

    def run(*arguments: str) -> str:
        try:
            code: object = main(arguments)
        except SystemExit as stopped:
            code = stopped.code
        error = capfd.readouterr().err
        assert code == 2 and "Traceback" not in error
        return " ".join(error.replace("│", " ").split())

    return run


def test_dates_that_do_not_exist_are_no_yaml(refused: Run, tmp_path: Path) -> None:
    simulator, spec = tmp_path / "simulator.yaml", tmp_path / "spec.yaml"
    simulator.write_text("name: demo\nstart: 2026-02-30\n")
    out = str(tmp_path / "raw")
    message = refused("simulate", "--simulator", str(simulator), "--out", out)
    assert "simulator.yaml is not YAML: day is out of range for month" in message
    spec.write_text("name: 2026-02-30\n")
    with pytest.raises(UserError, match="not valid YAML: day is out of range"):
        load_spec(spec)
    simulator.write_text("1: demo\n")
    assert "1: Keys should be strings" in refused(
        "simulate", "--simulator", str(simulator), "--out", out
    )


def test_a_mapping_that_is_not_yaml_names_its_flag(refused: Run, tmp_path: Path) -> None:
    flags = ["--spec", str(SPEC), "--lake", str(tmp_path), "--days", str(LAST)]
    message = refused("train", "gem", *flags, "--negative-sampling-rate", "{click: 0.1")
    assert "--negative-sampling-rate" in message and "not YAML" in message


def test_a_file_cannot_be_a_lake_or_a_folder(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "lake"):
        flags = ["--spec", str(SPEC), "--lake", str(root), "--days", str(LAST)]
        assert "name another --lake" in refused("train", "gem", *flags)
    out = str(tmp_path / "file" / "raw")
    simulator = "conf/simulator/demo.yaml"
    assert "name another folder" in refused("simulate", "--simulator", simulator, "--out", out)


def test_numbers_out_of_range_are_refused(refused: Run, tmp_path: Path) -> None:
    flags = ["--spec", str(SPEC), "--lake", str(tmp_path), "--days", str(LAST)]
    for name, value in (("processes", "0"), ("dense-lr", "-1"), ("embedding-lr", "nan")):
        assert name.replace("-", "_") in refused(
            "train", "gem", *flags, f"--{name}", value
        ).replace("-", "_")


@pytest.mark.parametrize(
    ("command", "option", "reason"),
    [
        ("rank train", "--seed -1", "seed Input should be greater than or equal to 0"),
        ("rank train", f"--seed {2**64}", "seed Input should be less than"),
        ("rank train", "--model.hidden 128 -1", "hidden.1 Input should be greater than"),
        ("rank train", "--model.heads 3", "heads is 3, which does not divide event_width 64"),
        ("rank train-domain", "--model.heads 3", "heads is 3, which does not divide"),
        ("train gem", "--seed -1", "seed Input should be greater than or equal to 0"),
        ("train gem", f"--seed {2**64}", "seed Input should be less than"),
    ],
)
def test_seeds_and_sizes_of_models_that_cannot_be_meant_are_refused(
    refused: Run, tmp_path: Path, command: str, option: str, reason: str
) -> None:
    required = {
        "rank train": f"--surface feed --train {FIRST} --test {LAST} --data-until {LAST}",
        "rank train-domain": f"--domain feed --train {FIRST} --test {LAST} --data-until {LAST}",
        "train gem": f"--days {LAST}",
    }
    flags = ["--spec", str(SPEC), "--lake", str(tmp_path), *required[command].split()]
    assert reason in refused(*command.split(), *flags, *option.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [("window: 3d", "window: 0s"), ("windows: [1h", "windows: [0s"), ("window: 28d", "window: 0d")],
)
def test_windows_without_a_length_are_refused(tmp_path: Path, old: str, new: str) -> None:
    text = SPEC.read_text().replace(
        "campaign: advertiser_id\n", "campaign: advertiser_id\n    window: 28d\n", 1
    )
    assert old in text
    (tmp_path / "spec.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=r"window.*greater than or equal to"):
        load_spec(tmp_path / "spec.yaml")


def test_a_range_is_no_day(refused: Run, tmp_path: Path) -> None:
    flags = ["--spec", str(SPEC), "--lake", str(tmp_path), "--train", "2026-01-01:2026-01-03"]
    flags += ["--test", "2026-01-06", "--data-until", "2026-01-08"]
    message = refused("train", "evaluate", *flags, "--calibration", "2026-01-04:2026-01-05")
    assert "--calibration 2026-01-04:2026-01-05: write one day" in message


def test_ids_of_users_are_read_without_a_byte_order_mark(tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("user-1\nuser-2\n", "utf-8-sig")
    arguments = {"spec": SPEC, "lake": str(tmp_path), "users": ids}
    assert EraseArgs.model_validate(arguments).ids == ["user-1", "user-2"]
    ids.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8"):
        _ = EraseArgs.model_validate(arguments).ids


def test_texts_that_cannot_be_encoded_are_no_forecast() -> None:
    for field in ({"targeting": "country = '\ud800'"}, {"in_target": ["\ud800"]}):
        with pytest.raises(ValidationError):
            ForecastRequest.model_validate(field)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf":{port} .*choose another --port"):
            require_free_port("127.0.0.1", port)


def test_campaign_days_of_a_table_need_no_column_arrived(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist(
        [
            {"campaign": "a", "day": f"2026-01-{day:02}", "spend": 10.0 + day, "conversions": 1.0,
             "value": 5.0, "currency": "EUR"}
            for day in range(1, 29)
        ]
    )  # fmt: skip
    spend = rows["spend"].cast(pa.decimal128(12, 2))
    rows = rows.set_column(rows.column_names.index("spend"), "spend", spend)
    write_deltalake(str(tmp_path / "days"), rows)
    assert read_campaign_days(tmp_path / "days", (), "EUR").days.campaigns == ("a",)
    write_deltalake(str(tmp_path / "other"), rows.drop_columns(["spend"]))
    with pytest.raises(UserError, match="has no column spend"):
        read_campaign_days(tmp_path / "other", (), "EUR")
    (tmp_path / "days.csv.gz").write_text("no archive")
    with pytest.raises(UserError, match="is neither CSV nor Parquet"):
        read_campaign_days(tmp_path / "days.csv.gz", (), "EUR")
    with pytest.raises(UserError, match="is a folder, but no Delta table"):
        read_campaign_days(tmp_path, (), "EUR")


def test_an_infinite_budget_is_refused(tmp_path: Path) -> None:
    limits = pa.table({"campaign": ["a"], "budget": [float("inf")]})
    pq.write_table(limits, tmp_path / "limits.parquet")
    with pytest.raises(UserError, match="budget is not finite"):
        read_limits(tmp_path / "limits.parquet", ("a",), 0.0)


def test_cells_beyond_the_header_are_no_attribute(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2,3\n")
    assert [*read_records(tmp_path / "log.csv", "csv")] == [{"a": "1", "b": "2"}]
