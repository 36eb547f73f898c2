"""Window mixing (Zipper) on simulated delays, compared with waiting and with a naive mix.

Four rankers of all surfaces learn the days until a run's: `wait` learns conversions when their
longest window has closed, `zipper` mixes windows with a head for each, `naive` mixes them in one
head, and `oracle` knows all labels of the longest window at once, as no live system can. They are
compared on the day after by the true probabilities: the expected AUC, and the mean prediction over
the mean truth times the share of outcomes that are logged in time to count as labels.
The logs are those of the frozen simulation, with labels of two more windows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.harness import BENCH_SIMULATOR, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import BENCH_DAYS, simulated_tables
from benchmarks.studies.position_truth import share_of_logged_outcomes
from benchmarks.studies.refit_predictions import labels_only
from benchmarks.studies.trials import trial_path
from etl.spec import load_spec
from etl.spec.units import DaySplit, date_range
from etl.tables import atomic_io
from etl.tables.lake import Lake
from ranking.report.data import true_probabilities
from ranking.scoring.scorer import SCORE_ROWS
from ranking.student.trained import new_student
from ranking.trainer.student_trainer import StudentTrainer
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import INPUT_TABLES, ExampleReader
from training.evaluation.predictions import Predictions, predict
from training.teacher.embeddings import TeacherEmbeddings

Kind = Literal["wait", "zipper", "naive", "oracle"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FIRST_DAY, RUN_DAYS = date(2026, 1, 1), (date(2026, 1, 8), date(2026, 1, 10))
OBJECTIVE = "conversion"
WINDOW, EXTRA_WINDOWS = "window: 3d", "window: 3d, extra_windows: [6h, 1d]"


class NaiveMixTrainer(StudentTrainer):
    """Mixes windows in the served head: what a single head makes of labels of all windows."""

    def _epoch(self, days: Sequence[date], window: LabelWindow, number: int) -> Iterator[Batch]:
        objectives = self.student.input_builder.reader.lake.spec.extra_window_objectives
        for batch in super()._epoch(days, window, number):
            labels, mask = batch.labels.clone(), batch.label_mask.clone()
            for column, objective in enumerate(objectives):
                chosen = batch.extra_mask[:, column]
                labels[chosen, objective] = batch.extra_labels[chosen, column]
                mask[:, objective] |= chosen
            yield replace(
                batch,
                labels=labels,
                label_mask=mask,
                extra_mask=torch.zeros_like(batch.extra_mask),
            )


@dataclass(frozen=True)
class ZipperTrials:
    """Trainings on the frozen logs with labels of EXTRA_WINDOWS; finished ones are kept."""

    lake: Lake
    raw: Path
    folder: Path

    @classmethod
    def of(cls, work: Path) -> "ZipperTrials":
        """Tables are built in `work` if they are missing."""
        work.mkdir(parents=True, exist_ok=True)
        spec = work.resolve() / "spec.yaml"
        text = SIMULATOR_SPEC.read_text()
        assert text.count(f"event: conversion, {WINDOW}") == 1
        changed = text.replace(f"conversion, {WINDOW}", f"conversion, {EXTRA_WINDOWS}")
        atomic_io.write_text(spec, changed)
        paths = simulated_tables(work, BENCH_SIMULATOR, BENCH_DAYS, spec)
        return cls(Lake(paths.lake, load_spec(spec)), work / "raw", work.resolve() / "trials")

    def predictions(self, kind: Kind, run_day: date, seed: int) -> Predictions:
        """Predictions of the day after a run's, of all surfaces; not calibrated."""
        split = self._split(run_day)
        name = f"{kind} {labels_only(seed).model_dump_json()}"
        path = trial_path(self.folder, self.lake, INPUT_TABLES, split, name)
        if not path.is_file():
            self._train(kind, split, seed).write(path, split)
        return Predictions.read(path, split)

    def truth(self, predictions: Predictions) -> np.ndarray:
        """The true probabilities (B) of conversions of predicted rows."""
        truth = true_probabilities(predictions, str(self.raw))
        assert truth is not None
        assert (truth.impression_ids == predictions.impression_ids).all()
        return truth.probabilities[:, truth.objectives.index(OBJECTIVE)]

    def logged_share(self) -> float:
        """The share of conversions that are logged in time to count as labels."""
        share = share_of_logged_outcomes(self.lake, self.raw)
        return float(share[list(self.lake.spec.objectives).index(OBJECTIVE)])

    def _split(self, run_day: date) -> DaySplit:
        tested = run_day + timedelta(days=1)
        return DaySplit(
            train_first=FIRST_DAY,
            train_last=run_day,
            calibration=None,
            test_first=tested,
            test_last=tested,
            data_until=tested + timedelta(days=self.lake.spec.label_maturity_days),
        )

    def _train(self, kind: Kind, split: DaySplit, seed: int) -> Predictions:
        spec = self.lake.spec
        config = labels_only(seed).model_copy(update={"mix_windows": kind in ("zipper", "naive")})
        reader = ExampleReader.latest(self.lake, None, config.model.max_length, spec.ad_surfaces)
        torch.manual_seed(seed)
        num_items = reader.items.num_seen_by(split.train_last)
        student = new_student(reader, config.model, num_items, TeacherEmbeddings.empty())
        trainer_type = NaiveMixTrainer if kind == "naive" else StudentTrainer
        trainer = trainer_type(student, config, None)
        days = list(date_range(split.train_first, split.train_last))
        known_until = split.data_until if kind == "oracle" else split.train_last
        trainer.train(days, LabelWindow(0, spec.day_end(known_until)))
        batches = reader.batches(
            [split.test_first], LabelWindow.for_test(split, spec), SCORE_ROWS, Shuffle(None)
        )
        return predict(trainer.averaged.logits, batches, list(spec.objectives))


def expected_auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """The AUC of scores (B) in expectation over outcomes of true probabilities (B)."""
    labels = np.repeat([1, 0], len(truth))
    weights = np.concatenate((truth, 1 - truth))
    return float(roc_auc_score(labels, np.tile(scores, 2), sample_weight=weights))


def add_zipper_rows(result: BenchmarkResult, trials: ZipperTrials, seeds: int) -> None:
    """A row for each kind, and the figures `ri_auc_zipper` and `zipper_bias`.

    RI-AUC is the share of the oracle's gain over waiting, from sums over days and seeds.
    """
    auc = dict.fromkeys(KINDS, 0.0)
    predicted, actual = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    runs = [(day, seed) for day in RUN_DAYS for seed in range(seeds)]
    share = trials.logged_share()
    for kind in KINDS:
        for day, seed in runs:
            predictions = trials.predictions(kind, day, seed)
            p = predictions.probabilities[:, predictions.objectives.index(OBJECTIVE)]
            truth = trials.truth(predictions)
            auc[kind] += expected_auc(p, truth) / len(runs)
            predicted[kind] += p.mean()
            actual[kind] += truth.mean() * share
    bias = {kind: predicted[kind] / actual[kind] - 1 for kind in KINDS}
    gain = auc["oracle"] - auc["wait"]
    for kind in KINDS:
        share = (auc[kind] - auc["wait"]) / gain
        result.rows.append(
            (f"windows: {kind}", "day before", OBJECTIVE, f"AUC {auc[kind]:.4f}",
             f"{1 + bias[kind]:.3f} (of the truth)", f"RI-AUC {share:.2f}")
        )  # fmt: skip
    result.record("ri_auc_zipper", (auc["zipper"] - auc["wait"]) / gain, "")
    result.record("zipper_bias", abs(bias["zipper"]), "")
    result.record("naive_mix_bias", bias["naive"], "")
