"""The report's section on FP8: how each product of GEM's linear layers is computed, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etl.tables.lake import Lake
from ranking.report.figures import PANEL_WIDTH, to_svg
from training.precision.dispatch import MAX_MERE
from training.precision.errors import RecipeError
from training.precision.precision_map import (
    DIRECTIONS,
    Direction,
    PrecisionMap,
    RecipeName,
)
from training.precision.recipes import RECIPES
from training.trainer.checkpoint import list_checkpoints
from training.trainer.probing import read_errors

MIN_SHOWN = 1e-4  # errors in the figure are at least this
CANDIDATE, IN_FP8, NOT_IN_FP8 = "#bbbbbb", "#1b7f5c", "#c2571a"


@dataclass(frozen=True)
class SiteProduct:
    """A layer's product in one direction: its recipe, and what was measured of others.

    Attributes:
        fp8_errors: MERE of each recipe of FP8; empty if the layer was not probed.
        fell_back_from: The recipe that the safety valve replaced, if it did.
    """

    site: str
    direction: Direction
    recipe: RecipeName
    error: float | None
    fp8_errors: dict[RecipeName, float]
    fell_back_from: RecipeName | None
    is_timed: bool

    @property
    def is_fp8(self) -> bool:
        """Whether it is computed in FP8."""
        return self.recipe.startswith("fp8")

    @property
    def reason(self) -> str:
        """Why it is not computed in FP8; empty if it is, or if nothing was measured."""
        if self.fell_back_from:
            return f"{self.fell_back_from} became too inaccurate in training"
        if self.is_fp8 or not self.fp8_errors:
            return ""
        smallest = min(self.fp8_errors.values())
        if smallest > MAX_MERE:
            return f"the error of FP8 is {smallest:.2f}"
        accurate = [name for name, mere in self.fp8_errors.items() if mere <= MAX_MERE]
        if self.is_timed and all(RECIPES[name].is_emulated for name in accurate):
            return "no kernel for the recipes of FP8 that are accurate"
        return "FP8 is not faster" if self.is_timed else ""


@dataclass(frozen=True)
class PrecisionSection:
    """The products of the GEM that was trained until a day, by layer and direction.

    `device` is the card whose speeds were measured; empty if only errors were.
    """

    day: date
    device: str
    products: dict[str, dict[Direction, SiteProduct]]

    @classmethod
    def of_map(
        cls, day: date, precision_map: PrecisionMap, errors: Sequence[RecipeError]
    ) -> "PrecisionSection":
        """The products of a map, with the errors of the last probe."""
        meres: dict[tuple[str, Direction], dict[RecipeName, float]] = {}
        for error in errors:
            meres.setdefault((error.site, error.direction), {})[error.recipe] = error.mere
        products = {
            site: {
                direction: _product(
                    site, direction, precision_map, meres.get((site, direction), {})
                )
                for direction in DIRECTIONS
            }
            for site in precision_map.sites
        }
        return cls(day, precision_map.device, products)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions, in the order of the table."""
        return DIRECTIONS

    @property
    def flat(self) -> list[SiteProduct]:
        """All products."""
        return [product for site in self.products.values() for product in site.values()]

    @property
    def num_fp8(self) -> int:
        """How many products are computed in FP8."""
        return sum(product.is_fp8 for product in self.flat)

    @property
    def fallbacks(self) -> list[SiteProduct]:
        """The products that the safety valve returned to high precision."""
        return [product for product in self.flat if product.fell_back_from]

    @property
    def figure(self) -> str:
        """Errors by layer and direction as an SVG; empty if nothing was probed."""
        return plot_errors(self) if any(product.fp8_errors for product in self.flat) else ""


def precision_section(lake: Lake, until: date) -> PrecisionSection | None:
    """The section on the latest GEM up to a day; None if it has no map of recipes."""
    manifests = [m for _, m in list_checkpoints(lake.root, None) if m.spec_hash == lake.spec.hash]
    trained = [m for m in manifests if m.complete and m.trained_until <= until]
    if not trained or trained[-1].precision_map is None:
        return None
    errors = read_errors(lake.root)
    return PrecisionSection.of_map(trained[-1].trained_until, trained[-1].precision_map, errors)


def _product(
    site: str, direction: Direction, precision_map: PrecisionMap, meres: dict[RecipeName, float]
) -> SiteProduct:
    recipe, chosen = precision_map.sites[site].of(direction), precision_map.fallbacks.get(site)
    before = chosen.of(direction) if chosen else recipe
    return SiteProduct(
        site=site,
        direction=direction,
        recipe=recipe,
        error=meres.get(recipe),
        fp8_errors={name: mere for name, mere in meres.items() if name.startswith("fp8")},
        fell_back_from=before if before != recipe else None,
        is_timed=precision_map.chosen_by == "speed",
    )


def plot_errors(section: PrecisionSection) -> str:
    """MERE of the recipes of FP8 by layer, a panel for each direction, and the bound."""
    figure = Figure(figsize=(PANEL_WIDTH * len(DIRECTIONS), 0.2 * len(section.products) + 1.1))
    panels = figure.subplots(1, len(DIRECTIONS), sharex=True, sharey=True)
    for axis, direction in zip(panels, DIRECTIONS, strict=True):
        for y, by_direction in enumerate(reversed(section.products.values())):
            _plot_product(axis, y, by_direction[direction])
        axis.axvline(MAX_MERE, ls=":", color="#555555")
        axis.set_xscale("log")
        axis.set_title(direction.replace("_", " "))
        axis.set_xlabel("MERE")
    panels[0].set_yticks(range(len(section.products)), list(section.products)[::-1], fontsize=7)
    figure.tight_layout()
    return to_svg(figure)


def _plot_product(axis: Axes, y: int, product: SiteProduct) -> None:
    """All recipes of FP8 in gray; the one in use, or a cross at the best if none is in use."""
    if not product.fp8_errors:
        return
    shown = {name: max(mere, MIN_SHOWN) for name, mere in product.fp8_errors.items()}
    axis.plot(list(shown.values()), [y] * len(shown), ".", ms=4, color=CANDIDATE)
    if product.recipe in shown:
        axis.plot([shown[product.recipe]], [y], "o", ms=4, color=IN_FP8)
    elif not product.is_fp8:
        replaced = product.fell_back_from
        error = shown[replaced] if replaced in shown else min(shown.values())
        axis.plot([error], [y], "x", ms=5, color=NOT_IN_FP8)
