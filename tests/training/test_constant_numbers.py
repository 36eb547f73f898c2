"""Numbers with one value or none on the first days: their edges follow when they vary."""

from datetime import date

import pyarrow as pa
import torch

from etl.tables import arrow, schemas
from etl.tables.lake import Lake
from tests.conftest import FIRST
from tests.training.test_input_statistics import CONFIG, SECOND, item_edges
from training.data.input_statistics import input_statistics
from training.distributed.process_group import process_group
from training.model.numeric import quantile_edges
from training.trainer.resume import label_window_of_day, starting_point
from training.trainer.state import latest_reader
from training.trainer.trainer import train_days


def set_numbers(lake: Lake, day: date, numbers: dict[str, float]) -> None:
    """Set columns of the examples of a day."""
    schema = schemas.examples(lake.spec)
    rows = arrow.snapshot(lake, schema).read(day=[day])
    for name, value in numbers.items():
        index = rows.column_names.index(name)
        field = rows.schema.field(index)
        column = pa.repeat(pa.scalar(value, field.type), len(rows))
        rows = rows.set_column(index, field, column)
    arrow.replace_rows(lake, schema, rows, f"day = '{day}'", {})


def test_a_number_that_was_constant_gets_edges_on_the_first_day_on_which_it_varies(
    own: Lake,
) -> None:
    """All others keep theirs; one that is always constant has none."""
    late, never = "cnt_user_ad_impression_1d", "cnt_user_ad_click_1d"
    set_numbers(own, FIRST, {late: 3, never: 0})
    set_numbers(own, SECOND, {never: 0})
    with process_group():
        train_days(own, (FIRST, SECOND), CONFIG)
        reader = latest_reader(own, CONFIG)
        manifest, _ = starting_point(own, reader, (SECOND, SECOND), CONFIG)
        statistics = input_statistics(reader, SECOND, label_window_of_day(own, SECOND, manifest))
        first, second = item_edges(own, FIRST), item_edges(own, SECOND)
    assert statistics
    fitted = quantile_edges(statistics.row_numeric, first.shape[1] - 1)
    is_constant = first[:, 0] == first[:, -1]
    assert torch.equal(second, torch.where(is_constant[:, None], fitted, first))
    columns = manifest.features.numeric_columns
    assert is_constant[columns.index(late)] and is_constant[columns.index(never)]
    assert len(second[columns.index(late)].unique()) > 2
    assert len(second[columns.index(never)].unique()) == 1
