"""A refresh: the tables of the current day with the logs so far, refits, and online features.

It runs the steps of a daily run again for a day that is not over, by the hour or more often. The
run of the whole day replaces its tables afterwards.
"""

from dataclasses import replace
from datetime import date, timedelta

from dags.advertiser_steps import audience_steps, roi_steps
from dags.pipeline import (
    REFIT_RANKER,
    data_steps,
    feature_store_step,
    statistics_step,
    surface_step,
    teacher_step,
)
from dags.steps import ModelFlags, PipelinePaths, Step
from etl.cli.runner import format_data_until
from etl.errors import UserError
from etl.ingest.arrival import (
    FileStates,
    day_file_states,
    ingested_file_states,
    required_daily_sources,
)
from etl.spec import DataSpec
from etl.spec.base import StrictModel
from etl.spec.units import date_range
from etl.tables import step_state
from etl.tables.day_order import first_unfinished_day
from etl.tables.uri import resolve_uri


class RefreshPlan(StrictModel):
    """What a refresh works on.

    Attributes:
        days: The days whose tables are replaced, as the value of `--days`.
        data_until: The time until which all events have landed, as the value of `--data-until`.
        missing_sources: Daily sources without files, as the value of `--missing-sources`.
        surfaces: The surfaces whose live rankers are refit.
    """

    days: str
    data_until: str
    missing_sources: str
    surfaces: tuple[str, ...]


def plan_refresh(spec: DataSpec, raw: str, lake: str, data_until: int) -> RefreshPlan:
    """The plan of a refresh with data until an epoch second.

    Its days are the current one, those since the last ingest or that a step has not finished, and
    all after a day within `allowed_lateness` whose files have changed since they were read.

    Raises:
        UserError: No earlier day has been ingested, or no event log of the day has files.
    """
    last = spec.last_day_before(data_until)
    oldest = last - timedelta(days=max(1, spec.allowed_lateness_days))
    read = {day: ingested_file_states(lake, day) for day in date_range(oldest, last)}
    earlier = [day for day in read if day < last and read[day] is not None]
    if not earlier:
        raise UserError(
            f"no day from {oldest} to {last - timedelta(days=1)} has been ingested: process whole "
            "days with `gemline run` before refreshing the current one"
        )
    changed = [day for day in earlier if day_file_states(spec, raw, day) != read[day]]
    unfinished = first_unfinished_day(spec, lake) or last
    first = min([max(earlier) + timedelta(days=1), unfinished, *changed])
    files = {day: day_file_states(spec, raw, day) for day in date_range(first, last)}
    _require_event_log(spec, raw, files[last], last)
    missing = {
        name
        for name in required_daily_sources(spec)
        if not all(states.get(name) for states in files.values())
    }
    return RefreshPlan(
        days=f"{first}:{last}",
        data_until=format_data_until(data_until),
        missing_sources=",".join(sorted(missing)),
        surfaces=tuple(s for s in spec.ad_surfaces if _has_live_ranker(lake, s)),
    )


def _require_event_log(spec: DataSpec, raw: str, files: FileStates, day: date) -> None:
    if not any(files.get(name) for name in spec.log_sources):
        raise UserError(f"{raw} has no log of {day} yet: refresh once its first files have landed")


def _has_live_ranker(lake: str, surface: str) -> bool:
    return resolve_uri(lake, "rankers", surface, "current.json").exists()


def refresh_flags(plan: RefreshPlan) -> ModelFlags:
    """Flags of the steps of models in a refresh, which train no GEM and evaluate nothing."""
    return ModelFlags(
        training_days=(),
        teacher_days=("--days", plan.days),
        split=(),
        scored_days=(),
        data_until=("--data-until", plan.data_until),
    )


def refresh_steps(spec: DataSpec, paths: PipelinePaths, plan: RefreshPlan) -> list[Step]:
    """The steps of a refresh in order; the values of its plan may be templates.

    Their states do not replace those of a `gemline run`, which can go on after a refresh. Late
    reports of earlier days are loaded, too, because their files are recorded as read and the
    next daily run skips them. Models are fitted to them by that run.
    """
    flags = refresh_flags(plan)
    raw_flags = ("--missing-sources", plan.missing_sources)
    of_advertisers = [
        *audience_steps(spec, paths, flags.teacher_days, flags.data_until, raw_flags),
        *roi_steps(spec, paths, flags.teacher_days, flags.data_until, raw_flags),
    ]
    refits = [surface_step(REFIT_RANKER, paths, flags, surface) for surface in plan.surfaces]
    steps = [
        *data_steps(spec, paths, flags.teacher_days, flags.data_until, raw_flags),
        statistics_step(paths, flags.teacher_days),
        *(step for step in of_advertisers if step.engine == "spark"),
        teacher_step(paths, flags.teacher_days),
        *refits,
        *([feature_store_step(spec, paths, flags)] if refits else []),
    ]
    return [replace(step, state_name=f"{step_state.REFRESH_PREFIX}{step.name}") for step in steps]
