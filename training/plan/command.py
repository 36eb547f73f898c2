"""The command `gemline train plan`."""

import re
from pathlib import Path
from typing import Annotated

import tyro

from etl.errors import UserError
from etl.spec.base import StrictModel
from training.plan.cost_model import load_scenario


class PlanArgs(StrictModel):
    """Arguments of `gemline train plan`."""

    scenario: Annotated[Path, tyro.conf.arg(help="a YAML file such as conf/plans/exfm.yaml")]
    gpus: Annotated[str, tyro.conf.arg(help="numbers of GPUs to compare: 8,64,512,4096")]

    @property
    def gpu_counts(self) -> list[int]:
        """The numbers of GPUs. Raises UserError if they are not whole numbers."""
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.gpus):
            raise UserError(f"--gpus {self.gpus}: write whole numbers, as in 8,64,512,4096")
        return [int(count) for count in self.gpus.split(",")]


def plan(args: PlanArgs) -> None:
    """Estimate memory, step time and scaling on more GPUs, by sharding scheme of the tables."""
    from rich.console import Console

    from training.plan.table import plan_table

    table, recommendations = plan_table(load_scenario(args.scenario), args.gpu_counts)
    Console().print(table)
    for recommendation in recommendations:
        print(recommendation)
