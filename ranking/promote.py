"""The gate: a new ranker answers only if it is better than the old one, and calibrated.

Both are judged from their folders, on the newest days of which all labels are final.
"""

from dataclasses import dataclass

import numpy as np
import torch

from etl.spec.base import Strict
from etl.spec.units import each_day
from etl.tables.lake import Lake
from etl.tables.pointer import clean
from ranking.calibration import logit
from ranking.package.ranker import Ranker, load
from ranking.package.versions import answering, current, newest, versions
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

    The first of a surface and of a spec passes, as nothing else could answer. Raises UserError
    where none was trained.
    """
    before = current(lake.root, surface)
    trained = newest(lake.root, surface).target
    if trained is None or trained == before.target:
        return Verdict(answering(lake.root, surface).name, False, ("it answers already",))
    ours = judged(load(trained), lake, split)
    old = load(before.target) if before.target else None
    fits = old is not None and old.manifest.spec.hash == lake.spec.hash
    theirs = judged(old, lake, split) if old and fits else None
    verdict = judge(trained.name, ours, theirs, config)
    if verdict.promoted:
        before.swap(trained.name)
        clean(versions(lake.root, surface), before, newest(lake.root, surface))
    return verdict


def judge(
    version: str, ours: Predictions, theirs: Predictions | None, config: GateConfig
) -> Verdict:
    """What predictions of the same rows say of a ranker, beside those of the one that answers."""
    told = [name for name in ours.objectives if _enough(ours, name)]
    ratios = {name: calibration(ours, name) for name in told}
    off = [name for name, ratio in ratios.items() if not _near_one(ratio, config.tolerance)]
    reasons = [
        f"{name}: predictions / outcomes {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        for name, ratio in ratios.items()
    ]
    if theirs is None:
        return Verdict(version, True, ("the first of its spec", *reasons))
    gaps = {name: apart([ours], [theirs], name) for name in told}
    reasons += [f"{name}: NE {gap}" for name, gap in gaps.items()]
    better = any(gap.high < 0 for gap in gaps.values())
    worse = [name for name, gap in gaps.items() if gap.low > 0]
    reasons += [f"{name} is off" for name in off] + [f"{name} is worse" for name in worse]
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
