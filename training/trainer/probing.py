"""`gemline train probe`: from the probes of a checkpoint to a map of recipes."""

from collections.abc import Sequence
from datetime import date

import pyarrow as pa
import pyarrow.csv as pa_csv
import torch
from rich.table import Table

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, read_text_if_exists
from training.precision.dispatch import Choice, choose_recipes, measure_speedups, precision_map
from training.precision.errors import CANDIDATES, RecipeError, measure_errors
from training.precision.precision_map import DIRECTIONS, PrecisionMap, precision_map_path
from training.precision.probe import Probe
from training.precision.recipes import RECIPES
from training.trainer import checkpoint
from training.trainer.state import build_train_state

UNKNOWN_ROWS = 8192  # of a layer whose rows an earlier version did not count


def load_probe(lake: Lake, day: date) -> Probe:
    """The probe of the GEM that was trained until a day; raises UserError if it has none."""
    manifest = checkpoint.require_manifest(lake, day)
    if not manifest.training.compute.probe_every:
        raise UserError(
            f"the GEM until {day} was trained without probes: train it with "
            "--compute.probe-every 100"
        )
    state = build_train_state(manifest)
    checkpoint.load_checkpoint(checkpoint.checkpoint_path(lake.root, day), state)
    assert state.probe
    return state.probe


def choose_precision(
    lake: Lake, day: date, rows: int | None = None
) -> tuple[list[Choice], PrecisionMap]:
    """The recipe of each layer and direction, timed where a GPU is available.

    Products of a layer have as many `rows` as in the probed steps, unless a number is given.
    """
    probe = load_probe(lake, day)
    errors = list(measure_errors(probe))
    if not errors:
        raise UserError(f"no step was probed until {day}: lower --compute.probe-every")
    write_errors(lake.root, errors)
    if not torch.cuda.is_available():
        choices = choose_recipes(errors)
        return choices, precision_map(choices)
    device = torch.device("cuda")
    fp8 = [name for name in CANDIDATES if RECIPES[name].is_fp8]
    timed = [name for name in fp8 if not RECIPES[name].is_emulated]
    by_layer = {n: rows or site.rows_per_call or UNKNOWN_ROWS for n, site in probe.by_name()}
    choices = choose_recipes(errors, measure_speedups(probe.layers, by_layer, timed, device))
    return choices, precision_map(choices, torch.cuda.get_device_name())


def choices_table(choices: Sequence[Choice]) -> Table:
    """The choices, a row for each layer, to print."""
    table = Table("layer", *(direction.replace("_", " ") for direction in DIRECTIONS))
    for site in dict.fromkeys(choice.site for choice in choices):
        by_direction = {choice.direction: choice for choice in choices if choice.site == site}
        table.add_row(site, *(_described(by_direction[d]) for d in DIRECTIONS))
    return table


def _described(choice: Choice) -> str:
    """`fp8_row, error 0.10, speed-up 1.30`, or why it is not FP8."""
    if choice.reason:
        return f"{choice.recipe}: {choice.reason}"
    speedup = "" if choice.speedup is None else f", speed-up {choice.speedup:.2f}"
    return f"{choice.recipe}, error {choice.mere:.2f}{speedup}"


def write_errors(lake: str, errors: Sequence[RecipeError]) -> None:
    """Write all errors as CSV next to the map."""
    with atomic_io.replace_file(_errors_path(lake)) as partial:
        pa_csv.write_csv(pa.Table.from_pylist([vars(error) for error in errors]), partial)


def read_errors(lake: str) -> list[RecipeError]:
    """The errors of the last probe; none without one."""
    text = read_text_if_exists(_errors_path(lake))
    if text is None:
        return []
    table = pa_csv.read_csv(pa.BufferReader(text.encode()))
    return [RecipeError(**row) for row in table.to_pylist()]


def _errors_path(lake: str) -> StoragePath:
    return precision_map_path(lake).parent / "precision_errors.csv"
