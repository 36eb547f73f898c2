"""Studies: intervals over users, trials that run once, and saved results."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.studies import growth, history_length, prequential
from benchmarks.studies.calibration import Served, largest, worst_surface
from benchmarks.studies.position_truth import share_of_logged_outcomes
from benchmarks.studies.refit_predictions import maturity_times
from benchmarks.studies.trials import TrialRunner, trial_path
from dags.steps import PipelinePaths
from etl.spec.effects import KEY_EFFECTS, MODEL_INPUTS
from etl.spec.units import DaySplit
from etl.tables import arrow, model_schemas
from etl.tables.lake import Lake, arrow_schema
from ranking.report import figures
from ranking.report.data import true_probabilities
from ranking.report.study import StudyResult, load_studies
from tests.conftest import FIRST, LAST
from tests.pipeline import rows
from training.baseline import BaselineConfig
from training.config import TrainConfig
from training.evaluation.metrics import ne_by_objective
from training.evaluation.predictions import Predictions, paired_ne_difference

SPLIT = DaySplit(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
    data_until=LAST,
)  # fmt: skip
TINY = TrainConfig(scale="tiny", width_multiplier=0.5, max_length=8)


def user_predictions(seed: int, blur: float, users: int = 60, n: int = 3000) -> Predictions:
    """Labels with a rate per user, and predictions of those rates up to `blur`."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, n)
    p = rng.uniform(0.1, 0.6, users)[user]
    labels = (rng.random(n) < p).astype(np.float32)
    predicted = (1 - blur) * p + blur * p.mean()
    return Predictions(
        ("click",), np.arange(n).astype(str).astype(object), user, np.ones(n, np.int64),
        predicted[:, None], labels[:, None], np.ones((n, 1), bool),
    )  # fmt: skip


def test_a_paired_difference_is_that_of_ne_and_is_inside_its_interval() -> None:
    better, worse = user_predictions(0, 0.0), user_predictions(0, 0.9)
    difference = paired_ne_difference([better], [worse], "click")
    assert difference.value == pytest.approx(
        ne_by_objective(better)["click"] - ne_by_objective(worse)["click"]
    )
    assert difference.low < difference.value < difference.high < 0 and difference.is_significant
    none = paired_ne_difference([better, worse], [worse, better], "click")
    assert none.value == pytest.approx(0, abs=1e-12) and not none.is_significant


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**16))
def test_duplicated_rows_of_a_user_do_not_shrink_the_interval(seed: int) -> None:
    """Duplicates of the same user leave the interval as it is; of other users they shrink it."""
    better, worse = user_predictions(seed, 0.2), user_predictions(seed, 0.6)

    def duplicate(p: Predictions, user_shift: int) -> Predictions:
        return replace(
            p,
            impression_ids=np.tile(p.impression_ids, 2),
            user_hashes=np.concatenate((p.user_hashes, p.user_hashes + user_shift)),
            surface=np.tile(p.surface, 2),
            probabilities=np.tile(p.probabilities, (2, 1)),
            labels=np.tile(p.labels, (2, 1)),
            label_mask=np.tile(p.label_mask, (2, 1)),
        )

    def width(user_shift: int) -> float:
        interval = paired_ne_difference(
            [duplicate(better, user_shift)], [duplicate(worse, user_shift)], "click"
        )
        return interval.high - interval.low

    once = paired_ne_difference([better], [worse], "click")
    assert width(0) == pytest.approx(once.high - once.low, rel=1e-6)
    assert width(10_000) < 0.85 * width(0)


@pytest.fixture(scope="module")
def trials(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> TrialRunner:
    return TrialRunner(lake, SPLIT, tmp_path_factory.mktemp("trials"))


def test_a_trial_runs_once_and_leaves_the_lake_unchanged(trials: TrialRunner) -> None:
    before = sorted(p.name for p in Path(trials.lake.root).iterdir())
    first = trials.gem(TINY)
    written = {p: p.stat().st_mtime_ns for p in trials.folder.iterdir()}
    second = trials.gem(TINY)
    assert {p: p.stat().st_mtime_ns for p in trials.folder.iterdir()} == written
    np.testing.assert_array_equal(first.predictions.probabilities, second.predictions.probabilities)
    wider = trials.gem(TINY.model_copy(update={"width_multiplier": 1.0}))
    assert wider.flops_per_example > 1.5 * first.flops_per_example
    assert first.record.core_seconds > 0 and first.record.examples > len(first.predictions.surface)
    assert TrainConfig.model_validate(first.record.config) == TINY
    assert sorted(p.name for p in Path(trials.lake.root).iterdir()) == before


def test_a_trial_is_another_one_after_a_change_of_what_models_read(lake: Lake) -> None:
    """Of each key of the spec that affects their inputs, though it affects no table."""
    spec = lake.spec
    assert spec.position_bias is not None
    changes: dict[str, object] = {
        "domains": {"all": spec.ad_surfaces},
        "position_bias": None,
        "sequences": {},
        "history": spec.history.model_copy(update={"max_events": 7}),
        "similarity_attributes": (),
        "calibration_segments": (),
    }
    assert {path.partition(".")[0] for path, of in KEY_EFFECTS.items() if of is MODEL_INPUTS} == {
        *changes
    }
    changed = [spec, *(spec.model_copy(update={key: value}) for key, value in changes.items())]
    assert len({one.hash for one in changed}) == 1
    paths = [trial_path(Path(), Lake(lake.root, one), ["examples"], SPLIT, "x") for one in changed]
    assert len(set(paths)) == len(changed)


def test_a_trial_is_another_one_after_a_table_was_built_again(lake: Lake, tmp_path: Path) -> None:
    own, schema = Lake(str(tmp_path / "lake"), lake.spec), model_schemas.scores(lake.spec)

    def path_of_new_table() -> Path:
        shutil.rmtree(own.root, ignore_errors=True)
        arrow.replace_rows(own, schema, arrow_schema(schema).empty_table(), f"day = '{LAST}'", {})
        return trial_path(tmp_path, own, [schema.name], SPLIT, "x")

    assert path_of_new_table() != path_of_new_table()
    assert own.version(schema.name) == 1


def test_models_per_surface_predict_the_same_rows_as_one_of_all_surfaces(
    trials: TrialRunner,
) -> None:
    pooled, separate = trials.gem_all_surfaces(TINY), trials.gem_per_surface(TINY)
    assert (pooled.impression_ids == separate.impression_ids).all()
    assert (pooled.labels == separate.labels).all()
    assert (pooled.label_mask == separate.label_mask).all()
    assert (pooled.probabilities != separate.probabilities).any()


def test_a_saved_study_is_loaded_unchanged(tmp_path: Path) -> None:
    study = StudyResult(
        title="t", command="c", columns=("a",), rows=(("b",),), intervals={"x": (1.0, 0.5, 2.0)}
    )
    study.save(tmp_path / "study.json")
    assert load_studies(tmp_path) == [study]
    assert "<svg" in figures.plot_study(study)
    assert figures.plot_study(study.model_copy(update={"intervals": {}})) == ""


def test_configurations_are_tuned_once_for_each_grid(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = []

    def tune(_lake: Lake, split: DaySplit) -> dict[str, BaselineConfig]:
        tuned.append(split)
        return {"click": BaselineConfig()}

    monkeypatch.setattr(prequential, "tune_lightgbm", tune)
    trials = prequential.PrequentialTrials(lake, FIRST, LAST, LAST, tmp_path)
    for rates in ((0.1,), (0.1,), (0.2,)):
        monkeypatch.setattr(prequential, "RATES", rates)
        trials.tuned_lightgbm(LAST)
    assert len(tuned) == 2


def test_a_run_is_read_only_if_its_configuration_is_the_same(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def predict(*arguments: object) -> Predictions:
        runs.append(arguments)
        return user_predictions(0, 0.1)

    monkeypatch.setattr(history_length, "load_spec", lambda _: lake.spec)
    monkeypatch.setattr(history_length, "predictions_of_run", predict)
    paths = PipelinePaths(tmp_path / "spec.yaml", "raw", lake.root)
    for config in (TINY, TINY, TrainConfig()):
        monkeypatch.setattr(history_length, "gem_config", lambda _, config=config: config)
        history_length.ne_of_run(tmp_path, paths, SPLIT, "gem-8-0")
    assert len(runs) == 2


def test_a_run_that_is_stopped_while_its_result_is_written_runs_again(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def write_half(path: Path, text: str) -> None:
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(history_length, "load_spec", lambda _: lake.spec)
    monkeypatch.setattr(history_length, "gem_config", lambda _: TINY)
    monkeypatch.setattr(history_length, "predictions_of_run", lambda *_: user_predictions(0, 0.1))
    paths = PipelinePaths(tmp_path / "spec.yaml", "raw", lake.root)
    with pytest.MonkeyPatch.context() as stopped:
        stopped.setattr(Path, "write_text", write_half)
        with pytest.raises(KeyboardInterrupt):
            history_length.ne_of_run(tmp_path, paths, SPLIT, "gem-8-0")
    assert set(history_length.ne_of_run(tmp_path, paths, SPLIT, "gem-8-0")) == {"click"}


def test_calibration_is_not_judged_without_segments_or_enough_labels() -> None:
    served = Served(user_predictions(0, 0.1, n=100), [])
    assert np.isnan(served.worst_sigma) and np.isnan(worst_surface([served], "click")).all()
    assert np.isnan(largest([])) and largest([float("nan"), 1.0, 2.0]) == 2.0
    enough = Served(user_predictions(0, 0.1, n=9000), [])
    assert 0 < worst_surface([enough], "click")[0] < 0.1


def test_the_worst_surface_in_noise_floors_may_have_a_small_ratio() -> None:
    """Many labels have a low floor: surface 2 is worse outside noise, surface 1 by its ratio."""
    n, few = 200_000, 3000
    surface = np.where(np.arange(n) < few, 1, 2)
    p = np.where(surface == 1, 0.54, 0.52)
    labels = np.arange(n) % 2
    rows = Predictions(
        ("click",), np.arange(n).astype(str).astype(object), np.arange(n), surface, p[:, None],
        labels[:, None].astype(np.float32), np.ones((n, 1), bool),
    )  # fmt: skip
    ratio, in_floors = worst_surface([Served(rows, [])], "click")
    assert ratio == pytest.approx(0.08)
    of_large = rows.filter(surface == 2)
    assert in_floors == worst_surface([Served(of_large, [])], "click")[1] > 10


def test_labels_of_late_impressions_are_final_when_the_tables_say_so(lake: Lake) -> None:
    """Some impressions are logged after their window and grace period."""
    stored = rows(lake, "impressions")[::-1]
    ids = np.array([row["impression_id"] for row in stored], dtype=object)
    is_late = []
    for name, mature_at in maturity_times(lake, ids).items():
        assert mature_at.tolist() == [row[f"label_mature_ts_{name}"] // 10**6 for row in stored]
        in_time = lake.spec.objectives[name].label_maturity_seconds
        is_late += [at > row["event_ts"] // 10**6 + in_time
                    for at, row in zip(mature_at, stored, strict=True)]  # fmt: skip
    assert any(is_late) and not all(is_late)


def test_the_share_of_logged_outcomes_is_that_of_all_final_labels(lake: Lake, raw: Path) -> None:
    labeled = rows(lake, "impressions")
    ids = np.array([row["impression_id"] for row in labeled], dtype=object)
    names = tuple(lake.spec.objectives)
    labels = [[row[f"label_{name}"] for name in names] for row in labeled]
    mask = np.array([[label is not None for label in of_row] for of_row in labels])
    found = Predictions(
        names, ids, np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64),
        mask.astype(float), np.array(labels, dtype=object) == 1, mask,
    )  # fmt: skip
    truth = true_probabilities(found, str(raw))
    assert truth is not None
    expected = truth.labels.sum(0) / (truth.probabilities * truth.label_mask).sum(0)
    share = share_of_logged_outcomes(lake, raw)
    np.testing.assert_allclose(share, expected)
    assert 0.5 < share[names.index("click")] < 1.5


def growth_costs(step: str, ages: tuple[int, ...], bytes_read: int) -> list[growth.StepCost]:
    """Costs of a step on the days that end at some ages."""
    return [
        growth.StepCost(
            age=age - k, step=step, bytes_read=bytes_read * age, cpu_seconds=1, seconds=1
        )
        for age in ages
        for k in range(growth.MEASURED_DAYS)
    ]


def test_the_growth_of_a_lake_is_the_largest_ratio_of_two_ages() -> None:
    costs = growth_costs("history", (30, 90), 1000) + growth_costs("former name", (30,), 1000)
    one_age, two_ages = growth.summarize(costs, 30), growth.summarize(costs, 90)
    assert one_age.figures["worst_step_ratio"] is None
    assert (
        one_age.figures["worst_step_ratio_reason"] == "two ages are compared: run --days 90 or more"
    )
    assert two_ages.figures["worst_step_ratio"] == two_ages.figures["history_bytes_ratio"] == 3.0
    assert [row[0] for row in two_ages.rows] == ["history"], "a step with two ages"
    three_ages = growth.summarize(growth_costs("history", growth.AGES, 1000), growth.AGES[-1])
    assert three_ages.figures["worst_step_ratio"] == pytest.approx(365 / 30)
    assert three_ages.figures["worst_step_ratio_from_90"] == pytest.approx(365 / 90)


def test_runs_of_the_study_of_growth_cover_each_day_once_and_compared_days_alone() -> None:
    days = growth.AGES[-1]
    runs = growth.runs_of_study(0, days)
    assert [age for run in runs for age in run] == list(range(1, days + 1))
    daily = {run[0] for run in runs if len(run) == 1}
    assert max(len(run) for run in runs) == growth.LONGEST_RUN
    for age in growth.AGES:
        assert daily >= set(range(age - growth.MEASURED_DAYS + 1, age + 1))
    for number, run in enumerate(runs):  # after an interruption, the same runs follow
        assert growth.runs_of_study(run[0] - 1, days) == runs[number:]


def test_a_store_is_kept_until_the_costs_of_the_next_day_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a day that is measured again after a kill would build a store from nothing."""
    paths, earlier = PipelinePaths(SIMULATOR_SPEC, "raw", str(tmp_path)), []

    class BuiltStore:
        def __init__(self, _lake: Lake, folder: Path, *inputs: object) -> None:
            folder.mkdir(parents=True)
            earlier.append([path.exists() for path in inputs[-1]])  # type: ignore[attr-defined]

        def close(self) -> None: ...

    monkeypatch.setattr("ranking.feature_store.materialize.build_feature_store", BuiltStore)
    for age in (1, 2, 2):  # the second day was killed before it was recorded
        before = growth.store_folder(paths, growth.day_of(age - 1))
        growth.build_store(paths, growth.day_of(age), before)
    assert earlier == [[False], [True], [True]]
    growth.remove_earlier_stores(paths, growth.day_of(2))
    stores = growth.store_folder(paths, growth.day_of(2)).parent
    assert [path.name for path in stores.iterdir()] == [str(growth.day_of(2))]
