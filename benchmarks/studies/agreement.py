"""`gemline bench agreement`: whether small models rank changes of GEM like large ones.

The changes of `gemline bench ablation` at two scales: Kendall's tau between their differences of
NE, with a bootstrap interval over users. A long, resumable study.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult
from benchmarks.studies.ablation import (
    CHANGES,
    OBJECTIVE,
    predictions_of_change,
    prepare_trials,
)
from dags.commands import Scale
from etl.errors import UserError
from etl.spec.base import StrictModel
from training.config import TrainConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from benchmarks.studies.trials import TrialRunner

    Floats = npt.NDArray[np.float64]

RESAMPLES = 500


class AgreementArgs(StrictModel):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder of `gemline bench ablation`")]
    small_scale: Scale = "tiny"
    large_scale: Scale = "base"
    seeds: int = Field(default=3, ge=1)
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="only these changes")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_agreement(args: AgreementArgs) -> None:
    """Kendall's tau between two scales' orders of GEM's changes (long; resumable)."""
    names = args.only or tuple(CHANGES)
    unknown = sorted(set(names) - set(CHANGES))
    if unknown or len(names) < 3:
        raise UserError(
            f"--only needs three changes or more of {', '.join(CHANGES)}"
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
        )
    trials = prepare_trials(args.work)
    small_losses, large_losses = (
        user_logloss(trials, scale, args.seeds, names)
        for scale in (args.small_scale, args.large_scale)
    )
    tau, low, high = kendall_tau_interval(small_losses, large_losses)
    result = BenchmarkResult(
        f"Changes of GEM at {args.small_scale} and at {args.large_scale}, {args.seeds} seeds",
        ("changes", "Kendall's tau", "95 %"),
    )
    result.rows.append((str(len(names)), f"{tau:.2f}", f"{low:.2f} to {high:.2f}"))
    for key, value in (("tau", tau), ("tau_low", low), ("tau_high", high)):
        result.record(key, value, "all changes are equal")
    result.show(args.as_json)


def user_logloss(trials: "TrialRunner", scale: Scale, seeds: int, names: Sequence[str]) -> "Floats":
    """Logloss by user, mean over seeds (U, 1 + changes): of the default, then of each change."""
    import numpy as np

    from training.evaluation.bootstrap import sums_by_user

    configs = [TrainConfig(scale=scale, seed=seed) for seed in range(seeds)]
    models = [[trials.gem_all_surfaces(config) for config in configs]]
    models += [predictions_of_change(trials, name, configs) for name in names]
    return np.stack([sums_by_user(model, OBJECTIVE)[:, :-2].mean(1) for model in models], 1)


def kendall_tau_interval(
    small_losses: "Floats", large_losses: "Floats", seed: int = 0
) -> tuple[float, float, float]:
    """Kendall's tau between two scales' losses (U, 1 + changes), and its 95 % bounds."""
    import numpy as np

    users = len(small_losses)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(users, np.full(users, 1 / users), RESAMPLES)
    resampled = [kendall_tau(drawn @ small_losses, drawn @ large_losses) for drawn in weights]
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return kendall_tau(small_losses.sum(0), large_losses.sum(0)), float(low), float(high)


def kendall_tau(small_losses: "Floats", large_losses: "Floats") -> float:
    """Kendall's tau between the scales' loss differences from the default, of (1 + changes)."""
    from scipy.stats import kendalltau

    small_effects = small_losses[1:] - small_losses[0]
    large_effects = large_losses[1:] - large_losses[0]
    return float(kendalltau(small_effects, large_effects).statistic)
