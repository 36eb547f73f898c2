"""Linear layers whose three matrix products each have a recipe.

B rows, K inputs, N outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from training.precision.precision_map import PrecisionMap, SiteRecipes
from training.precision.recipes import product

# Modules of GEM with low precision; heads, gates, norms and tables stay in fp32.
PRECISION_MODULES = ("interaction", "history.encoder", "trunk")


class _LinearProducts(torch.autograd.Function):
    """X W^T, and its gradients; X is (B, K), W is (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipes: SiteRecipes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipes = recipes
        return product(x, weight, recipes.forward, (False, False))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipes, of_input, of_weight = ctx.recipes, None, None
        gradient = gradient.contiguous()
        if ctx.needs_input_grad[0]:
            transposed = weight.t().contiguous()
            of_input = product(gradient, transposed, recipes.input_grad, (True, False))
        if ctx.needs_input_grad[1]:
            of_weight = product(
                gradient.t().contiguous(), x.t().contiguous(), recipes.weight_grad, (True, False)
            )
        return of_input, of_weight, None


def precise_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipes: SiteRecipes) -> Tensor:
    """X W^T + b, as by `torch.nn.functional.linear`; X may have further dimensions in front."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = _LinearProducts.apply(rows, weight, recipes)  # type: ignore[no-untyped-call]
    result = result.reshape(*x.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


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

    Layers that the map lacks stay in fp32.
    """
    for name, layer in linear_sites(model):
        recipes = precision_map.sites.get(name)
        if recipes is not None and not recipes.is_fp32:
            layer.__dict__["forward"] = partial(_forward, layer, recipes)


def _forward(layer: nn.Linear, recipes: SiteRecipes, x: Tensor) -> Tensor:
    return precise_linear(x, layer.weight, layer.bias, recipes)
