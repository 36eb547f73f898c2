"""The cost of the models of `gemline bench transfer`: FLOPs per example, forward and backward."""

from functools import partial

from benchmarks.studies.student_trials import BATCH_ROWS, TransferTrials
from benchmarks.system.model_blocks import count_flops
from etl.spec.units import date_range
from ranking.student.config import DomainTrainConfig, StudentTrainConfig
from ranking.student.trained import new_student
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.teacher.embeddings import TeacherEmbeddings
from training.trainer.throughput import measure_cost
from training.trainer.trainer import load_train_state


def mflop_per_example(trials: TransferTrials) -> dict[str, float]:
    """MFLOP per example of GEM, of a domain's model and of a student."""
    lake, split = trials.lake, trials.split
    configs = {"domain": DomainTrainConfig().model, "student": StudentTrainConfig().model}
    max_length = configs["student"].max_length
    reader = ExampleReader.latest(lake, None, max_length, lake.spec.ad_surfaces)
    days = list(date_range(split.test_first, split.test_last))
    batch = next(
        reader.batches(days, LabelWindow.for_test(split, lake.spec), BATCH_ROWS, Shuffle(None))
    )
    mflop = {}
    with process_group():
        gem, _ = load_train_state(lake, split.train_last)
        mflop["gem"] = measure_cost(gem, batch).flops_per_example / 1e6
    for name, config in configs.items():
        model = new_student(reader, config, len(reader.items), TeacherEmbeddings.empty())
        forward_flops = count_flops(partial(model.logits, batch))
        mflop[name] = 3 * forward_flops / len(batch) / 1e6  # with the backward pass
    return mflop
