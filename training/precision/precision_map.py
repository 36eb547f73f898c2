"""The map of recipes: for each linear layer and direction, how its product is computed."""

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists, resolve_uri

Direction = Literal["forward", "input_grad", "weight_grad"]
RecipeName = Literal[
    "fp32", "bf16",
    "fp8_tensor", "fp8_tensor_e4m3", "fp8_tensor_e5m2",
    "fp8_row", "fp8_row_e5m2",
    "fp8_block", "fp8_block_e5m2",
]  # fmt: skip
DIRECTIONS: tuple[Direction, ...] = ("forward", "input_grad", "weight_grad")
HIGH_PRECISION: RecipeName = "bf16"  # of products for which FP8 is too slow or too inaccurate


class SiteRecipes(StrictModel):
    """The recipes of a layer by direction."""

    forward: RecipeName = "fp32"
    input_grad: RecipeName = "fp32"
    weight_grad: RecipeName = "fp32"

    @property
    def is_fp32(self) -> bool:
        """Whether no direction has another recipe."""
        return {self.forward, self.input_grad, self.weight_grad} == {"fp32"}

    def of(self, direction: Direction) -> RecipeName:
        """The recipe of a direction."""
        recipe: RecipeName = getattr(self, direction)
        return recipe

    @property
    def fp8_directions(self) -> tuple[Direction, ...]:
        """The directions in FP8."""
        return tuple(d for d in DIRECTIONS if self.of(d).startswith("fp8"))


class PrecisionMap(StrictModel):
    """Recipes by layer; layers that are not named are computed in fp32.

    `chosen_by` says whether speeds were measured (`speed`, with the card's name as `device`), or
    only errors were (`error`). `fallbacks` has the chosen recipes of layers of which a product
    became too inaccurate and is computed in high precision since; older maps lack these layers in
    `sites`.
    """

    sites: dict[str, SiteRecipes]
    chosen_by: str
    device: str = ""
    fallbacks: dict[str, SiteRecipes] = {}

    @classmethod
    def uniform(cls, names: Iterable[str], recipe: RecipeName) -> Self:
        """The same recipe for all directions of all layers."""
        recipes = SiteRecipes(forward=recipe, input_grad=recipe, weight_grad=recipe)
        return cls(sites=dict.fromkeys(names, recipes), chosen_by="uniform")

    def with_fallbacks_of(self, previous: "PrecisionMap | None") -> "PrecisionMap":
        """`previous` if it is this map with products that fell back since; else this map."""
        if previous is not None and previous.sites | previous.fallbacks == self.sites:
            return previous
        return self

    def with_fallback(self, name: str, direction: Direction) -> "PrecisionMap":
        """The map with a product in high precision; `fallbacks` keeps what was chosen."""
        recipes = self.sites[name]
        changed = recipes.model_copy(update={direction: HIGH_PRECISION})
        return self.model_copy(
            update={
                "sites": {**self.sites, name: changed},
                "fallbacks": {name: recipes, **self.fallbacks},
            }
        )

    @property
    def fp8_share(self) -> float:
        """Share of the products (layers times directions) in FP8."""
        products = len(DIRECTIONS) * len(self.sites)
        in_fp8 = sum(len(site.fp8_directions) for site in self.sites.values())
        return in_fp8 / products if products else 0.0

    def save(self, lake: str) -> None:
        """Write the map of a lake, as JSON."""
        atomic_io.write_text(precision_map_path(lake), self.model_dump_json(indent=1) + "\n")


def precision_map_path(lake: str) -> StoragePath:
    """The file of the map that `gemline train probe` writes."""
    return resolve_uri(lake, "models", "gem", "precision_map.json")


def read_precision_map(lake: str) -> PrecisionMap:
    """The map of a lake; raises UserError if it is missing or cannot be read."""
    path = precision_map_path(lake)
    text = read_text_if_exists(path)
    if text is None:
        raise UserError(
            f"{path} is missing: train a GEM with --compute.probe-every 100, and run "
            "`gemline train probe`"
        )
    try:
        return PrecisionMap.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path} is not a map of recipes: {key}: {first['msg']}; write it again with `gemline "
            "train probe`"
        ) from None
