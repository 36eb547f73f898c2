"""The report's section on features: which ones changed on the last day, and which matter to GEM."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from matplotlib.figure import Figure

from etl.tables import feature_schemas
from etl.tables.lake import Lake
from features.drift import FeatureDrift, drift_of_days
from ranking.report.figures import to_svg
from training.evaluation.importance import ImportanceStudy, UnitImportance

SHOWN_FEATURES = 15
SHOWN_UNITS = 12  # of each objective


@dataclass(frozen=True)
class FeatureSection:
    """Features on their latest day, and their importances for GEM.

    Attributes:
        drifts: The features that changed most.
        study: The importances; None if none were measured.
    """

    day: date
    num_features: int
    drifts: Sequence[FeatureDrift]
    alarms: Sequence[FeatureDrift]
    study: ImportanceStudy | None

    @property
    def figure(self) -> str:
        """The importances as an SVG; empty if none were measured."""
        return plot_importances(self.study.importances) if self.study else ""


def feature_section(lake: Lake, until: date) -> FeatureSection | None:
    """The statistics of the latest day up to one; None if there are none."""
    name = feature_schemas.feature_statistics(lake.spec).name
    day = lake.latest_day(name, before=until + timedelta(days=1))
    if day is None:
        return None
    drifts = drift_of_days(lake, (day, day))[day]
    alarms = [drift for drift in drifts if drift.alarm]
    study = ImportanceStudy.load(lake.root)
    return FeatureSection(day, len(drifts), drifts[:SHOWN_FEATURES], alarms, study)


def plot_importances(importances: Sequence[UnitImportance]) -> str:
    """The most important units of each objective, with their 95 % intervals."""
    objectives = list(dict.fromkeys(each.objective for each in importances))
    figure = Figure(figsize=(7, 2.8 * len(objectives)), layout="constrained")
    panels = figure.subplots(len(objectives), squeeze=False)[:, 0]
    for axis, objective in zip(panels, objectives, strict=True):
        shown = [each for each in importances if each.objective == objective][:SHOWN_UNITS]
        for y, each in enumerate(shown[::-1]):
            low, value, high = (1e4 * number for number in (each.low, each.increase, each.high))
            axis.plot([low, high], [y, y], "-", lw=1.5, color="#2a5d9f")
            axis.plot([value], [y], "o", ms=4, color="#2a5d9f")
        axis.axvline(0, color="#999999", lw=0.8)
        axis.set_yticks(range(len(shown)), [each.name for each in shown[::-1]], fontsize=8)
        axis.set_title(objective, fontsize=9, loc="left")
    panels[-1].set_xlabel("NE of GEM without the unit, less that with it, 1e-4")
    return to_svg(figure)
