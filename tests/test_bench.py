"""What a benchmark prints: figures as the last line of JSON; one that can't be had says why."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.result import Result
from etl.spec import load_spec
from gemline import main
from tests.conftest import ROOT


@given(st.one_of(st.none(), st.floats(allow_infinity=False)))
def test_a_figure_is_a_number_or_null_with_its_reason(value: float | None) -> None:
    result = Result("", ())
    result.take("figure", value, "the disk is full")
    said = json.loads(json.dumps(result.figures, allow_nan=False))
    if value is None or math.isnan(value):
        assert said == {"figure": None, "figure_reason": "the disk is full"}
    else:
        assert said == {"figure": pytest.approx(value, abs=1e-6)}


def test_without_its_data_kuairand_gives_every_figure_as_null(
    capsys: pytest.CaptureFixture[str],
) -> None:
    days = ["--train", "2022-04-25:2022-04-29", "--test", "2022-04-30:2022-04-30"]
    assert main(["bench", "kuairand", "--data", "nowhere", *days, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for objective in load_spec(ROOT / "conf/specs/kuairand.yaml").objectives:
        for model in ("gem", "lightgbm"):
            key = f"{model}_{objective}_auc"
            assert figures[key] is None and "nowhere is absent" in figures[f"{key}_reason"]


def test_days_to_test_on_come_after_those_to_learn_from(capsys: pytest.CaptureFixture[str]) -> None:
    days = ["--train", "2022-04-25:2022-04-29", "--test", "2022-04-29:2022-04-30"]
    assert main(["bench", "kuairand", "--data", ".", *days]) == 2
    assert "must come after" in capsys.readouterr().err
    days[3] = "tomorrow"
    assert main(["bench", "kuairand", "--data", ".", *days]) == 2
    assert "--test tomorrow" in capsys.readouterr().err
