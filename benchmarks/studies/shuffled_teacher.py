"""Training of the studies' students, with a control: a shuffled teacher.

A shuffled teacher gives a student the teacher predictions of other impressions, users and items.
Any gain of such a student does not come from the information in GEM.
"""

from copy import copy
from dataclasses import replace

import numpy as np
import torch

from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from features.schema import ITEM_TABLE, USER_TABLE
from ranking.inputs.from_tables import load_teacher_history
from ranking.student.config import DistillationConfig, DomainTrainConfig, StudentTrainConfig
from ranking.student.trained import TrainedStudent
from ranking.trainer.student_trainer import StudentTrainer
from ranking.trainer.train import (
    fit_domain_model,
    init_student,
    load_teacher_predictions,
    train_student,
)
from training.teacher.embeddings import TeacherEmbeddings
from training.teacher.predictions import TeacherPredictions


class TrialDistillationConfig(DistillationConfig):
    """How a student of a study learns from GEM; with `shuffle_teacher` it is a control."""

    shuffle_teacher: bool = False


class StudentTrialConfig(StudentTrainConfig):
    """How a student of a study is trained."""

    distillation: TrialDistillationConfig = TrialDistillationConfig()


def train_on_surfaces(
    lake: Lake,
    surfaces: tuple[str, ...],
    split: DaySplit,
    config: StudentTrainConfig,
    teacher_embeddings: TeacherEmbeddings,
) -> StudentTrainer:
    """Train a student as `ranking.trainer.train.train_on_surfaces` does, or a control."""
    student, teacher = start_trial(lake, surfaces, split, config, teacher_embeddings)
    return train_student(student, split, config, teacher)


def train_domain(lake: Lake, name: str, split: DaySplit, config: DomainTrainConfig) -> StoragePath:
    """Train and save the model of a domain as in `ranking.trainer.train`, or a control."""
    embeddings = load_teacher_history(lake, config.model.input_limits)
    student, teacher = start_trial(lake, lake.spec.domains[name], split, config, embeddings)
    return fit_domain_model(student, name, split, config, teacher)


def start_trial(
    lake: Lake,
    surfaces: tuple[str, ...],
    split: DaySplit,
    config: StudentTrainConfig,
    teacher_embeddings: TeacherEmbeddings,
) -> tuple[TrainedStudent, TeacherPredictions | None]:
    """A student before its training, and its teacher; of a control both are shuffled."""
    teacher = load_teacher_predictions(lake, surfaces, split, config)
    if not _shuffles_teacher(config):
        return init_student(lake, surfaces, split, config, teacher_embeddings), teacher
    embeddings = shuffle_embeddings(teacher_embeddings, config.seed)
    student = init_student(lake, surfaces, split, config, embeddings)
    if _shares_tables(config.distillation):
        shuffle_tables(student, config.seed)
    return student, shuffle_predictions(teacher, config.seed) if teacher else None


def shuffle_predictions(teacher: TeacherPredictions, seed: int) -> TeacherPredictions:
    """Give each impression the prediction of the same GEM version for another impression."""
    permutation = np.random.default_rng(seed).permutation(len(teacher.impression_ids))
    target = np.argsort(teacher.version_index, kind="stable")
    source = permutation[np.argsort(teacher.version_index[permutation], kind="stable")]
    shuffled = copy(teacher)
    shuffled.logits = np.empty_like(teacher.logits)
    shuffled.logits[target] = teacher.logits[source]
    return shuffled


def shuffle_embeddings(embeddings: TeacherEmbeddings, seed: int) -> TeacherEmbeddings:
    """Give each impression the teacher embedding of another one."""
    permutation = np.random.default_rng(seed).permutation(len(embeddings.embedding_int4))
    return replace(embeddings, embedding_int4=embeddings.embedding_int4[permutation])


@torch.no_grad()
def shuffle_tables(student: TrainedStudent, seed: int) -> None:
    """Permute the rows of the tables of items and users."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in student.tables.state_dict().items():
        if key.split(".")[-2] in (ITEM_TABLE, USER_TABLE):
            weight.copy_(weight[torch.randperm(len(weight), generator=generator)])


def _shuffles_teacher(config: StudentTrainConfig) -> bool:
    distillation = config.distillation
    return isinstance(distillation, TrialDistillationConfig) and distillation.shuffle_teacher


def _shares_tables(config: DistillationConfig) -> bool:
    if config.warm_start_from == "domain":
        return False  # the domain's model is already a control
    return config.shared_modules is None or "tables" in config.shared_modules
