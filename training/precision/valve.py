"""The safety valve: layers whose recipe errs too much in training are computed in fp32 again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from training.precision.errors import mean_relative_error
from training.precision.linear import linear_sites
from training.precision.precision_map import PrecisionMap, RecipeName
from training.precision.recipes import product

CHECK_EVERY = 100  # steps
CHECKED_ROWS = 256
FALLBACK_MERE = 0.4  # twice the bound of Dispatch
log = logging.getLogger(__name__)


class SafetyValve:
    """Compares the forward products of FP8 layers with fp32 in every CHECK_EVERY-th step.

    A layer whose error exceeds FALLBACK_MERE is computed in fp32 until the training is started
    again, in all directions, and this is logged.
    """

    def __init__(self, model: nn.Module, precision_map: PrecisionMap) -> None:
        self.recipes: dict[str, RecipeName] = {
            name: site.forward
            for name, site in precision_map.sites.items()
            if site.forward.startswith("fp8")
        }
        self.layers = {name: m for name, m in linear_sites(model) if name in self.recipes}

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Check the layers with what they read within the context, if the step is due."""
        if step % CHECK_EVERY:
            yield
            return
        errors: dict[str, float] = {}
        handles = [
            layer.register_forward_hook(self._checker(name, errors))
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name in [name for name, error in errors.items() if not error <= FALLBACK_MERE]:
            self.layers.pop(name).__dict__.pop("forward")
            log.warning(
                "%s: %s has error %.2f, at most %.1f; the layer is computed in fp32 from now on",
                name,
                self.recipes[name],
                errors[name],
                FALLBACK_MERE,
            )

    def _checker(self, name: str, errors: dict[str, float]) -> Any:
        def check(layer: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            rows = inputs[0].detach().reshape(-1, layer.in_features)[:CHECKED_ROWS]
            weight = layer.weight.detach()
            reference = product(rows, weight, "fp32", (False, False))
            output = product(rows, weight, self.recipes[name], (False, False))
            errors[name] = float(mean_relative_error(output, reference)) if len(rows) else 0.0

        return check
