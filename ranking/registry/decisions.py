"""The latest promotion decision of each surface, kept in the lake for the report."""

from pydantic import ValidationError

from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists
from ranking.registry.ranker import rankers_folder


class PromotionRecord(StrictModel):
    """Whether a version was promoted when it was evaluated, and why."""

    version: str
    promoted: bool
    reasons: tuple[str, ...]


def write_promotion_record(lake: str, surface: str, record: PromotionRecord) -> None:
    """Replace the record of a surface."""
    atomic_io.write_text(_record_path(lake, surface), record.model_dump_json(indent=1) + "\n")


def read_promotion_record(lake: str, surface: str) -> PromotionRecord | None:
    """The record of a surface; None if no ranker was evaluated, or the record is damaged."""
    text = read_text_if_exists(_record_path(lake, surface))
    try:
        return None if text is None else PromotionRecord.model_validate_json(text)
    except ValidationError:
        return None


def _record_path(lake: str, surface: str) -> StoragePath:
    return rankers_folder(lake, surface) / "promotion.json"
