"""Studies of GEM's parts, sizes and scales: estimates, verdicts, figures and configurations."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from benchmarks.studies import (
    ablation,
    ablation_trials,
    agreement,
    calibration,
    freshness,
    portfolio,
    precision,
    scaling,
    transfer,
)
from benchmarks.studies.committed import share_of, show_committed, with_unmeasured
from benchmarks.studies.seeded_estimates import holm, ne_difference_over_seeds
from benchmarks.studies.trials import Trial, TrialRecord
from etl.errors import TemporaryError, UserError
from etl.spec import load_spec
from etl.spec.units import DaySplit
from features.schema import feature_schema
from gemline import main
from tests.benchmarks.test_studies import user_predictions
from training.config import TrainConfig
from training.evaluation.predictions import Predictions, paired_ne_difference
from training.model.gem import Gem


def with_noise(p: Predictions, seed: int, scale: float) -> Predictions:
    """The same predictions, multiplied by one random factor for all rows of this seed."""
    factor = np.exp(scale * np.random.default_rng(seed).normal())
    return replace(p, probabilities=np.clip(p.probabilities * factor, 0.01, 0.99))


def test_a_difference_has_the_noise_of_users_and_that_of_seeds() -> None:
    better, worse = user_predictions(0, 0.1), user_predictions(0, 0.5)
    by_users = paired_ne_difference([better], [worse], "click")
    equal_seeds = ne_difference_over_seeds([better] * 3, [worse] * 3, "click")
    assert equal_seeds.value == pytest.approx(by_users.value)
    assert equal_seeds.low == pytest.approx(by_users.low, abs=0.1 * abs(by_users.value))
    assert equal_seeds.p_value < 0.01
    noisy = [with_noise(better, seed, 1.0) for seed in range(3)]
    seeds = ne_difference_over_seeds(noisy, [worse] * 3, "click")
    assert seeds.high - seeds.low > 2 * (equal_seeds.high - equal_seeds.low)
    assert seeds.degrees_of_freedom < 3 < equal_seeds.degrees_of_freedom


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_corrected_p_values_keep_the_order_and_the_smallest_counts_all(values: list[float]) -> None:
    corrected = holm(values)
    assert all(p <= c <= 1 for p, c in zip(values, corrected, strict=True))
    assert min(corrected) == pytest.approx(min(1, len(values) * min(values)))
    by_value = sorted(zip(values, corrected, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(by_value))


@given(st.integers(0, 30), st.integers(1, 5))
def test_shares_divide_the_tasks(tasks: int, processes: int) -> None:
    shares = [share_of(range(tasks), f"{k + 1}/{processes}") for k in range(processes)]
    assert sorted(task for share in shares for task in share) == list(range(tasks))


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b"])
def test_other_shares_are_refused(share: str) -> None:
    with pytest.raises(UserError, match="--share"):
        share_of([1, 2], share)


@dataclass
class FakeTrials:
    """Predictions of which the blur depends on the configuration: less blur is a better model."""

    blur: Callable[[TrainConfig], float]

    def gem(self, config: TrainConfig) -> Trial:
        """Predictions whose noise depends on the seed."""
        p = with_noise(user_predictions(0, self.blur(config)), config.seed, 0.01)
        flops = float(config.gem_config.mlp_width) ** 2
        return Trial(p, TrialRecord(flops=flops, examples=3000, core_seconds=36, date="2026-01-01",
                                    commit="abc", config={}))  # fmt: skip


def slower_is_worse(config: TrainConfig) -> float:
    """Larger models are better, and a dense rate of 1e-3 of the smallest size is best."""
    width = config.gem_config.mlp_width
    base_rate = config.dense_lr * (width / scaling.SIZES[0].sizes["mlp_width"]) ** 0.5
    return float(0.9 - 0.25 * np.log10(width) + 0.1 * abs(np.log2(base_rate / 1e-3)))


def test_the_slope_is_that_of_the_points_and_the_rate_is_chosen_on_other_days() -> None:
    selection = FakeTrials(slower_is_worse)
    assert scaling.best_base_rate(selection, "GEM") == 1e-3  # type: ignore[arg-type]
    trials = FakeTrials(lambda config: slower_is_worse(config) * (1 + ("dcn" in str(config)) * 0.3))
    result, curves = scaling.scaling_result(selection, trials, 2)  # type: ignore[arg-type]
    slopes = {
        name: np.polyfit([np.log10(flops) for flops, _ in curve], [ne for _, ne in curve], 1)[0]
        for name, curve in curves.items()
    }
    figures = result.figures
    assert figures["slope_gem"] == pytest.approx(1e4 * slopes["GEM"], abs=1e-3)
    assert figures["slope_gem_low"] < figures["slope_gem"] < figures["slope_gem_high"] < 0  # type: ignore[operator]
    assert figures["best_peer"] == "DCNv2" == min(slopes, key=lambda name: slopes[name])
    steeper = 1e4 * (slopes["GEM"] - slopes["DCNv2"])
    assert figures["slope_gem_less_best_peer"] == pytest.approx(steeper, abs=1e-3) and steeper > 0
    assert figures["core_hours"] == pytest.approx((30 + 18) * 36 / 3600)
    study = scaling.study_of(result, curves, 2)
    assert study.curves["HSTU"] == curves["HSTU"]
    assert study.commit == "abc", "that of the trainings"


def test_a_share_trains_its_part_of_the_sweep_and_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: dict[object, list[TrainConfig]] = {scaling.SELECTION_SPLIT: [], scaling.SPLIT: []}

    class Runner:
        def __init__(self, _work: Path, split: DaySplit) -> None:
            self.trained = trained[split]

        def gem(self, config: TrainConfig) -> Trial:
            self.trained.append(config)
            return FakeTrials(slower_is_worse).gem(config)

        def is_finished(self, config: TrainConfig) -> bool:
            return config in self.trained

    monkeypatch.setattr(ablation_trials, "bench_trials", Runner)
    half, all_points = scaling.ScalingArgs(work=Path(), share="1/2"), scaling.sweep_points()
    with pytest.raises(TemporaryError, match="belong to other shares"):
        scaling.bench_scaling(half)
    sweep, final = trained.values()
    assert len(sweep) == len(all_points) // 2 and not final
    scaling.bench_scaling(half.model_copy(update={"share": "2/2"}))
    assert len(set(map(str, sweep))) == len(all_points) and len(final) == 15


def test_the_slope_of_a_curve_less_itself_is_zero() -> None:
    trials = FakeTrials(slower_is_worse)
    curve = scaling.Curve(
        [[trials.gem(scaling.config_of("GEM", size, 1e-3, seed)) for seed in range(2)]
         for size in range(5)]
    )  # fmt: skip
    assert scaling.slope_of([(1, curve), (-1, curve)]).value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", scaling.ARCHITECTURES)
def test_all_sizes_grow_together_and_are_valid_models(name: str) -> None:
    features = feature_schema(load_spec(SIMULATOR_SPEC))
    parameters = []
    for size, larger in pairwise(scaling.SIZES):
        assert all(size.sizes[n] <= larger.sizes[n] for n in size.sizes)
        assert size.max_length < larger.max_length
    for index in range(len(scaling.SIZES)):
        config = scaling.config_of(name, index, 1e-3, 0)
        gem = Gem(features, config.gem_config)
        parameters.append(sum(p.numel() for p in gem.parameters()))
        assert config.passes == 1
    assert parameters == sorted(set(parameters))


def test_kendalls_tau_is_one_for_the_same_order_of_changes_and_minus_one_for_the_reverse() -> None:
    rng = np.random.default_rng(0)
    effect = np.concatenate(([0.0], rng.normal(0, 1, 8)))[:, None]
    noise = rng.gamma(2, 1, (200, 1, 1))
    losses, reversed_losses = noise * (5 + effect), noise * (5 - effect)
    assert agreement.kendall_tau_interval(losses, losses + 1) == pytest.approx((1, 1, 1))
    assert agreement.kendall_tau_interval(losses, reversed_losses)[0] == pytest.approx(-1)
    seeds = losses + rng.normal(0, 3, (200, 9, 2))
    value, low, high = agreement.kendall_tau_interval(seeds, losses)
    assert low <= value <= high and low < high
    figures = agreement.agreement_result({"tiny": seeds, "base": losses}, ("tiny",), 2).figures
    assert figures["tau_tiny_base"] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("seeds", [2, 5])
def test_drawn_means_over_few_seeds_vary_as_much_as_such_means_do(seeds: int) -> None:
    rng = np.random.default_rng(0)
    models, seed_deviation = 40, 3.0
    losses = rng.normal(0, seed_deviation, (200, models, seeds))
    drawn = [agreement.draw_mean_over_seeds(one, rng) - one.mean(1) for one in losses]
    assert np.std(drawn) == pytest.approx(seed_deviation / seeds**0.5, rel=0.1)
    one_seed = losses[0, :, :1]
    np.testing.assert_array_equal(agreement.draw_mean_over_seeds(one_seed, rng), one_seed[:, 0])


def test_ten_changes_are_compared_on_one_pass() -> None:
    assert len(set(agreement.TEN_CHANGES)) == 10
    for name in agreement.TEN_CHANGES:
        config = agreement.config_of(name, "base", 1)
        assert config.passes == 1 and config != agreement.config_of(agreement.DEFAULT, "base", 1)


def test_a_figure_of_no_study_is_null_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_committed("x", {"key": "> 0"}, tmp_path / "absent.json", as_json=True)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["key"] is None and "absent.json is absent" in figures["key_reason"]


@pytest.mark.parametrize(
    "study", [scaling, agreement, ablation, calibration, freshness, portfolio, precision, transfer]
)
def test_studies_print_their_committed_figures(
    study: object, capsys: pytest.CaptureFixture[str]
) -> None:
    name = study.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    assert main(["bench", name, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    result = study.RESULT  # type: ignore[attr-defined]
    committed = json.loads(result.read_text())["figures"] if result.is_file() else {}
    for key in study.GOALS:  # type: ignore[attr-defined]
        assert figures[key] == committed.get(key)
        assert figures[key] is not None or figures[f"{key}_reason"]
        assert (figures[f"{key}_measured"] == "no committed study") == (not committed)


def test_a_part_that_was_measured_at_another_time_has_its_own_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = BenchmarkResult("x", ("figure",))
    result.figures |= {"first": 1.0, "second": 2.0, "second_measured": "2026-01-02 abc: a part"}
    result.save_study(tmp_path / "study.json", "gemline bench something")
    show_committed("x", {"first": "", "second": ""}, tmp_path / "study.json", as_json=True)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["second_measured"] == "2026-01-02 abc: a part"
    assert figures["first_measured"].endswith("gemline bench something")


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ablation", "--work", "w", "--only", "magic"]) == 2
    assert main(["bench", "agreement", "--work", "w", "--only", "magic"]) == 2
    assert "magic" in capsys.readouterr().err


def test_figures_that_a_run_cannot_measure_keep_their_value_and_source(tmp_path: Path) -> None:
    """Of a GPU, for example; a figure that is measured again has the new value and source."""
    path, measured = tmp_path / "study.json", {"loss": 0.5, "speedup": None, "speedup_reason": "no"}
    assert with_unmeasured(measured, path) == measured
    committed = BenchmarkResult("x", ("figure",))
    committed.figures |= {"loss": 0.1, "speedup": 0.77, "sites": 3, "sites_measured": "of a card"}
    committed.save_study(path, "gemline bench x")
    merged = with_unmeasured(measured, path)
    assert str(merged.pop("speedup_measured")).endswith(": gemline bench x")
    assert merged == {"loss": 0.5, "speedup": 0.77, "sites": 3, "sites_measured": "of a card"}
