"""The lead of the report: what to do next, by promotion state and calibration of rankers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etl.errors import UserError
from etl.tables.lake import Lake
from ranking.registry.promotion import MIN_POSITIVES
from ranking.registry.ranker import latest_trained_pointer, live_pointer
from ranking.registry.records import (
    PromotionRecord,
    RefitRecord,
    read_promotion_record,
    read_refit_record,
)
from training.evaluation.predictions import ConfidenceInterval, Predictions, calibration_interval


@dataclass(frozen=True)
class RankerState:
    """The promotion state of a surface: versions by the lake's pointers, and the last decision.

    `refit` is the last refit, if it is live.
    """

    surface: str
    trained: str | None
    live: str | None
    is_blocked: bool = False
    decision: PromotionRecord | None = None
    refit: RefitRecord | None = None


@dataclass(frozen=True)
class CalibrationCheck:
    """The calibration of a surface's ranker for an objective, on the test rows with a final label.

    `calibration` is None if there are too few positives (or negatives) to judge it.
    """

    surface: str
    objective: str
    positives: int
    calibration: ConfidenceInterval | None

    @property
    def is_off(self) -> bool:
        """Whether 1 is outside the 95 % interval of predictions over outcomes."""
        interval = self.calibration
        return interval is not None and not interval.low <= 1 <= interval.high


@dataclass(frozen=True)
class NextStep:
    """A sentence of the lead; `details` are shown in small print."""

    text: str
    details: str = ""


def ranker_states(lake: Lake) -> list[RankerState]:
    """The promotion state of each surface that carries ads; damaged pointers count as missing."""
    states = []
    for surface in lake.spec.ad_surfaces:
        try:
            trained = latest_trained_pointer(lake.root, surface).read()
            live = live_pointer(lake.root, surface).read()
        except UserError:
            trained = live = None
        refit = read_refit_record(lake.root, surface)
        is_live = bool(refit and live and refit.version == live.live)
        states.append(
            RankerState(
                surface=surface,
                trained=trained.live if trained else None,
                live=live.live if live else None,
                is_blocked=bool(trained and live and trained.live in live.blocked),
                decision=read_promotion_record(lake.root, surface),
                refit=refit if is_live else None,
            )
        )
    return states


def calibration_checks(lake: Lake, predictions: Predictions) -> list[CalibrationCheck]:
    """Check the calibration for each surface that carries ads and each objective that it has."""
    checks = []
    for surface in lake.spec.ad_surfaces:
        rows = predictions.filter(predictions.surface == lake.spec.surface_codes[surface])
        for column, objective in enumerate(predictions.objectives):
            is_labeled = rows.label_mask[:, column]
            if surface not in lake.spec.surfaces_of(objective) or not is_labeled.any():
                continue
            positives = int(rows.labels[is_labeled, column].sum())
            negatives = int(is_labeled.sum()) - positives
            is_enough = min(positives, negatives) >= MIN_POSITIVES
            interval = calibration_interval(rows, objective) if is_enough else None
            checks.append(CalibrationCheck(surface, objective, positives, interval))
    return checks


def next_steps(states: Sequence[RankerState], checks: Sequence[CalibrationCheck]) -> list[NextStep]:
    """The steps: promotion by surface, objectives with too few positives, calibration."""
    steps = [_promotion_step(state) for state in states]
    too_few = [check for check in checks if check.calibration is None]
    if too_few:
        names = (f"{check.objective} on {check.surface} ({check.positives})" for check in too_few)
        steps.append(
            NextStep(
                f"Too few positives to judge: {', '.join(names)}. Evaluate on more test days: an "
                f"objective is judged from {MIN_POSITIVES} positives and negatives on."
            )
        )
    off = [check for check in checks if check.is_off]
    refit = {state.surface for state in states if state.refit}
    advice = {
        "Their refits have refreshed it: see the calibration by segment in the model cards.": [
            check for check in off if check.surface in refit
        ],
        "Train these rankers again with a newer calibration day.": [
            check for check in off if check.surface not in refit
        ],
    }
    for text, checks_off in advice.items():
        if checks_off:
            named = ", ".join(_calibration_text(check) for check in checks_off)
            details = "Predictions over outcomes with the 95 % interval, which does not contain 1."
            steps.append(NextStep(f"Calibration is off at the gate: {named}. {text}", details))
    if checks and not too_few and not off:
        steps.append(NextStep("All objectives are calibrated: every 95 % interval contains 1."))
    return steps


def _promotion_step(state: RankerState) -> NextStep:
    surface, trained, live = state.surface, state.trained, state.live
    name = f"{surface}: ranker {trained}"
    if trained is None:
        return NextStep(
            f"{surface}: no ranker was trained; run `gemline rank train --surface {surface}`."
        )
    decision = state.decision
    is_current = decision is not None and decision.version == trained
    reasons = "; ".join(decision.reasons) if decision and is_current else ""
    labels = _label_times(state.refit) if state.refit else ""
    if state.refit and is_current and decision and decision.promoted:
        return NextStep(f"{name} was promoted, and its refit {live} is live{labels}.", reasons)
    if trained == live:
        return NextStep(f"{name} was promoted and is live.", reasons)
    serving = f"{live} stays live{labels}" if live else "no ranker is live"
    if is_current and decision and decision.promoted and not state.is_blocked and live:
        return NextStep(f"{name} was promoted; {live} is live.", reasons)
    if state.is_blocked:
        return NextStep(f"{name} was rolled back; {serving}. Train a new one.")
    if not is_current:
        command = f"gemline rank promote --surface {surface}"
        return NextStep(f"{name} was not evaluated for promotion; {serving}. Run `{command}`.")
    why = decision.reasons[-1] if decision and decision.reasons else "no reason is recorded"
    return NextStep(f"{name} was not promoted because {why}; {serving}.", reasons)


def _label_times(refit: RefitRecord) -> str:
    newest = refit.newest_label_times.items()
    return f", with labels until {', '.join(f'{time} ({name})' for name, time in newest)}"


def _calibration_text(check: CalibrationCheck) -> str:
    interval = check.calibration
    assert interval
    high = f"{interval.high:.2f}" if np.isfinite(interval.high) else "∞"
    bounds = f"[{interval.low:.2f}, {high}]"
    return f"{check.objective} on {check.surface} {interval.value:.2f} {bounds}"
