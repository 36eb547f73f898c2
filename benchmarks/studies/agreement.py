"""`gemline bench agreement`: whether smaller models rank changes of GEM as `base` does.

Without `--work` the committed figures are printed. With it, a long study runs on the frozen logs of
`gemline bench history`: ten changes at each scale, about 100,000 training rows, one pass; finished
trainings are kept in that folder. Kendall's tau is between the differences of NE from the default.

U users, M models (the default, then the changes), S seeds.
"""

from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from benchmarks.studies.model_changes import CHANGES
from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit
from training.config import TrainConfig
from training.model.config import Scale

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.studies.trials import TrialRunner
    from etl.array_types import Float64


OBJECTIVE = "click"
DEFAULT = "default"
REFERENCE: Scale = "base"
TEN_CHANGES = (
    "Wukong alone",
    "Wukong: static projection",
    "DCNv2",
    "plain (MLP)",
    "rows of users",
    "flow: sole",
    "flow: int",
    "HSTU layers",
    "no history",
    "32 events",
)
SPLIT = DaySplit(
    train_first=date(2026, 1, 8),
    train_last=date(2026, 1, 11),
    calibration=None,
    test_first=date(2026, 1, 12),
    test_last=date(2026, 1, 12),
    data_until=date(2026, 1, 14),
)
RESAMPLES = 500
GOALS = {"tau_small_base": ">= 0.75", "tau_tiny_base": ""}
RESULT = RESULTS / "agreement.json"


class AgreementArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    scales: Annotated[
        tuple[Scale, ...], tyro.conf.arg(help=f"scales that are compared with {REFERENCE}")
    ] = ("tiny", "small")
    seeds: int = Field(default=2, ge=1)
    only: Annotated[
        tuple[str, ...], tyro.conf.arg(help="only these changes; the study is then not saved")
    ] = ()
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_agreement(args: AgreementArgs) -> None:
    """Kendall's tau between the scales' orders of GEM's changes (long; resumable)."""
    names = args.only or TEN_CHANGES
    unknown = sorted(set(names) - set(CHANGES))
    if unknown or len(names) < 3:
        raise UserError(
            f"--only needs three changes or more of {', '.join(CHANGES)}"
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
        )
    if args.work is None:
        show_committed("Agreement of scales", GOALS, RESULT, args.as_json)
        return
    from benchmarks.studies.ablation_trials import bench_trials

    trials, scales = bench_trials(args.work, SPLIT), (*args.scales, REFERENCE)
    runs = [(name, scale, seed) for scale in scales for seed in range(args.seeds)
            for name in (DEFAULT, *names)]  # fmt: skip
    for run in share_of(runs, args.share):
        trials.gem(config_of(*run))
    if args.share != "1/1":
        return
    losses = {scale: user_logloss(trials, scale, args.seeds, names) for scale in scales}
    result = agreement_result(losses, args.scales, args.seeds)
    records = [trials.gem(config_of(*run)).record for run in runs]
    result.figures["core_hours"] = round(sum(r.core_seconds for r in records) / 3600, 2)
    result.show(args.as_json)
    if not args.only and {"tiny", "small"} <= set(args.scales):
        command = f"gemline bench agreement --work work/bench --seeds {args.seeds}"
        trained_at = {f"{record.date} {record.commit}" for record in records}
        result.save_study(RESULT, command, trained_at=trained_at)


def config_of(name: str, scale: Scale, seed: int) -> TrainConfig:
    """The configuration of a change at a scale."""
    config = TrainConfig(scale=scale, seed=seed)
    change = {} if name == DEFAULT else CHANGES[name]["simulated"]
    return TrainConfig.model_validate(config.model_dump() | change | {"passes": 1})


def user_logloss(
    trials: "TrialRunner", scale: Scale, seeds: int, names: tuple[str, ...]
) -> "Float64":
    """Sums of logloss by user (U, M, S)."""
    import numpy as np

    from training.evaluation.predictions import sums_by_user

    by_seed = []
    for seed in range(seeds):
        models = [
            trials.gem_all_surfaces(config_of(name, scale, seed)) for name in (DEFAULT, *names)
        ]
        by_seed.append(sums_by_user(models, OBJECTIVE)[:, :-2])
    return np.stack(by_seed, -1)


def agreement_result(
    losses: "Mapping[Scale, Float64]", scales: tuple[Scale, ...], seeds: int
) -> BenchmarkResult:
    """Kendall's tau of each scale with REFERENCE."""
    changes = losses[REFERENCE].shape[1] - 1
    result = BenchmarkResult(
        f"{changes} changes of GEM in order of NE, {seeds} seeds: agreement with {REFERENCE}",
        ("scale", "Kendall's tau", "95 %"),
    )
    for scale in scales:
        tau, low, high = kendall_tau_interval(losses[scale], losses[REFERENCE])
        result.rows.append((scale, f"{tau:.2f}", f"{low:.2f} to {high:.2f}"))
        for suffix, value in (("", tau), ("_low", low), ("_high", high)):
            result.record(f"tau_{scale}_{REFERENCE}{suffix}", value, "all changes are equal")
    return result


def kendall_tau_interval(
    small_losses: "Float64", large_losses: "Float64", seed: int = 0
) -> tuple[float, float, float]:
    """Kendall's tau between two scales' losses (U, M, S), and its 95 % bounds.

    Users are drawn with replacement for both scales together; to the mean over seeds the noise of
    such a mean is added, for each scale and model.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    users = len(small_losses)
    resampled = []
    for _ in range(RESAMPLES):
        weights = rng.multinomial(users, np.full(users, 1 / users))
        drawn = [
            draw_mean_over_seeds(np.einsum("u,ums->ms", weights, losses), rng)
            for losses in (small_losses, large_losses)
        ]
        resampled.append(kendall_tau(*drawn))
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    tau = kendall_tau(small_losses.sum(0).mean(-1), large_losses.sum(0).mean(-1))
    return tau, float(low), float(high)


def draw_mean_over_seeds(losses: "Float64", rng: "np.random.Generator") -> "Float64":
    """Losses (M, S) to their mean (M) over S seeds, with noise as large as that of the mean.

    The noise has Student's t distribution, with the variance over seeds pooled over the models:
    seeds that are drawn with replacement would understate it by (S - 1) / S. With one seed the
    noise of seeds is unknown, and left out.
    """
    import numpy as np

    models, seeds = losses.shape
    mean, degrees = np.asarray(losses.mean(1)), models * (seeds - 1)
    if not degrees:
        return mean
    variance = losses.var(1, ddof=1).mean() / seeds
    scale = np.sqrt(variance * degrees / rng.chisquare(degrees))
    return np.asarray(mean + scale * rng.normal(size=models))


def kendall_tau(small_losses: "Float64", large_losses: "Float64") -> float:
    """Kendall's tau between the scales' loss differences from the default, of losses (M)."""
    from scipy.stats import kendalltau

    small_effects = small_losses[1:] - small_losses[0]
    large_effects = large_losses[1:] - large_losses[0]
    return float(kendalltau(small_effects, large_effects).statistic)
