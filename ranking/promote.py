"""The gate: a new ranker answers only if it is calibrated, and better than the one that answers.

Both are judged from their folders, on the newest days of which all labels are final.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.units import each_day
from etl.tables.lake import Lake
from etl.tables.pointer import clean
from ranking.calibration import logit
from ranking.package.ranker import Ranker, load
from ranking.package.versions import answering, current, identified, newest, versions
from ranking.score import SCORE_ROWS, assembly_of
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.loop.paired import Interval, apart, calibration
from training.predictions import Predictions, predict
from training.split import Split

FEWEST = 10  # positives below which nothing is said of an objective


class GateConfig(Strict):
    """Predictions may be off by a share of `tolerance`, as far as the test days can tell."""

    tolerance: float = 0.1


@dataclass(frozen=True)
class Verdict:
    """Whether a ranker was promoted, and why, objective by objective."""

    version: str
    promoted: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """In one line."""
        what = "promoted" if self.promoted else "not promoted"
        return f"{self.version} {what}: {'; '.join(self.reasons)}"


def promote(lake: Lake, surface: str, split: Split, config: GateConfig) -> Verdict:
    """Let the newest ranker of a surface answer from now on, if it passes.

    The first of a surface passes, as nothing else could answer. Where the one that answers cannot
    be compared with, being of another spec or damaged, it passes if it is calibrated. One that was
    rolled back does not pass. Raises UserError where none was trained.
    """
    live = current(lake.root, surface)
    pointed, trained = live.read(), newest(lake.root, surface).target
    if trained is None or trained == live.target:
        return Verdict(answering(lake.root, surface).name, False, ("it answers already",))
    if pointed and trained.name in pointed.barred:
        return Verdict(trained.name, False, ("it was rolled back and is barred",))
    ours = judged(identified(load(trained), lake.root, surface), lake, split)
    old = comparable(lake, surface)
    theirs = judged(old, lake, split) if isinstance(old, Ranker) else None
    verdict = judge(trained.name, ours, theirs, config)
    if isinstance(old, str):
        passes = verdict.promoted or pointed is None
        verdict = replace(verdict, promoted=passes, reasons=(old, *verdict.reasons))
    if verdict.promoted:
        live.swap(trained.name)
        clean(versions(lake.root, surface), live, newest(lake.root, surface))
    return verdict


def comparable(lake: Lake, surface: str) -> Ranker | str:
    """The ranker that answers, or why a new one cannot be compared with it."""
    folder = current(lake.root, surface).target
    if folder is None:
        return "the first of its surface"
    try:
        ranker = identified(load(folder), lake.root, surface)
    except UserError as error:
        return f"the one that answers cannot be judged: {error}"
    return ranker if ranker.manifest.spec.hash == lake.spec.hash else "the first of its spec"


def judge(
    version: str, ours: Predictions, theirs: Predictions | None, config: GateConfig
) -> Verdict:
    """Judge a ranker by its predictions and those of the one that answers, of the same rows.

    Without the latter it passes if it is calibrated.
    """
    told = [name for name in ours.objectives if _enough(ours, name)]
    ratios = {name: calibration(ours, name) for name in told}
    off = [name for name, ratio in ratios.items() if not _near_one(ratio, config.tolerance)]
    reasons = [
        f"{name}: predictions / outcomes {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        for name, ratio in ratios.items()
    ]
    uncalibrated = [f"{name} is off" for name in off]
    if theirs is None:
        return Verdict(version, not off, (*reasons, *uncalibrated))
    gaps = {name: apart([ours], [theirs], name) for name in told}
    reasons += [f"{name}: NE {gap}" for name, gap in gaps.items()]
    better = any(gap.high < 0 for gap in gaps.values())
    worse = [name for name, gap in gaps.items() if gap.low > 0]
    reasons += uncalibrated + [f"{name} is worse" for name in worse]
    if not better:
        reasons.append("nothing is better outside noise")
    return Verdict(version, better and not worse and not off, tuple(reasons))


def judged(ranker: Ranker, lake: Lake, split: Split) -> Predictions:
    """What a ranker says of the test days, as it would have answered."""
    assembly = assembly_of(ranker, lake)
    days = list(each_day(split.test_first, split.test_last))
    batches = assembly.reader.batches(days, split.testing(lake.spec), SCORE_ROWS, Shuffle(None))

    def logits(batch: Batch) -> torch.Tensor:
        inputs = assembly(batch)
        state = ranker.state(inputs.requests)
        p = ranker.probabilities(state, inputs.candidates)[inputs.rows.there]
        return torch.from_numpy(logit(p))

    return predict(logits, batches, ranker.objectives)


def _enough(found: Predictions, objective: str) -> bool:
    column = found.objectives.index(objective)
    known = found.known[:, column]
    labels = found.labels[known, column]
    return bool(min(labels.sum(), (1 - labels).sum()) >= FEWEST)


def _near_one(ratio: Interval, tolerance: float) -> bool:
    return bool(np.isfinite(ratio.value)) and (
        ratio.low <= 1 + tolerance and ratio.high >= 1 - tolerance
    )
