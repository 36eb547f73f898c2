"""The latest promotion decision and the latest refit of each surface, kept in the lake."""

from typing import TypeVar

from pydantic import ValidationError

from etl.event_time import format_utc
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists
from ranking.registry.ranker import rankers_folder
from ranking.scoring.segment_calibration import SegmentCalibration

Record = TypeVar("Record", bound=StrictModel)


class PromotionRecord(StrictModel):
    """Whether a version was promoted when it was evaluated, and why."""

    version: str
    promoted: bool
    reasons: tuple[str, ...]
    segments: tuple[SegmentCalibration, ...] = ()


class RefitRecord(StrictModel):
    """The last refit of a surface: the version that became live, and the labels that it learned.

    `data_until` is the epoch second by which the labels were final; `newest_labels` are the times
    (epoch seconds) of the latest impressions with a learned label.
    """

    version: str
    data_until: int
    newest_labels: dict[str, int]

    @property
    def newest_label_times(self) -> dict[str, str]:
        """The times in UTC, as text, of the objectives with a learned label."""
        return {name: format_utc(time) for name, time in self.newest_labels.items() if time}


def write_promotion_record(lake: str, surface: str, record: PromotionRecord) -> None:
    """Replace the record of a surface."""
    path = _record_path(lake, surface, "promotion")
    atomic_io.write_text(path, record.model_dump_json(indent=1) + "\n")


def read_promotion_record(lake: str, surface: str) -> PromotionRecord | None:
    """The record of a surface; None if no ranker was evaluated, or the record is damaged."""
    return _read_record(_record_path(lake, surface, "promotion"), PromotionRecord)


def write_refit_record(lake: str, surface: str, record: RefitRecord) -> None:
    """Replace the record of a surface's refit."""
    path = _record_path(lake, surface, "refit")
    atomic_io.write_text(path, record.model_dump_json(indent=1) + "\n")


def read_refit_record(lake: str, surface: str) -> RefitRecord | None:
    """The record of a surface's last refit; None if there is none, or it is damaged."""
    return _read_record(_record_path(lake, surface, "refit"), RefitRecord)


def _read_record(path: StoragePath, kind: type[Record]) -> Record | None:
    text = read_text_if_exists(path)
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None


def _record_path(lake: str, surface: str, name: str) -> StoragePath:
    return rankers_folder(lake, surface) / f"{name}.json"
