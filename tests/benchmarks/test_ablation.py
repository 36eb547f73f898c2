"""`gemline bench ablation`: differences, verdicts, rows that are added, and configurations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.harness import KUAIRAND_SPEC, SIMULATOR_SPEC
from benchmarks.studies import ablation, ablation_rows, ablation_trials, ablation_validation
from benchmarks.studies.ablation_rows import DEEP, DEFAULT, config_of, ne_differences
from benchmarks.studies.ablation_table import (
    ablation_table,
    differences_from_default,
    verdicts_of,
)
from benchmarks.studies.model_changes import CHANGES, DATA_SETS, DataSet
from benchmarks.studies.seeded_estimates import SeededEstimate
from etl.errors import UserError
from etl.spec import load_spec
from features.schema import feature_schema
from gemline import main
from ranking.report.study import StudyResult
from tests.benchmarks.test_model_studies import FakeTrials
from tests.benchmarks.test_studies import user_predictions
from training.config import TrainConfig
from training.evaluation.predictions import Predictions
from training.model.gem import Gem
from training.trainer.step import Loss, negative_sampling

SPECS: dict[DataSet, Path] = {"simulated": SIMULATOR_SPEC, "kuairand": KUAIRAND_SPEC}


@dataclass
class FakeData:
    """Trials of the ablation; a model for each surface is not possible."""

    trials: FakeTrials
    trained: list[TrainConfig] = field(default_factory=list)

    def gem(self, config: TrainConfig) -> Predictions:
        """Predictions of a configuration."""
        self.trained.append(config)
        return self.trials.gem(config).predictions.sorted_by_impression()

    def lightgbm(self) -> Predictions:
        """Predictions that are worse than all of GEM."""
        return user_predictions(0, 0.9).sorted_by_impression()

    def gem_per_surface(self, config: TrainConfig) -> None:
        """None."""

    def trained_at(self) -> set[str]:
        """When the fake trainings ran."""
        return {"2026-01-01 abc"}


def ablation_of(
    blur: Callable[[DataSet, TrainConfig], float], names: list[str]
) -> dict[str, object]:
    """Figures of an ablation whose models have some blur on each data set."""
    differences: ablation_rows.Differences = {}
    for data in DATA_SETS:
        trials = FakeData(FakeTrials(lambda config, data=data: blur(data, config)))  # type: ignore[misc]
        measured = ne_differences(trials, data, "tiny", 3, names, ["click"])
        differences[data] = measured["click"]
    return ablation_table(differences, {data: {} for data in DATA_SETS}, "title").figures


def test_rows_are_paired_with_the_default_where_its_trainings_are_read() -> None:
    """Both differences of a row contain the reference, with opposite signs."""

    def blur(config: TrainConfig) -> float:
        return 0.25 if config.model.interaction == "dcnv2" else 0.6 if config.sizes else 0.2

    trials, names = FakeData(FakeTrials(blur)), [DEEP, "DCNv2"]
    rows, paired = (
        ne_differences(trials, "simulated", "tiny", 3, names, ["click"], name)["click"]
        for name in (DEEP, DEFAULT)
    )
    added = differences_from_default(rows)
    assert paired["DCNv2"].value == pytest.approx(added["DCNv2"].value)
    assert paired["DCNv2"].standard_error < added["DCNv2"].standard_error
    assert paired[DEEP] == added[DEEP] == rows[DEEP]


def test_the_default_is_best_until_a_row_is_better_outside_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [DEEP, "DCNv2", "flow: int", "value head", ablation_rows.LIGHTGBM]
    figures = ablation_of(lambda data, config: 0.3, names)
    assert figures["default_is_best"] is None
    assert "not measured" in str(figures["default_is_best_reason"])
    monkeypatch.setattr(ablation_rows, "all_rows", lambda: tuple(names))
    figures = ablation_of(lambda data, config: 0.3, names)
    assert figures["default_is_best"] is True
    assert figures["comparisons"] == 9  # no value head on KuaiRand

    def better_dcn(data: DataSet, config: TrainConfig) -> float:
        is_better = data == "simulated" and config.model.interaction == "dcnv2"
        return 0.0 if is_better else 0.8

    figures = ablation_of(better_dcn, names)
    assert figures["default_is_best"] is False
    assert figures["better_simulated"] == ["DCNv2"] and figures["better_on_all_data"] == []
    deeper = ablation_of(lambda _, config: 0.1 if config.sizes else 0.6, names)
    assert deeper["better_on_all_data"] == names[:3]


def test_rows_that_beat_only_a_poor_reference_are_not_better_than_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [DEEP, "DCNv2", "flow: int"]
    monkeypatch.setattr(ablation_rows, "all_rows", lambda: tuple(names))

    def poor_reference(data: DataSet, config: TrainConfig) -> float:
        return 0.8 if config == config_of(data, DEEP, "tiny", config.seed) else 0.3

    figures = ablation_of(poor_reference, names)
    assert figures["default_is_best"] is True
    assert figures["better_simulated"] == figures["better_on_all_data"] == []


def test_rows_are_added_to_those_of_the_same_study(tmp_path: Path) -> None:
    path, title = tmp_path / "study.json", ablation.title_of("small", 1)
    nothing = ablation.committed_study(path, title)
    assert ablation.committed_differences(nothing) == {data: {} for data in DATA_SETS}
    measured: ablation_rows.Differences = {
        "simulated": {"DCNv2": SeededEstimate(-0.01, 0.002, 99.0)},
        "kuairand": {"flow: int, 32 events": SeededEstimate(0.02, 0.003, 7.5)},
    }
    no_change = SeededEstimate.combine(0.0, (0.0, 3))
    measured["kuairand"] |= {
        "DIN": SeededEstimate(
            no_change.value, no_change.standard_error, ablation.MAX_DEGREES_OF_FREEDOM
        ),
    }
    paired: ablation_rows.Differences = {"simulated": {"DCNv2": SeededEstimate(-0.02, 0.001, 99.0)},
                                    "kuairand": {}}  # fmt: skip
    result = ablation_table(measured, paired, title)
    trained_at = ["2026-01-02 b", "2026-01-01 a"]
    ablation.save_study(path, result, measured, paired, "command", trained_at)
    study = ablation.committed_study(path, title)
    assert study and study.commit == "a, b", "those of the trainings"
    assert ablation.committed_differences(study) == measured
    assert ablation.committed_differences(study, ablation.FROM_DEFAULT) == paired
    with pytest.raises(UserError, match="is another study"):
        ablation.committed_study(path, ablation.title_of("small", 5))
    missing = result.figures["rows_not_measured"]
    assert "DIN, simulated" in missing and "DCNv2, kuairand" in missing  # type: ignore[operator]
    assert "DCNv2, simulated" not in missing  # type: ignore[operator]
    assert "value head, kuairand" not in missing  # type: ignore[operator]


def test_a_share_of_validation_trainings_saves_nothing_and_rows_are_added_to_the_committed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, path = FakeData(FakeTrials(lambda config: 0.3)), tmp_path / "study.json"
    monkeypatch.setattr(ablation_trials, "ablation_trials", lambda *_: fake)
    monkeypatch.setattr(ablation_validation, "RESULT", path)
    monkeypatch.setattr(ablation_validation, "OBJECTIVES", ("click",))
    words = ["bench", "ablation", "--work", "w", "--validation", "--scale", "tiny", "--seeds", "1"]
    title = ablation_validation.validation_title("tiny", 1)
    committed = StudyResult(
        title=title, command="c", columns=("change", "click"), rows=(("DIN", "+1 [+0, +2]"),),
        date="2026-01-02", commit="old", intervals={"DIN, click": (1.1, 0.2, 2.3)},
    )  # fmt: skip
    committed.save(path)
    assert main([*words, "--only", "DCNv2", "--share", "1/2"]) == 0
    assert len(fake.trained) == 1 and StudyResult.model_validate_json(path.read_text()) == committed
    assert main([*words, "--only", "DCNv2"]) == 0
    study = StudyResult.model_validate_json(path.read_text())
    assert [row[0] for row in study.rows] == ["DCNv2", "DIN"] and study.rows[1] == committed.rows[0]
    assert study.intervals["DIN, click"] == (1.1, 0.2, 2.3) and "DCNv2, click" in study.intervals
    assert study.commit == "abc, old"
    assert main([*words, "--data", "simulated"]) == 2
    assert "leave out --data simulated" in capsys.readouterr().err


def test_many_rows_within_noise_are_corrected_for_their_number() -> None:
    borderline = {f"row {i}": SeededEstimate(-0.01, 0.0045, 100.0) for i in range(40)}
    assert all(estimate.p_value < 0.05 for estimate in borderline.values())
    verdicts = verdicts_of({"simulated": borderline}, 40)
    assert set(verdicts["simulated"].values()) == {"within noise"}
    alone = verdicts_of({"simulated": {"row": borderline["row 0"]}}, 1)
    assert alone["simulated"]["row"] == "better"
    one_of_many = verdicts_of({"simulated": {"row": borderline["row 0"]}}, 40)
    assert one_of_many["simulated"]["row"] == "within noise", "39 rows are not measured yet"


def own_rows() -> list[tuple[str, DataSet]]:
    """Rows of the simulated logs, and those of KuaiRand that are not the same."""
    simulated: list[tuple[str, DataSet]] = [(name, "simulated") for name in CHANGES]
    kuairand = [n for n, by_data in CHANGES.items() if len({*map(str, by_data.values())}) > 1]
    return [
        (DEEP, "simulated"),
        *simulated,
        *((name, "kuairand") for name in kuairand),
    ]


@pytest.mark.parametrize(("name", "data"), own_rows())
def test_every_change_of_a_study_is_a_valid_model(name: str, data: DataSet) -> None:
    config = config_of(data, name, "tiny", 0)
    assert config is not None
    features = feature_schema(load_spec(SPECS[data]))
    Gem(features, config.gem_config)
    Loss.from_config(config, features)
    negative_sampling(config, features.objectives)
    assert config.gem_config.layers == config.gem_config.event_layers == ablation_rows.DEPTH
