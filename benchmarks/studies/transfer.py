"""`gemline bench transfer`: the share of GEM's gain over labels only that students reach.

Without `--work` the committed figures are printed. With it, a long study runs on the tables of
`gemline bench history` in that folder: students of one size on all surfaces of the simulator's
bench data. Finished trainings are kept there, and the study resumes from them. Hyperparameters (the
weight of plain distillation and the gradient ratio of the auxiliary head) are selected on days
before the reported ones. The table is saved to benchmarks/results/transfer.json.
"""

import re
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult
from benchmarks.studies.committed import StudyFolder, show_committed
from etl.errors import UserError
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.student_trials import TransferTrials
    from benchmarks.studies.transfer_ratios import TransferRatios

BEST_VARIANT = "all"
GOALS = {
    "transfer_ratio_to_plain": ">= 2",
    "transfer_ratio_to_plain_low": "> 1",
    "gain_kept": ">= 0.65",
    "conversion_gain_kept": ">= 0.5",
    "representation_gain_low": "> 0",
    "calibration_worst": "",
}
RESULT = RESULTS / "transfer.json"


class TransferArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    seeds: int = Field(default=5, ge=1)
    part: Annotated[
        str, tyro.conf.arg(help="run only a part of the missing trainings and stop: 1/2 or 2/2")
    ] = "1/1"
    hierarchical: Annotated[
        bool, tyro.conf.arg(help="also students that start or learn from the models of domains")
    ] = False
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False

    @property
    def part_number(self) -> tuple[int, int]:
        """The part, from 1, and the number of parts. Raises UserError if the text is not valid."""
        match = re.fullmatch(r"(\d+)/(\d+)", self.part)
        number, parts = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= parts:
            raise UserError(f"--part {self.part}: write 1/2 and 2/2 for two halves")
        return number, parts


def bench(args: TransferArgs) -> None:
    """Transfer ratios of distillation, representations and sharing, with controls (long)."""
    number, parts = args.part_number
    if args.work is None:
        show_committed("Transfer", GOALS, RESULT, args.as_json)
        return
    from benchmarks.studies.student_trials import TransferTrials
    from benchmarks.studies.transfer_ratios import transfer_ratios

    trials = TransferTrials.of(args.work)
    variants = trials.variants() | (trials.hierarchical_variants() if args.hierarchical else {})
    trainings = [(name, seed) for seed in range(args.seeds) for name in variants]
    for name, seed in trainings[number - 1 :: parts]:
        trials.student_predictions(variants[name], seed)
    if parts > 1:
        return
    predictions = {
        name: [trials.student_predictions(change, seed) for seed in range(args.seeds)]
        for name, change in variants.items()
    }
    ratios = transfer_ratios(predictions, trials.gem_predictions(), trials.objectives)
    result = result_table(ratios, trials)
    worst = trials.worst_calibration(predictions[BEST_VARIANT])
    result.record("calibration_worst", worst, "the logs have no true probabilities")
    result.show(args.as_json)
    command = f"gemline bench transfer --work work/bench --seeds {args.seeds}"
    command += " --hierarchical" if args.hierarchical else ""
    result.save_study(RESULT, command)


def result_table(ratios: "TransferRatios", trials: "TransferTrials") -> BenchmarkResult:
    """NE by objective and each variant's share of GEM's gain, and the figures."""
    from benchmarks.studies.student_costs import mflop_per_example

    columns = ("student", *trials.objectives, "transfer ratio [95 %]", "to plain")
    result = BenchmarkResult("NE on the test day, all surfaces, and shares of GEM's gain", columns)
    for name, ne in ratios.ne.items():
        intervals = (ratios.share_of_gem_gain.get(name), ratios.ratio_to_plain.get(name))
        cells = [f"{i.value:.2f} [{i.low:.2f}, {i.high:.2f}]" if i else "" for i in intervals]
        result.rows.append((name, *(f"{x:.4f}" for x in ne), *cells))
    reason = "the interval of the denominator contains zero"
    share = ratios.share_of_gem_gain.get(BEST_VARIANT)
    to_plain = ratios.ratio_to_plain.get(BEST_VARIANT)
    result.record("transfer_ratio_to_plain", to_plain.value if to_plain else None, reason)
    result.record("transfer_ratio_to_plain_low", to_plain.low if to_plain else None, reason)
    result.record("gain_kept", share.value if share else None, reason)
    for objective, kept in ratios.kept_by_objective(BEST_VARIANT).items():
        result.record(f"{objective}_gain_kept", kept.value if kept else None, reason)
    gain = ratios.gain_over("representation", "representation, shuffled")
    result.record("representation_gain", gain.value, "")
    result.record("representation_gain_low", gain.low, "")
    result.figures |= {
        "chosen": trials.selected_options(),
        "mflop_an_example": mflop_per_example(trials),
    }
    return result
