"""The commands of this folder. torch is imported when a command is called."""

from typing import Annotated

import tyro

from etl.cli import DayArgs, LakeArgs
from etl.errors import UserError
from etl.spec import DataSpec
from ranking.student.config import StudentTraining
from training.commands import SplitArgs


class SurfaceArgs(SplitArgs, StudentTraining):
    """A surface, the days of its ranker, and how it is trained."""

    surface: Annotated[str, tyro.conf.arg(help="a surface of the spec that carries ads")]


class ScoreArgs(DayArgs):
    """A surface, and the days to score."""

    surface: Annotated[str, tyro.conf.arg(help="a surface of the spec that carries ads")]


class ReportArgs(SplitArgs):
    """What the report is about."""

    raw: Annotated[str, tyro.conf.arg(help="folder of the raw logs, for the simulator's truth")]


class ExplainArgs(LakeArgs):
    """One impression."""

    impression: tyro.conf.Positional[str]


def train(args: SurfaceArgs) -> None:
    """Train a surface's student with and without GEM, calibrate it, save the ranker."""
    from ranking.train import train_ranker

    lake = args.open_lake()
    check_surface(lake.spec, args.surface)
    config = StudentTraining.model_validate(
        args.model_dump(include={*StudentTraining.model_fields})
    )
    folder = train_ranker(lake, args.surface, args.split, config)
    print(f"ranker of {args.surface}: {folder}")


def score(args: ScoreArgs) -> None:
    """Write what a surface's ranker gives every candidate of some days."""
    from ranking.score import score_days

    lake = args.open_lake()
    check_surface(lake.spec, args.surface)
    print(f"scores of {args.surface}: {score_days(lake, args.surface, args.span):,} candidates")


def report(args: ReportArgs) -> None:
    """Write what happened to one HTML file."""
    from ranking.report.build import build_report

    print(f"report: {build_report(args.open_lake(), args.raw, args.split)}")


def explain(args: ExplainArgs) -> None:
    """Print all that is known of one impression."""
    from ranking.explain import explain as page

    print(page(args.open_lake(), args.impression))


def check_surface(spec: DataSpec, surface: str) -> None:
    """Raises UserError unless the surface carries ads."""
    if surface not in spec.ad_surfaces:
        raise UserError(f"no ads on surface {surface!r}; known: {', '.join(spec.ad_surfaces)}")


COMMANDS = {"rank": {"train": train, "score": score}, "report": report, "explain": explain}
