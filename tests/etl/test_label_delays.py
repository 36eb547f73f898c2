"""Labels wait for outcomes that are visible only after the delay of their log."""

from itertools import product
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from etl.spec import DataSpec
from etl.spec.label_delays import label_delay_warnings
from tests.etl.shop import SPEC


def shop_spec(shown_delay: int, click_delay: int, **click: str) -> dict[str, Any]:
    """The shop with an own log of impressions and one of clicks, which have their own delays."""
    raw: dict[str, Any] = yaml.safe_load(SPEC)
    log = raw["sources"].pop("app")
    del log["columns"]["type"], log["types"]
    for event, delay in (("shown", shown_delay), ("click", click_delay)):
        raw["sources"][event] = log | {"event": event, "delay": f"{delay}s"}
    raw["objectives"]["click"] |= click
    return raw


def test_objectives_are_refused_if_no_outcome_counts_and_warned_about_if_some_do_not() -> None:
    """As counted over all seconds of the window, for an impression that is ingested at once."""
    results = set()
    for window, grace, shown, delay in product((1, 2, 3), range(4), range(6), range(6)):
        final = max(window + grace, shown)
        counts = [second + delay <= final for second in range(1, window + 1)]
        times = {"window": f"{window}s", "label_grace_period": f"{grace}s"}
        raw = shop_spec(shown, delay, **times)
        if not any(counts):
            message = f"click: its labels are final before click .* at least {delay}s"
            with pytest.raises(ValidationError, match=message):
                DataSpec.model_validate(raw)
        else:
            warnings = list(label_delay_warnings(DataSpec.model_validate(raw)))
            missed = f"in the last {counts.count(False)}s of the window do not count"
            assert len(warnings) == (not all(counts))
            assert all(missed in text for text in warnings)
        raw["objectives"]["click"]["label_grace_period"] = f"{delay}s"
        assert not list(label_delay_warnings(DataSpec.model_validate(raw)))
        results.add((any(counts), all(counts)))
    assert len(results) == 3


def test_the_labels_of_extra_windows_can_be_1() -> None:
    raw = shop_spec(0, 60, window="1h")
    raw["objectives"]["click"]["extra_windows"] = ["30s"]
    with pytest.raises(ValidationError, match="click: its labels are final before click events"):
        DataSpec.model_validate(raw)
    raw["objectives"]["click"]["extra_windows"] = ["90s"]
    assert DataSpec.model_validate(raw)


@pytest.mark.parametrize("delay_column", [None, "after"])
def test_outcomes_in_the_record_of_an_impression_are_visible_with_it(
    delay_column: str | None,
) -> None:
    """Unless a column says how much later they are."""
    raw = shop_spec(0, 0)
    log = raw["sources"].pop("shown") | {"kind": "impression_log", "delay": "2h"}
    del log["event"], raw["sources"]["click"]
    raw["sources"]["log"] = log | {"outcomes": [{"event": "click", "delay": delay_column}]}
    if delay_column is None:
        assert not list(label_delay_warnings(DataSpec.model_validate(raw)))
    else:
        with pytest.raises(ValidationError, match="a label_grace_period of at least 2h"):
            DataSpec.model_validate(raw)
