"""The report says what the run's files say, needs no other file, and hides nothing."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from sklearn.metrics import log_loss

from etl.errors import UserError
from etl.tables.lake import Lake
from ranking.report.build import build_report
from ranking.report.facts import compare
from tests.conftest import FIRST, LAST
from tests.pipeline import rows
from tests.world import link_tables
from training.predictions import Predictions, evaluation_path
from training.split import Split
from training.study import Study

SPLIT = Split(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
    landed=LAST,
)  # fmt: skip


@pytest.fixture
def run(lake: Lake, tmp_path: Path) -> Lake:
    """The tables of the shared lake, with evaluations of its own."""
    link_tables(lake, tmp_path)
    return Lake(str(tmp_path), lake.spec)


@pytest.fixture
def truth(lake: Lake) -> Predictions:
    """What happened to all impressions, predicted by a coin with a memory."""
    names, shown = tuple(lake.spec.objectives), rows(lake, "impressions")
    known = np.array([[row[f"label_{n}"] is not None for n in names] for row in shown])
    labels = np.array([[row[f"label_{n}"] or 0 for n in names] for row in shown], np.float32)
    noise = np.random.default_rng(0).uniform(0.02, 0.2, labels.shape)
    return Predictions(
        names, np.array([row["impression_id"] for row in shown], object),
        np.array([crc32(row["user_id"].encode()) for row in shown]),
        np.array([row["surface"] for row in shown]), noise + 0.1 * labels, labels, known,
    )  # fmt: skip


def blurred(p: Predictions, share: float) -> Predictions:
    return replace(p, probability=(1 - share) * p.probability + share * 0.3)


def test_every_number_is_that_of_the_files_of_the_run(
    run: Lake, truth: Predictions, raw: Path
) -> None:
    truth.write(evaluation_path(run.root, "gem"), SPLIT)
    blurred(truth, 0.5).write(evaluation_path(run.root, "lightgbm"), SPLIT)
    page = build_report(run, str(raw), SPLIT).read_text()
    for i, name in enumerate(truth.objectives):
        known = truth.known[:, i]
        y, p = truth.labels[known, i], truth.probability[known, i]
        if 0 < y.sum() < len(y):
            ne = log_loss(y, p) / log_loss(y, np.full(len(y), y.mean()))
            assert f"{name}: GEM has NE {ne:.3f} on {known.sum():,} rows" in page
    assert "click: GEM has NE" in page
    for reason in {r for row in rows(run, "quarantine") for r in row["reasons"]}:
        count = sum(reason in row["reasons"] for row in rows(run, "quarantine"))
        assert f"{reason} {count:,}" in page
    parked = Counter(row["reason"] for row in rows(run, "parked"))
    for reason, count in parked.items():
        assert f"{reason} {count:,} (of" in page
    assert parked
    for who in ("user", "item"):
        nothing = sum(row[f"{who}_since"] is None for row in rows(run, "examples"))
        assert f"{nothing:,} without {who} attributes" in page
    for day in rows(run, "flow"):
        counts = [day[name] for name in ("kept", "quarantined", "duplicates", "parked")]
        assert day["read"] == sum(counts)
        told = "".join(f"<td>{n:,}</td>" for n in (day["read"], *counts))
        assert f"<td>{day['day']}</td>{told}</tr>" in page
    assert "student" not in re.sub(r'<p class="note">.*?</p>', "", page, flags=re.DOTALL)
    assert "Longer studies" not in page, "none was made on this lake"


def test_the_page_stands_alone(run: Lake, truth: Predictions, raw: Path) -> None:
    truth.write(evaluation_path(run.root, "gem"), SPLIT)
    sizes = (("GEM", "0.8"),)
    study = Study(title="Sizes", command="gemline bench", columns=("model", "NE"), rows=sizes)
    study.keep(Path(run.root, "studies", "sizes.json"))
    page = build_report(run, str(raw), SPLIT).read_text()
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(\s*['\"]?http", page)
    own, _, kept = page.partition("Longer studies")
    assert (
        own.count("<svg") == 2
        and "<td>GEM</td><td>0.8</td>" in kept
        and "Where the time went" not in page
    )


def test_a_report_of_nothing_is_refused(run: Lake, raw: Path) -> None:
    with pytest.raises(UserError, match="no model was evaluated"):
        build_report(run, str(raw), SPLIT)
    assert not (Path(run.root) / "report.html").exists()


def test_predictions_of_other_days_are_refused(run: Lake, truth: Predictions, raw: Path) -> None:
    truth.write(evaluation_path(run.root, "gem"), SPLIT.model_copy(update={"test_first": FIRST}))
    with pytest.raises(UserError, match="predictions of another split of days"):
        build_report(run, str(raw), SPLIT)


@pytest.mark.parametrize(
    "order", [lambda n: np.arange(n), lambda n: np.random.default_rng(1).permutation(n)]
)
def test_the_better_model_is_below_zero_whatever_the_order_of_rows(
    lake: Lake, truth: Predictions, order: Callable[[int], np.ndarray]
) -> None:
    worse = blurred(truth, 0.5)
    at = order(len(worse.impressions))
    names = ("impressions", "surface", "probability", "labels", "known")
    turned = replace(worse, **{name: getattr(worse, name)[at] for name in names})
    found = compare(lake, truth, turned)
    assert {c.surface for c in found} == {"all", *lake.spec.surfaces}
    for c in found:
        if c.surface == "all":
            assert c.difference + c.half < 0, c
    for c, mirrored in zip(found, compare(lake, worse, truth), strict=True):
        assert c.difference == pytest.approx(-mirrored.difference)
    same = np.zeros_like(truth.labels)
    assert not compare(lake, replace(truth, labels=same), replace(worse, labels=same))
