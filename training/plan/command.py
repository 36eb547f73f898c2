"""`gemline train plan`."""

import re
from pathlib import Path
from typing import Annotated

import tyro

from etl.errors import UserError
from etl.spec.base import Strict
from training.plan.scenario import load_scenario


class PlanArgs(Strict):
    """What is trained on what, and on how many GPUs."""

    scenario: Annotated[Path, tyro.conf.arg(help="a YAML file such as conf/plans/exfm.yaml")]
    gpus: Annotated[str, tyro.conf.arg(help="numbers of them: 8,64,512,4096")]

    @property
    def counts(self) -> list[int]:
        """The numbers; raises UserError where they are none."""
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.gpus):
            raise UserError(f"--gpus {self.gpus}: write whole numbers, as in 8,64,512,4096")
        return [int(count) for count in self.gpus.split(",")]


def plan(args: PlanArgs) -> None:
    """Memory, step time and scaling on more GPUs, by how the tables are spread; on paper."""
    from rich.console import Console

    from training.plan.table import planned

    table, advice = planned(load_scenario(args.scenario), args.counts)
    Console().print(table)
    for sentence in advice:
        print(sentence)
