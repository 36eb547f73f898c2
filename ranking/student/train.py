"""Training a surface's student: from labels, and from what GEM knows."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

from etl.spec.units import each_day
from etl.tables.lake import Lake
from ranking.student import domain
from ranking.student.config import StudentTraining
from ranking.student.share import share
from ranking.student.teacher import Teacher
from ranking.student.trained import TrainedStudent, new_student
from ranking.student.transfer import Transfer
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.thinning import Thinning
from training.gem import load_trained
from training.knowledge.earlier import Earlier
from training.loop.average import averaged
from training.loop.checkpoint import written_until
from training.loop.loss import each
from training.parallel.processes import process_group
from training.split import Split


def train_student(
    lake: Lake,
    reader: Reader,
    split: Split,
    config: StudentTraining,
    teacher: Teacher | None,
    earlier: Earlier,
) -> TrainedStudent:
    """Train on the training days; without a teacher from labels alone.

    Raises UserError where it is to share parts of a GEM that there is not, or of other sizes, or
    to begin from the model of a domain that there is not.
    """
    torch.manual_seed(config.seed)
    if config.transfer.shuffled:
        teacher = teacher.shuffled(config.seed) if teacher else None
        earlier = earlier.shuffled(config.seed)
    model = _begun(lake, reader, split, config, earlier)
    student = model.student
    rarer = torch.tensor(each(config.negatives, reader.features.objectives, "--negatives")).log()
    transfer = Transfer.of(config.transfer, config.model.hidden[1], rarer, teacher)
    dense = torch.optim.AdamW(
        [p for m in (student, transfer.heads) for p in m.parameters() if p.requires_grad],
        lr=config.dense_rate,
        weight_decay=config.weight_decay,
        fused=True,
    )
    optimizers: list[torch.optim.Optimizer] = [dense]
    if any(p.requires_grad for p in model.tables.parameters()):
        optimizers.append(model.tables.optimizer(config.sparse_rate))
    average = averaged(student)
    what = "without GEM" if config.transfer.kind == "none" else "with GEM"
    name = f"{', '.join(reader.surfaces)} student {what}"
    told = {"desc": name, "unit": "batch", "disable": None}
    for batch in (bar := tqdm(_passes(lake, reader, split, config), **told)):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        transfer.backward(model.hidden(batch), student.head, batch)
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(student)
        if transfer.heads:
            bar.set_postfix(gem=f"x{transfer.balance.scale:.2f}", refresh=False)
    student.load_state_dict(average.module.state_dict())
    student.eval()
    return model


def _begun(
    lake: Lake, reader: Reader, split: Split, config: StudentTraining, earlier: Earlier
) -> TrainedStudent:
    known = reader.items.known_by(split.train_last)
    items = 1 + int(np.flatnonzero(known).max(initial=0))
    model = new_student(reader, config.model, items, earlier)
    if config.transfer.begin == "domain":
        domain.begin(model, domain.of_surface(reader, split.train_last))
        return model
    told = config.transfer.share is not None
    if config.transfer.share != () and (told or written_until(lake, split.train_last)):
        with process_group():
            gem, _ = load_trained(lake, split.train_last)
            share(model, gem, config.transfer)
    return model


def _passes(lake: Lake, reader: Reader, split: Split, config: StudentTraining) -> Iterable[Batch]:
    days = list(each_day(split.train_first, split.train_last))
    ripened = split.learning(lake.spec)
    if config.negatives:
        shares = tuple(each(config.negatives, reader.features.objectives, "--negatives"))
        ripened = replace(ripened, thinning=Thinning(shares, config.seed))
    for number in range(config.passes):
        shuffle = Shuffle(config.seed * 1000 + number)
        yield from reader.batches(days, ripened, config.batch_rows, shuffle)
