"""`gemline bench transfer`: how much of what GEM knows reaches the small models?

Simulator's bench data, students of one size on all surfaces. Long; every finished training is kept
in `--work`, and the study goes on from there. What is to be chosen, the weight of plain
distillation and the ratio of the auxiliary head's gradient, is chosen on days before those
reported. The table goes to benchmarks/results/transfer.json.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.result import Result
from etl.errors import UserError
from etl.spec.base import Strict
from training.study import Study

if TYPE_CHECKING:
    from benchmarks.transfer.ratio import Ratios
    from benchmarks.transfer.trials import Trials

RESULTS = Path(__file__).parents[1] / "results" / "transfer.json"
BEST = "all"
COLUMNS = ("student", "long_view", "click", "conversion", "transfer ratio [95 %]", "to plain")


class TransferArgs(Strict):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder of `gemline bench history`")]
    seeds: int = Field(default=5, ge=1)
    part: Annotated[
        str, tyro.conf.arg(help="train only a part of what is missing, 1/2 or 2/2, and stop")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False

    @property
    def which(self) -> tuple[int, int]:
        """Number of the part, and of how many; raises UserError where it is none of them."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.part)
        number, parts = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= parts:
            raise UserError(f"--part {self.part}: write 1/2 and 2/2 for two halves")
        return number, parts


def bench(args: TransferArgs) -> None:
    """Transfer ratios of distillation, representations and sharing, with controls (long)."""
    from benchmarks.transfer.ratio import ratios
    from benchmarks.transfer.trials import Trials

    number, parts = args.which
    trials = Trials.of(args.work)
    variants = trials.variants()
    for place, (name, seed) in enumerate((n, s) for s in range(args.seeds) for n in variants):
        if place % parts == number - 1:
            trials.student(variants[name], seed)
    if parts > 1:
        return
    found = {n: [trials.student(v, s) for s in range(args.seeds)] for n, v in variants.items()}
    measured = ratios(found, trials.gem(), trials.objectives)
    result = table(measured, trials)
    result.show(args.as_json)
    Study(
        title=result.title,
        command=f"gemline bench transfer --work work/bench --seeds {args.seeds}",
        columns=tuple(result.columns),
        rows=tuple(result.rows),
    ).keep(RESULTS)


def table(measured: "Ratios", trials: "Trials") -> Result:
    """NE by objective, each configuration's share of GEM's gain, and the figures."""
    from benchmarks.transfer.cost import costs

    result = Result("NE on the test day, all surfaces, and shares of GEM's gain", COLUMNS)
    for name, ne in measured.ne.items():
        share, plain = measured.of_teacher.get(name), measured.to_plain.get(name)
        told = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" if r else "" for r in (share, plain)]
        result.rows.append((name, *(f"{x:.4f}" for x in ne), *told))
    crossed = "the interval of what it is divided by holds zero"
    best, plain = measured.of_teacher.get(BEST), measured.to_plain.get(BEST)
    result.take("transfer_ratio_to_plain", plain.value if plain else None, crossed)
    result.take("transfer_ratio_to_plain_low", plain.low if plain else None, crossed)
    result.take("gain_kept", best.value if best else None, crossed)
    worst = trials.worst_calibration(measured.kept[BEST])
    result.take("calibration_worst", worst, "the logs tell no true probabilities")
    result.figures |= {"chosen": trials.told(), "mflop_an_example": costs(trials)}
    return result
