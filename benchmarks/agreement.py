"""`gemline bench agreement`: do small models order changes as large ones do?

The changes of `gemline bench ablation` at two scales: Kendall's tau of their differences of NE, and
its interval over users drawn with replacement. Long; it goes on where it was stopped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import tyro
from pydantic import Field
from scipy.stats import kendalltau

from benchmarks.ablation import CHANGES, OBJECTIVE, changed, tables
from benchmarks.result import Result
from dags.commands import Scale
from etl.errors import UserError
from etl.spec.base import Strict
from training.config import TrainConfig

if TYPE_CHECKING:
    from training.trials import Trials

RESAMPLES = 500
Floats = npt.NDArray[np.float64]


class AgreementArgs(Strict):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder of `gemline bench ablation`")]
    light: Scale = "tiny"
    heavy: Scale = "base"
    seeds: int = Field(default=3, ge=1)
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="some of the changes")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: AgreementArgs) -> None:
    """Kendall's tau between two scales' orders of GEM's changes (long; resumable)."""
    names = args.only or tuple(CHANGES)
    unknown = sorted(set(names) - set(CHANGES))
    if unknown or len(names) < 3:
        raise UserError(
            f"--only needs three changes or more of {', '.join(CHANGES)}"
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
        )
    trials = tables(args.work)
    light, heavy = (losses(trials, s, args.seeds, names) for s in (args.light, args.heavy))
    tau, low, high = agreement(light, heavy)
    result = Result(
        f"Changes of GEM at {args.light} and at {args.heavy}, {args.seeds} seeds",
        ("changes", "Kendall's tau", "95 %"),
    )
    result.rows.append((str(len(names)), f"{tau:.2f}", f"{low:.2f} to {high:.2f}"))
    for key, value in (("tau", tau), ("tau_low", low), ("tau_high", high)):
        result.take(key, value, "all changes are equal")
    result.show(args.as_json)


def losses(trials: "Trials", scale: Scale, seeds: int, names: Sequence[str]) -> Floats:
    """Logloss by user, means over seeds (U, 1 + changes): of the default, then of each change."""
    from training.loop.paired import by_user

    configs = [TrainConfig(scale=scale, seed=seed) for seed in range(seeds)]
    runs = [[trials.pooled(config) for config in configs]]
    runs += [changed(trials, name, configs) for name in names]
    return np.stack([by_user(found, OBJECTIVE)[:, :-2].mean(1) for found in runs], 1)


def agreement(light: Floats, heavy: Floats, seed: int = 0) -> tuple[float, float, float]:
    """Kendall's tau of two scales' losses (U, 1 + changes), and its bounds."""
    users = len(light)
    drawn = np.random.default_rng(seed).multinomial(users, np.full(users, 1 / users), RESAMPLES)
    found = [tau(row @ light, row @ heavy) for row in drawn]
    low, high = np.nanquantile(found, (0.025, 0.975))
    return tau(light.sum(0), heavy.sum(0)), float(low), float(high)


def tau(light: Floats, heavy: Floats) -> float:
    """Of the losses (1 + changes) of two scales: of what each change adds to the default's."""
    return float(kendalltau(light[1:] - light[0], heavy[1:] - heavy[0]).statistic)
