"""Dispatch: for each layer and direction the fastest recipe within bounds of error and speed-up."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from training.precision.errors import RecipeError
from training.precision.precision_map import (
    DIRECTIONS,
    HIGH_PRECISION,
    Direction,
    PrecisionMap,
    RecipeName,
    SiteRecipes,
)
from training.precision.recipes import RECIPES, product

MAX_MERE = 0.2  # LoKA's bound
MIN_SPEEDUP = 1.05  # over bf16, casts included
TIMED_STEPS = 20
Speedups = Mapping[tuple[str, Direction, RecipeName], float]


@dataclass(frozen=True)
class Choice:
    """The recipe of a layer and direction, its error, and the `reason` if it is not FP8."""

    site: str
    direction: Direction
    recipe: RecipeName
    mere: float
    speedup: float | None
    reason: str = ""


def choose_recipes(errors: Iterable[RecipeError], speedups: Speedups | None = None) -> list[Choice]:
    """The recipe of each layer and direction.

    Without measured speeds the FP8 recipe with the smallest error is chosen, if it is within the
    bound. With speeds, those of a GPU, recipes without a kernel are never chosen.
    """
    by_product: dict[tuple[str, Direction], list[RecipeError]] = {}
    for error in errors:
        by_product.setdefault((error.site, error.direction), []).append(error)
    return [_choose(candidates, speedups) for candidates in by_product.values()]


def _choose(candidates: Sequence[RecipeError], speedups: Speedups | None) -> Choice:
    site, direction = candidates[0].site, candidates[0].direction
    high = next(error for error in candidates if error.recipe == HIGH_PRECISION)
    fp8 = [error for error in candidates if RECIPES[error.recipe].is_fp8]
    accurate = [error for error in fp8 if error.mere <= MAX_MERE]
    if not accurate:
        smallest = min(error.mere for error in fp8)
        reason = f"the error of FP8 is {smallest:.2f}, at most {MAX_MERE}"
        return Choice(site, direction, HIGH_PRECISION, high.mere, None, reason)
    if speedups is None:
        best = min(accurate, key=lambda error: error.mere)
        return Choice(site, direction, best.recipe, best.mere, None)

    def speedup(error: RecipeError) -> float:
        return speedups[site, direction, error.recipe]

    timed = [
        error
        for error in accurate
        if (site, direction, error.recipe) in speedups and not RECIPES[error.recipe].is_emulated
    ]
    if not timed:
        names = ", ".join(error.recipe for error in accurate)
        reason = f"no kernel for {names}, the only recipes of FP8 within the bound"
        return Choice(site, direction, HIGH_PRECISION, high.mere, None, reason)
    best = max(timed, key=speedup)
    if speedup(best) < MIN_SPEEDUP:
        reason = f"FP8 has {speedup(best):.2f} times its speed"
        return Choice(site, direction, HIGH_PRECISION, high.mere, speedup(best), reason)
    return Choice(site, direction, best.recipe, best.mere, speedup(best))


def precision_map(choices: Iterable[Choice], device: str = "") -> PrecisionMap:
    """The map of the chosen recipes."""
    recipes: dict[str, dict[str, RecipeName]] = {}
    for choice in choices:
        recipes.setdefault(choice.site, {})[choice.direction] = choice.recipe
    return PrecisionMap(
        sites={name: SiteRecipes(**by_direction) for name, by_direction in recipes.items()},
        chosen_by="speed" if device else "error",
        device=device,
    )


def speed_warning(chosen: PrecisionMap, device: str) -> str | None:
    """A warning of a map whose speeds were not measured on a card of this name; else None."""
    if chosen.device == device:
        return None
    recipes = {site.of(direction) for site in chosen.sites.values() for direction in DIRECTIONS}
    emulated = sorted(name for name in recipes if RECIPES[name].is_emulated)
    slow = f", and {', '.join(emulated)} have no kernel and are emulated" if emulated else ""
    return (
        f"FP8: the map of recipes was chosen on {chosen.device or 'a CPU'}, so that their speeds "
        f"on {device} are unknown{slow}: run `gemline train probe` on this machine"
    )


def measure_speedups(
    layers: Mapping[str, nn.Linear],
    rows: Mapping[str, int],
    recipes: Sequence[RecipeName],
    device: torch.device,
) -> Speedups:
    """Seconds of bf16 over those of each recipe, casts included, by layer and direction.

    Layers of the same shape and number of `rows` are measured once.
    """
    by_shape: dict[tuple[int, int, int], dict[tuple[Direction, RecipeName], float]] = {}
    speedups = {}
    for name, layer in layers.items():
        shape = layer.out_features, layer.in_features, rows[name]
        if shape not in by_shape:
            by_shape[shape] = _speedups_of_shape(*shape, recipes, device)
        for (direction, recipe), value in by_shape[shape].items():
            speedups[name, direction, recipe] = value
    return speedups


def _speedups_of_shape(
    outputs: int, inputs: int, rows: int, recipes: Sequence[RecipeName], device: torch.device
) -> dict[tuple[Direction, RecipeName], float]:
    x, weight, gradient = (
        torch.randn(shape, device=device)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    operands = {
        "forward": (x, weight),
        "input_grad": (gradient, weight.t().contiguous()),
        "weight_grad": (gradient.t().contiguous(), x.t().contiguous()),
    }
    result = {}
    for direction in DIRECTIONS:
        a, b = operands[direction]
        gradients = direction != "forward", False
        seconds = {
            recipe: _seconds_of(a, b, recipe, gradients) for recipe in (HIGH_PRECISION, *recipes)
        }
        for recipe in recipes:
            result[direction, recipe] = seconds[HIGH_PRECISION] / seconds[recipe]
    return result


def _seconds_of(
    a: torch.Tensor,
    b: torch.Tensor,
    recipe: RecipeName,
    gradients: tuple[bool, bool],
) -> float:
    for _ in range(3):
        product(a, b, recipe, gradients)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        product(a, b, recipe, gradients)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED_STEPS
