"""The report's sections on audiences and return on spend with one label and one campaign."""

from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa

from etl.spec import DataSpec
from etl.tables import arrow, audience_schemas, roi_schemas
from etl.tables.lake import Lake, arrow_schema
from ranking.report.audiences import audience_sections
from ranking.report.roi import roi_section

DAY = date(2026, 1, 2)


def test_the_curve_of_one_campaign_is_shown_as_of_the_latest_day(
    tmp_path: Path, lake_spec: DataSpec
) -> None:
    lake, schema = Lake(str(tmp_path), lake_spec), roi_schemas.response_curves(lake_spec)
    assert roi_section(lake, DAY) is None
    row = {"campaign": "b1", "currency": "USD", "reason": "keep b1", "day": DAY}
    row |= dict.fromkeys((name for name, kind in schema.columns.items() if kind == "double"), 2.0)
    table = pa.Table.from_pylist([row], schema=arrow_schema(schema))
    arrow.replace_rows(lake, schema, table, f"day = '{DAY}'", {})
    assert roi_section(lake, DAY - timedelta(days=1)) is None
    section = roi_section(lake, DAY)
    assert section is not None and (section.num_campaigns, section.total_spend) == (1, 2.0)
    assert section.value_before == section.value_after == 4.0
    assert "<svg" in section.figure
    arrow.replace_rows(
        lake, schema, arrow_schema(schema).empty_table(), f"day = '{DAY}'", {}
    )  # as `roi report` does where curves are no longer possible
    assert roi_section(lake, DAY) is None


def test_one_label_of_one_provider_is_shown(tmp_path: Path, lake_spec: DataSpec) -> None:
    lake, schema = Lake(str(tmp_path), lake_spec), audience_schemas.audience_quality(lake_spec)
    assert audience_sections(lake, DAY) == []
    (name, audience), *_ = lake_spec.audiences.items()
    numbers = {key: 0.5 for key, kind in schema.columns.items() if kind == "double"}
    shared = {"audience": name, "provider": audience.providers[0], "label": "x", "day": DAY}
    rows = [shared | numbers | {"true_class": k, "impressions": 20} for k in audience.classes]
    table = pa.Table.from_pylist(rows, schema=arrow_schema(schema))
    arrow.replace_rows(lake, schema, table, f"day = '{DAY}'", {})
    assert audience_sections(lake, DAY - timedelta(days=1)) == []
    (section,) = audience_sections(lake, DAY)
    (provider,) = section.providers
    assert provider.labels == ["x"] and provider.precision.shape == (1, len(audience.classes))
    assert "<svg" in section.figure
