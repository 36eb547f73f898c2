"""What the models of the study cost: FLOPs of an example, forward and backward."""

from functools import partial

from benchmarks.model.limit import flops_of
from benchmarks.transfer.trials import Trials
from etl.spec.units import each_day
from ranking.student.config import DomainTraining, StudentTraining
from ranking.student.trained import new_student
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.gem import load_trained
from training.knowledge.earlier import Earlier
from training.loop.cost import cost
from training.parallel.processes import process_group

ROWS = 2048


def costs(trials: Trials) -> dict[str, float]:
    """MFLOP of an example: of GEM, of a domain's model, of a student."""
    lake, split = trials.lake, trials.split
    sizes = {"domain": DomainTraining().model, "student": StudentTraining().model}
    reader = Reader.newest(lake, None, StudentTraining().model.max_length, lake.spec.ad_surfaces)
    days = list(each_day(split.test_first, split.test_last))
    batch = next(reader.batches(days, split.testing(lake.spec), ROWS, Shuffle(None)))
    found = {}
    for name, size in sizes.items():
        model = new_student(reader, size, len(reader.items), Earlier.nothing())
        found[name] = 3 * flops_of(partial(model.logits, batch)) / len(batch) / 1e6
    with process_group():
        gem = load_trained(lake, split.train_last)[0]
        return {"gem": cost(gem, batch).flops / 1e6} | found
