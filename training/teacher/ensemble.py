"""A teacher of GEMs of several seeds and trees: training, loading and scoring.

B impressions of a batch, n of a bucket, O objectives.
"""

import logging
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from etl.array_types import Float64
from etl.spec.units import DayRange, date_range
from etl.tables.lake import Lake
from training.baseline import feature_names_of, load_tabular
from training.config import SINGLE_PROCESS, ParallelismConfig, TrainConfig
from training.data.batch import Batch
from training.data.label_window import ALL_LABELS
from training.data.reader import ExampleReader
from training.model.gem import GemOutput
from training.teacher.blend import blend, blend_weights, remove_old_day_logits
from training.teacher.trees import (
    Trees,
    is_waiting_for_trees,
    load_trees,
    remove_old_trees,
    train_trees,
    trees_reader,
)
from training.trainer import checkpoint
from training.trainer.state import Manifest, TrainState
from training.trainer.throughput import Timeline
from training.trainer.trainer import load_train_state, train_days

log = logging.getLogger(__name__)


def train_teacher(
    lake: Lake,
    days: DayRange,
    config: TrainConfig,
    timeline: Timeline,
    parallelism: ParallelismConfig = SINGLE_PROCESS,
) -> list[dict[str, float]]:
    """Train all GEMs of the teacher on a range of days; a collective call.

    By default that is GEM alone. Further GEMs have the next seeds, and only the first one learns
    from stored predictions: others would become equal to it. Resumes like `train_days`, and
    returns the prequential metrics of the first GEM by day.
    """
    metrics = train_days(lake, days, config, timeline, parallelism)
    for member in range(1, config.teacher.seeds):
        alone = {"seed": config.seed + member, "distillation_weight": 0.0}
        other = config.model_copy(update=alone)
        train_days(lake, days, other, parallelism=parallelism, member=member)
    return metrics


def train_teacher_trees(lake: Lake, days: DayRange, config: TrainConfig) -> None:
    """Train the trees of the teacher for a range of days, if it has some, in one process.

    Days without a checkpoint of GEM, as most of a joint training, need none. Without a process
    group: fitting may take longer than the others would wait in a collective.
    """
    if not config.teacher.blend:
        return
    for day in date_range(*days):
        if checkpoint.has_checkpoint(lake, day):
            train_trees(lake, day, config)


def remove_old_models(lake: Lake, keep_days: int) -> list[date]:
    """Remove models as `remove_old_checkpoints` does; returns their days.

    Logits of days are kept for `blend_days` more: the oldest teacher that is left has weights that
    were fitted on them.
    """
    removed = checkpoint.remove_old_checkpoints(lake, keep_days)
    if removed:
        oldest_kept = max(removed) + timedelta(days=1)
        remove_old_trees(lake.root, oldest_kept)
        _, newest = checkpoint.list_checkpoints(lake.root, lake.spec.hash)[-1]
        blend_days = newest.training.teacher.blend_days
        remove_old_day_logits(lake.root, oldest_kept - timedelta(days=blend_days - 1))
    return removed


@dataclass(frozen=True)
class TeacherScores:
    """Logits (B, O) of the teacher, the output of its first GEM, and the logits of its parts.

    `gem` (B, O) is the mean of all GEMs, `trees` (B, O) NaN where the teacher has no trees.
    """

    logits: Float64
    output: GemOutput
    gem: Float64
    trees: Float64


@dataclass(frozen=True)
class Teacher:
    """GEMs of several seeds, and trees if any, all trained until one day.

    `weights` (O) are those of the trees; `reader` reads the inputs of GEM, `trees_reader` those of
    the trees.
    """

    members: tuple[TrainState, ...]
    reader: ExampleReader
    trees: Trees | None
    trees_reader: ExampleReader | None
    weights: Float64

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first GEM."""
        return self.members[0].manifest

    def score_trees(self, day: date, bucket: int) -> "TreeScores | None":
        """The logits of the trees on a bucket of a day; None without trees."""
        if self.trees is None or self.trees_reader is None:
            return None
        rows = load_tabular(self.trees_reader, [day], ALL_LABELS, [bucket])
        logits = self.trees.logits(rows, tuple(self.reader.lake.spec.objectives))
        return TreeScores(pa.array(rows.impression_ids, pa.string()), logits)

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden layer (B, M) of the first GEM, which teacher embeddings are made of."""
        hidden: Tensor = self.members[0].model(batch).hidden
        return hidden

    @torch.no_grad()
    def score(self, batch: Batch, tree_scores: "TreeScores | None") -> TeacherScores:
        """Score a batch; `tree_scores` are those of its bucket."""
        outputs = [state.model(batch) for state in self.members]
        stacked: Tensor = torch.stack([output.logits for output in outputs]).double()
        gem: Float64 = stacked.mean(0).numpy()
        trees = tree_scores.of(batch.impression_ids) if tree_scores else np.full_like(gem, np.nan)
        logits = np.where(self.weights > 0, blend(gem, np.nan_to_num(trees), self.weights), gem)
        return TeacherScores(logits, outputs[0], gem, trees)


@dataclass(frozen=True)
class TreeScores:
    """Logits (n, O) of the trees by impression."""

    impression_ids: pa.Array
    logits: Float64

    def of(self, impression_ids: npt.NDArray[np.object_]) -> Float64:
        """The logits (B, O) of some impressions."""
        position = pc.index_in(pa.array(impression_ids, pa.string()), self.impression_ids)
        return np.asarray(self.logits[position.to_numpy(zero_copy_only=False)])


def load_teacher(lake: Lake, trained_until: date, day: date) -> Teacher:
    """The teacher that was trained until a day, with the weights for scoring a later `day`.

    After an upgrade, GEM is alone until trees of the new spec have been trained.

    Raises UserError if a GEM or the trees are missing or read other inputs than the spec has.
    """
    state, reader = load_train_state(lake, trained_until)
    config = state.manifest.training
    others = range(1, config.teacher.seeds)
    members = (state, *(load_train_state(lake, trained_until, member)[0] for member in others))
    no_trees = Teacher(members, reader, None, None, np.zeros(len(lake.spec.objectives)))
    if config.teacher.blend is None:
        return no_trees
    if is_waiting_for_trees(lake, trained_until, state.manifest.upgraded_from):
        log.warning(
            "%s: scored by GEM alone, because the teacher's trees until %s are of the spec before "
            "an upgrade; `gemline train gem` for the next day trains new ones", day, trained_until,
        )  # fmt: skip
        return no_trees
    inputs = trees_reader(lake, config)
    trees = load_trees(lake, trained_until, feature_names_of(inputs))
    fitted = blend_weights(lake, trained_until, day, config.teacher.blend_days)
    weights = np.array([fitted[name] if name in trees.boosters else 0 for name in fitted])
    return Teacher(members, reader, trees, inputs, weights)
