"""The safety valve: layers whose quantization error is too large are computed without FP8."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.precision.errors import mean_relative_error
from training.precision.linear import forward_hooks, linear_sites
from training.precision.precision_map import PrecisionMap, RecipeName
from training.precision.recipes import product

CHECK_EVERY = 100  # steps
CHECKED_ROWS = 256
FALLBACK_MERE = 0.4  # twice the bound of Dispatch
log = logging.getLogger(__name__)


class SafetyValve:
    """Compares the forward products of FP8 layers with fp32 in every CHECK_EVERY-th step.

    A layer whose error exceeds FALLBACK_MERE on some process is computed without FP8 from then on,
    in all directions; it leaves the map, and this is logged.
    """

    def __init__(self, model: nn.Module, precision_map: PrecisionMap) -> None:
        self.precision_map = precision_map
        self.layers = {
            name: layer
            for name, layer in linear_sites(model)
            if name in precision_map.sites and self._recipe(name).startswith("fp8")
        }

    def _recipe(self, name: str) -> RecipeName:
        return self.precision_map.sites[name].forward

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Check the layers with what they read within the context, if the step is due.

        In such a step compiled layers run uncompiled, because compiled code calls no hooks.
        """
        if step % CHECK_EVERY:
            yield
            return
        errors: dict[str, float] = {}
        with (
            forward_hooks(self.layers, lambda name: self._checker(name, errors)),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
        for name, error in self._largest_errors(errors).items():
            if not error <= FALLBACK_MERE:
                self._fall_back(name, error)

    def _largest_errors(self, errors: dict[str, float]) -> dict[str, float]:
        """The largest error of each layer over all processes; a collective call."""
        if not self.layers:  # on all processes alike
            return {}
        largest = torch.tensor([errors.get(name, 0.0) for name in self.layers])
        if dist.is_initialized() and dist.get_world_size() > 1:
            largest = largest.to(next(iter(self.layers.values())).weight.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return dict(zip(list(self.layers), largest.tolist(), strict=True))

    def _fall_back(self, name: str, error: float) -> None:
        log.warning(
            "%s: %s has error %.2f, at most %.1f; the layer is computed without FP8 from now on",
            name,
            self._recipe(name),
            error,
            FALLBACK_MERE,
        )
        self.layers.pop(name).__dict__.pop("forward")
        sites, fallbacks = dict(self.precision_map.sites), dict(self.precision_map.fallbacks)
        fallbacks[name] = sites.pop(name)
        self.precision_map = self.precision_map.model_copy(
            update={"sites": sites, "fallbacks": fallbacks}
        )

    def _checker(self, name: str, errors: dict[str, float]) -> Any:
        def check(layer: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            rows = inputs[0].detach().reshape(-1, layer.in_features)[:CHECKED_ROWS]
            weight = layer.weight.detach()
            reference = product(rows, weight, "fp32", (False, False))
            output = product(rows, weight, self._recipe(name), (False, False))
            errors[name] = float(mean_relative_error(output, reference)) if len(rows) else 0.0

        return check
