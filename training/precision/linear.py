"""Linear layers whose three matrix products each have a recipe.

B rows, K inputs, N outputs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from etl.errors import UserError
from training.precision.precision_map import PrecisionMap, RecipeName, SiteRecipes
from training.precision.recipes import product

# Modules whose linear layers may have low precision; heads, gates, norms and tables never do.
log = logging.getLogger(__name__)
PRECISION_MODULES = ("interaction", "history.encoder", "trunk")


# Operators, not an autograd function, so that a compiler calls them without looking into them.
@torch.library.custom_op("gemline::recipe_product", mutates_args=())
def recipe_product(a: Tensor, b: Tensor, recipe: str, a_is_gradient: bool) -> Tensor:
    """A B^T (M, N) of A (M, K) and B (N, K) by a recipe; B is no gradient."""
    return product(a, b, cast(RecipeName, recipe), (a_is_gradient, False))


@recipe_product.register_fake
def _fake_recipe_product(a: Tensor, b: Tensor, _recipe: str, _a_is_gradient: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op("gemline::linear_product", mutates_args=())
def linear_product(
    x: Tensor, weight: Tensor, forward: str, _input_grad: str, _weight_grad: str
) -> Tensor:
    """X W^T (B, N) of X (B, K) and W (N, K), with the recipes of its directions."""
    return product(x, weight, cast(RecipeName, forward), (False, False))


@linear_product.register_fake
def _fake_linear_product(
    x: Tensor, weight: Tensor, _forward: str, _input_grad: str, _weight_grad: str
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, _, *ctx.recipes = inputs
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    (input_grad, weight_grad), of_input, of_weight = ctx.recipes, None, None
    gradient = gradient.contiguous()
    if ctx.needs_input_grad[0]:
        of_input = recipe_product(gradient, weight.t().contiguous(), input_grad, True)
    if ctx.needs_input_grad[1]:
        transposed = gradient.t().contiguous()
        of_weight = recipe_product(transposed, x.t().contiguous(), weight_grad, True)
        of_weight = of_weight.to(weight.dtype)
    return of_input, of_weight, None, None, None


linear_product.register_autograd(_linear_backward, setup_context=_keep_inputs)


def precise_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipes: SiteRecipes) -> Tensor:
    """X W^T + b, as by `torch.nn.functional.linear`; X may have further dimensions in front.

    With autocast, X and the result have its dtype.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = linear_product(
        rows, weight, recipes.forward, recipes.input_grad, recipes.weight_grad
    )
    result = result.reshape(*x.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias.to(result.dtype)


def linear_sites(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that may have low precision, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(PRECISION_MODULES):
            yield name, module


@contextmanager
def forward_hooks(layers: Mapping[str, nn.Linear], hook_of: Callable[[str], Any]) -> Iterator[None]:
    """Within the context, layers call the hook of their name after each forward pass."""
    handles = [layer.register_forward_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def apply_precision_map(model: nn.Module, precision_map: PrecisionMap) -> None:
    """Give the linear layers of a model the recipes of a map, in place; names do not change.

    Layers that the map lacks do not change. Layers that the model lacks are logged.

    Raises:
        UserError: The map is that of another model: all of its layers are missing.
    """
    layers = dict(linear_sites(model))
    if missing := sorted(precision_map.sites.keys() - layers.keys()):
        text = (
            f"the precision map has {len(missing)} of {len(precision_map.sites)} layers that the "
            f"model lacks, such as {missing[0]}: run `gemline train probe` on a GEM of this "
            "configuration"
        )
        if len(missing) == len(precision_map.sites):
            raise UserError(text)
        log.warning(text)
    for name, layer in layers.items():
        recipes = precision_map.sites.get(name)
        if recipes is not None and not recipes.is_fp32:
            set_recipes(layer, recipes)


def set_recipes(layer: nn.Linear, recipes: SiteRecipes) -> None:
    """Compute a linear layer by recipes from now on, in place."""
    layer.__dict__["forward"] = partial(_forward, layer, recipes)


def _forward(layer: nn.Linear, recipes: SiteRecipes, x: Tensor) -> Tensor:
    return precise_linear(x, layer.weight, layer.bias, recipes)
