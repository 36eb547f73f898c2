"""Parts of GEM that a student starts with."""

from typing import get_args

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.inputs import ITEM, USER
from ranking.student.config import Part, TransferConfig
from ranking.student.trained import TrainedStudent
from training.loop.checkpoint import Trained
from training.parallel.sparse import parts_of


@torch.no_grad()
def share(student: TrainedStudent, gem: Trained, config: TransferConfig) -> None:
    """Copy parts of GEM into a student; `frozen` ones learn nothing more.

    Raises UserError where parts are named and the student's sizes are not GEM's.
    """
    odd = misfit(student, gem)
    if odd and config.share:
        raise UserError(odd)
    parts: tuple[str, ...] = get_args(Part) if config.share is None else config.share
    if odd or not parts:
        return
    own, core = student.student, gem.model.core
    if "tables" in parts:
        _copy_tables(student, gem, config.shuffled)
        student.tables.requires_grad_(not config.frozen)
    modules: list[tuple[str, nn.Module, nn.Module]] = [
        ("events", own.events, core.history.events),
        ("recency", own.recency, core.history.recency),
    ]
    for name, mine, theirs in modules:
        if name in parts:
            mine.load_state_dict(theirs.state_dict())
            mine.requires_grad_(not config.frozen)


def misfit(student: TrainedStudent, gem: Trained) -> str | None:
    """What keeps a student from sharing parts of a GEM."""
    sizes, own = gem.manifest.training.sizes, student.student.config
    for what, mine, theirs in (
        ("row width", own.row_width, sizes.row_width),
        ("event width", own.event_width, sizes.event_width),
        ("rows of users", own.user_rows, sizes.user_rows),
    ):
        if mine != theirs:
            return f"a student of {what} {mine} cannot share parts of a GEM of {theirs}"
    return None


def _copy_tables(student: TrainedStudent, gem: Trained, shuffled: bool) -> None:
    """Rows by id; an item's row of the ring becomes the row of its index."""
    for key, weight in student.tables.state_dict().items():
        name = key.split(".")[-2]
        ids = torch.arange(len(weight))
        rows = _rows(gem, name)[gem.model.items(ids) if name == ITEM else ids]
        if shuffled and name in (ITEM, USER):
            rows = rows[torch.randperm(len(rows))]
        weight.copy_(rows)


def _rows(gem: Trained, name: str) -> Tensor:
    (weight,) = (w for key, w in gem.tables.state_dict().items() if key.split(".")[-2] == name)
    ((_, rows),) = parts_of(weight)
    return rows
