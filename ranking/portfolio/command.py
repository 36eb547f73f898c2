"""The command `gemline rank portfolio`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from etl.cli.runner import holds_leases
from etl.errors import UserError
from etl.tables import atomic_io
from ranking.student.config import StudentTrainConfig
from training.commands import SplitArgs


class PortfolioArgs(SplitArgs):
    """Propose which objectives share a ranker, which features it reads, and its sizes."""

    proposed_spec: Annotated[
        Path | None, tyro.conf.arg(help="file to write the spec without the dropped features to")
    ] = None


@holds_leases("portfolio")
def portfolio(args: PortfolioArgs) -> None:
    """Propose which objectives share a ranker, which features it reads, and its sizes (long).

    Students learn from labels alone. Predictions of trained groups are kept in the lake, so that a
    run continues where it was stopped; only the trainings of the probe and of the importances of
    features are repeated.
    """
    from ranking.portfolio.proposal import proposal_lines, propose
    from training.evaluation.feature_units import drop_units

    print_line = partial(print, flush=True)
    if args.proposed_spec:
        _check_proposed_spec(args.proposed_spec, args.spec)
    proposal = propose(args.open_lake(), args.split, StudentTrainConfig(), print_line)
    print("\n".join(proposal_lines(proposal)))
    if args.proposed_spec:
        content = drop_units(yaml.safe_load(args.spec.read_text()), proposal.dropped)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        atomic_io.write_text(args.proposed_spec, text)
        print(f"proposed spec: {args.proposed_spec}")


def _check_proposed_spec(path: Path, spec: Path) -> None:
    """Raise UserError, before the long study, if the proposed spec cannot be written to a file."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--proposed-spec {path}: name a file in an existing folder")
    if path.exists() and path.samefile(spec):
        raise UserError(f"--proposed-spec {path} is the spec itself: name another file")
