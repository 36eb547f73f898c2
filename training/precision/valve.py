"""The safety valve: products whose quantization error is too large are computed without FP8."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.precision.errors import Operands, mean_relative_error
from training.precision.linear import forward_hooks, linear_sites, set_recipes
from training.precision.precision_map import HIGH_PRECISION, Direction, PrecisionMap
from training.precision.recipes import product

CHECK_EVERY = 100  # steps
CHECKED_ROWS = 256
FALLBACK_MERE = 0.4  # twice the bound of Dispatch
Product = tuple[str, Direction]
log = logging.getLogger(__name__)


class SafetyValve:
    """Compares the products in FP8 with fp32 in every CHECK_EVERY-th step.

    A product whose error exceeds FALLBACK_MERE on some process is computed in high precision from
    then on, and so the map says; this is logged. The other directions of its layer do not change.
    """

    def __init__(self, model: nn.Module, precision_map: PrecisionMap) -> None:
        self.precision_map = precision_map
        self.layers = dict(linear_sites(model))
        self.layers = {name: self.layers[name] for name, _ in self.products}

    @property
    def products(self) -> list[Product]:
        """Layer and direction of each product in FP8, in the same order on all processes."""
        sites = self.precision_map.sites
        watched = [name for name in self.layers if name in sites]
        return [(name, direction) for name in watched for direction in sites[name].fp8_directions]

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Check what layers compute within the context, if the step is due.

        Products of gradients are checked if the backward pass is within the context. In such a step
        compiled layers run uncompiled, because compiled code calls no hooks.
        """
        if step % CHECK_EVERY:
            yield
            return
        errors: dict[Product, float] = {}
        with (
            forward_hooks(self.layers, lambda name: self._checker(name, errors)),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
        for (name, direction), error in self._largest_errors(errors).items():
            if not error <= FALLBACK_MERE:
                self._fall_back(name, direction, error)

    def _largest_errors(self, errors: dict[Product, float]) -> dict[Product, float]:
        """The largest error of each product over all processes; a collective call."""
        products = self.products
        if not products:  # on all processes alike
            return {}
        largest = torch.tensor([errors.get(each, 0.0) for each in products])
        if dist.is_initialized() and dist.get_world_size() > 1:
            largest = largest.to(next(iter(self.layers.values())).weight.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return dict(zip(products, largest.tolist(), strict=True))

    def _fall_back(self, name: str, direction: Direction, error: float) -> None:
        log.warning(
            "%s, %s: %s has error %.2f, at most %.1f; this product is computed in %s from now on",
            name,
            direction,
            self.precision_map.sites[name].of(direction),
            error,
            FALLBACK_MERE,
            HIGH_PRECISION,
        )
        self.precision_map = self.precision_map.with_fallback(name, direction)
        set_recipes(self.layers[name], self.precision_map.sites[name])
        self.layers = {name: self.layers[name] for name, _ in self.products}

    def _checker(self, name: str, errors: dict[Product, float]) -> Any:
        """A forward hook that checks the forward product, and those of gradients once known."""
        directions = self.precision_map.sites[name].fp8_directions
        of_gradients = [direction for direction in directions if direction != "forward"]

        def check(layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows = inputs[0].detach().reshape(-1, layer.in_features)
            chosen = _checked_rows(rows)
            x = rows[chosen]
            if "forward" in directions:
                operands = Operands(x, layer.weight.detach(), x[:0])
                errors[name, "forward"] = self._error(name, "forward", operands)

            def check_gradients(gradients: tuple[Tensor, ...]) -> None:
                gradient = gradients[0].detach().reshape(-1, layer.out_features)
                for direction in of_gradients:
                    # The gradient of the weight needs the inputs, of which only some are kept.
                    own = chosen if direction == "weight_grad" else _checked_rows(gradient)
                    operands = Operands(x, layer.weight.detach(), gradient[own])
                    errors[name, direction] = self._error(name, direction, operands)

            # Hooks of the node follow those of the output, by which FSDP gathers weights.
            if of_gradients and output.grad_fn is not None:
                output.grad_fn.register_prehook(check_gradients)

        return check

    def _error(self, name: str, direction: Direction, operands: Operands) -> float:
        """MERE of a product on the rows of the step; 0 without rows."""
        if not len(operands.inputs):
            return 0.0
        a, b = (operand.contiguous() for operand in operands.of(direction))
        gradients = direction != "forward", False
        recipe = self.precision_map.sites[name].of(direction)
        reference, output = product(a, b, "fp32", gradients), product(a, b, recipe, gradients)
        return float(mean_relative_error(output, reference))


def _checked_rows(x: Tensor) -> Tensor:
    """The indexes of at most CHECKED_ROWS rows of x (B, W), evenly spaced, and of its largest one.

    The largest value of all rows is the scale of a tensor.
    """
    if len(x) <= CHECKED_ROWS:
        return torch.arange(len(x), device=x.device)
    spaced = torch.linspace(0, len(x) - 1, CHECKED_ROWS - 1, device=x.device).long()
    return torch.cat((spaced, x.abs().amax(1).argmax()[None]))
