"""`gemline bench portfolio`: what the proposal of `gemline rank portfolio` saves, and its evidence.

Without `--work` the committed figures are printed. With it, on the frozen logs of `gemline bench
history`; students learn from labels only, and finished trainings are kept in that folder.
"""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro

from benchmarks.harness import BENCH_SIMULATOR, RESULTS, BenchmarkResult
from benchmarks.pipelines import BENCH_DAYS, simulated_tables
from benchmarks.studies.committed import StudyFolder, show_committed
from dags.pipeline import latest_mature_split
from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.spec.units import parse_date_range

if TYPE_CHECKING:
    from ranking.portfolio.proposal import Proposal

GOALS = {"portfolio_flops_saved": ">= 0.2", "filter_features_kept": "<= 0.7"}
RESULT = RESULTS / "portfolio.json"
COLUMNS = ("change", "accepted", "NE, mean of pairs, 1e-4", "the pair that is closest to a loss")


class PortfolioBenchArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_portfolio(args: PortfolioBenchArgs) -> None:
    """FLOPs that a proposed portfolio of rankers saves, and the features that it keeps (long)."""
    if args.work is None:
        show_committed("Portfolio", GOALS, RESULT, args.as_json)
        return
    from benchmarks.studies.trials import symlinked_lake
    from etl.tables.lake import Lake
    from ranking.portfolio.proposal import proposal_lines, propose
    from ranking.student.config import StudentTrainConfig

    paths = simulated_tables(args.work, BENCH_SIMULATOR, BENCH_DAYS)
    spec = load_spec(paths.spec)
    split = latest_mature_split(spec, *parse_date_range(BENCH_DAYS))
    lake = symlinked_lake(Lake(paths.lake, spec), args.work.resolve() / "portfolio")
    proposal = propose(lake, split, StudentTrainConfig(), partial(print, flush=True))
    result = result_table(proposal)
    print("\n".join(proposal_lines(proposal)))
    result.show(args.as_json)
    result.save_study(RESULT, "gemline bench portfolio --work work/bench")


def result_table(proposal: "Proposal") -> BenchmarkResult:
    """The changes that were tried, and the figures."""
    result = BenchmarkResult("Portfolio of the bench data, students of labels only", COLUMNS)
    for change in proposal.changes:
        verdict = "yes" if change.is_accepted else "no"
        mean = f"{1e4 * change.comparison.mean:+.0f}"
        result.rows.append((change.text, verdict, mean, change.comparison.worst))
    on_test_days = f"{1e4 * proposal.test.mean:+.0f}", proposal.test.worst
    result.rows.append(("the proposal against a ranker per surface, test day", "", *on_test_days))
    losers = ", ".join(map(str, proposal.test.losers))
    result.record("portfolio_flops_saved", proposal.saved, "")
    result.record("portfolio_flops_saved_to_pairs", proposal.saved_to_pairs, "")
    result.record("filter_features_kept", proposal.kept_features, "")
    result.figures |= {
        "pairs_that_lose_on_test_days": losers or "none",
        "models": len(proposal.portfolio.designs),
        "left_out": ", ".join(proposal.dropped) or "nothing",
    }
    return result
