"""The model of a domain: a student of several surfaces, from which their rankers begin.

It learns from GEM as a ranker does, from the rows of all its surfaces: GEM -> domain model ->
ranker.
"""

from datetime import date
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from etl.errors import UserError
from etl.tables import whole
from etl.tables.lake import Lake
from ranking.student.trained import TrainedStudent


def place(lake: Lake, name: str, day: date) -> Path:
    """Where the model of a domain that was trained until a day lies."""
    return Path(lake.root, "models", "domains", name, f"{day}.safetensors")


def keep(lake: Lake, name: str, day: date, model: TrainedStudent) -> Path:
    """Write what rankers begin from."""
    path = place(lake, name, day)
    with whole.file(path) as beside:
        save_file(_state(model), beside, {"spec": lake.spec.hash})
    return path


def of_surface(lake: Lake, surface: str, day: date) -> dict[str, Tensor]:
    """What the domain of a surface had learned when a day ended, and nothing later.

    Raises UserError where there is no domain, or no such model of it.
    """
    name = lake.spec.domain_of(surface)
    if name is None:
        raise UserError(f"no domain holds {surface}: name it under `domains` of the spec")
    path = place(lake, name, day)
    if not path.is_file():
        raise UserError(
            f"no model of domain {name} was trained until {day}: run `gemline rank domain` first"
        )
    with safe_open(path, "pt") as kept:
        if (spec := kept.metadata()["spec"]) != lake.spec.hash:
            raise UserError(f"{path} was trained under spec {spec}, now it is {lake.spec.hash}")
        return {key: kept.get_tensor(key) for key in kept.keys()}  # noqa: SIM118 (no mapping)


@torch.no_grad()
def begin(student: TrainedStudent, domain: dict[str, Tensor]) -> None:
    """Take over what has the same name and size."""
    for name, mine in _state(student).items():
        theirs = domain.get(name)
        if theirs is not None and theirs.shape == mine.shape:
            mine.copy_(theirs)


def _state(model: TrainedStudent) -> dict[str, Tensor]:
    parts = {"student": model.student, "tables": model.tables}
    return {f"{p}.{key}": x for p, part in parts.items() for key, x in part.state_dict().items()}
