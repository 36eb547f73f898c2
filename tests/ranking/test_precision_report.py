"""The report's section on FP8: its recipes are those of the map, and it says why one is not FP8."""

from pathlib import Path

import pytest

from etl.tables.lake import Lake
from ranking.report.precision import PrecisionSection, precision_section
from tests.conftest import FIRST, LAST
from training.precision.dispatch import MAX_MERE
from training.precision.errors import RecipeError
from training.precision.precision_map import PrecisionMap, SiteRecipes
from training.trainer.probing import read_errors, write_errors

SITE = "trunk.0"
CHOSEN = PrecisionMap(
    sites={SITE: SiteRecipes(forward="fp8_row", input_grad="bf16", weight_grad="fp8_row")},
    chosen_by="speed",
    device="a card",
)


def errors_of_recipes(input_grad: float) -> list[RecipeError]:
    """Errors of bf16 and fp8_row, the latter as given for the gradient of the input."""
    meres = {"forward": 0.1, "input_grad": input_grad, "weight_grad": 0.15}
    return [
        RecipeError(SITE, direction, recipe, mere, mere, 1.0, mere)  # type: ignore[arg-type]
        for direction, of_fp8 in meres.items()
        for recipe, mere in (("bf16", 0.001), ("fp8_row", of_fp8))
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(MAX_MERE / 2, "FP8 is not faster"), (2 * MAX_MERE, "the error of FP8 is 0.40")],
)
def test_a_product_that_is_not_in_fp8_has_a_reason(error: float, reason: str) -> None:
    section = PrecisionSection.of_map(FIRST, CHOSEN, errors_of_recipes(error))
    assert (section.num_fp8, len(section.flat), section.fallbacks) == (2, 3, [])
    forward, input_grad, _ = section.products[SITE].values()
    assert (forward.recipe, forward.error, forward.reason) == ("fp8_row", 0.1, "")
    assert (input_grad.recipe, input_grad.error, input_grad.reason) == ("bf16", 0.001, reason)
    assert "<svg" in section.figure


def test_products_that_fell_back_are_listed() -> None:
    changed = CHOSEN.with_fallback(SITE, "weight_grad")
    section = PrecisionSection.of_map(FIRST, changed, [])
    (product,) = section.fallbacks
    assert (product.direction, product.recipe, product.fell_back_from) == (
        "weight_grad", "bf16", "fp8_row",
    )  # fmt: skip
    assert product.reason == "fp8_row became too inaccurate in training"
    assert section.num_fp8 == 1 and not section.figure, "nothing was probed"


def test_errors_are_read_as_written_and_a_lake_without_a_gem_has_no_section(
    lake: Lake, tmp_path: Path
) -> None:
    errors = errors_of_recipes(0.3)
    assert read_errors(str(tmp_path)) == []
    write_errors(str(tmp_path), errors)
    assert read_errors(str(tmp_path)) == errors
    assert precision_section(Lake(str(tmp_path), lake.spec), LAST) is None
