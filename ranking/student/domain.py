"""The model of a domain: a student of several surfaces, from which their rankers begin.

It learns from GEM as a ranker does, from the rows of all its surfaces: GEM -> domain model ->
ranker.
"""

from datetime import date

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.place import Place, place
from ranking.student.trained import TrainedStudent
from training.data.reader import Reader

SIZED = ("student.user_layer.", "student.row_layer.", "student.hidden.", "student.head.")
Told = dict[str, str]


def path_of(lake: Lake, name: str, day: date) -> Place:
    """Where the model of a domain that was trained until a day lies."""
    return place(lake.root, "models", "domains", name, f"{day}.safetensors")


def keep(reader: Reader, name: str, day: date, model: TrainedStudent) -> Place:
    """Write what rankers begin from, and what it has read."""
    path = path_of(reader.lake, name, day)
    with atomic_io.replace_file(path) as temporary:
        save_file(_state(model), temporary, _read(reader, name))
    return path


def of_surface(reader: Reader, day: date) -> dict[str, Tensor]:
    """What the domain of a reader's surface had learned when a day ended, and nothing later.

    Raises UserError where there is no domain, or no such model of it that reads the same.
    """
    (surface,) = reader.surfaces
    name = reader.lake.spec.domain_of(surface)
    if name is None:
        raise UserError(f"no domain holds {surface}: name it under `domains` of the spec")
    path = path_of(reader.lake, name, day)
    if not path.is_file():
        raise UserError(
            f"no model of domain {name} was trained until {day}: run `gemline rank domain` first"
        )
    try:
        with safe_open(download(path), "pt") as kept:
            told = kept.metadata() or {}
            found = {key: kept.get_tensor(key) for key in kept.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError:
        raise UserError(f"{path} is damaged; run `gemline rank domain` again") from None
    for what, now in _read(reader, name).items():
        if told.get(what) != now:
            raise UserError(
                f"{path} was trained with {what} {told.get(what)}, now it is {now}: run `gemline "
                "rank domain` again"
            )
    return found


@torch.no_grad()
def begin(student: TrainedStudent, domain: dict[str, Tensor]) -> None:
    """Take over tables, event encoder, attention, recency and scales; layers only of one size.

    Raises UserError where rows or events have other sizes.
    """
    for name, mine in _state(student).items():
        theirs = domain.get(name)
        same = theirs is not None and theirs.shape == mine.shape
        if not same and not name.startswith(SIZED):
            raise UserError(f"{name} is of another size in the domain's model: train it alike")
        if theirs is not None and same:
            mine.copy_(theirs)


def _state(model: TrainedStudent) -> dict[str, Tensor]:
    parts = {"student": model.student, "tables": model.tables}
    return {f"{p}.{key}": x for p, part in parts.items() for key, x in part.state_dict().items()}


def _read(reader: Reader, name: str) -> Told:
    """What the model of a domain reads, so that it is not mistaken for another."""
    spec = reader.lake.spec
    return {
        "spec": spec.hash,
        "surfaces": ", ".join(spec.domains[name]),
        "match": ", ".join(spec.match),
        "sequence": reader.sequence,
        "events": ", ".join(reader.events),
    }
