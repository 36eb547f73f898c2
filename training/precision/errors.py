"""Errors of recipes on inputs that are drawn from probed distributions, and on random normals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.precision.precision_map import DIRECTIONS, Direction, RecipeName
from training.precision.probe import Probe, SiteProbe
from training.precision.recipes import RECIPES, product

ROWS = 256  # of inputs and of gradients in a pair
PAIRS = 8  # drawn inputs and weights of a layer
RELATIVE_EPSILON = 1e-2  # of the root mean square of a row of outputs, in MERE
CANDIDATES: tuple[RecipeName, ...] = (
    "bf16",
    *(name for name, recipe in RECIPES.items() if recipe.is_fp8),
)


@dataclass(frozen=True)
class RecipeError:
    """How far a recipe's product is from that in fp32, on average over pairs.

    Attributes:
        mere: Mean of |output - reference| / (|reference| + epsilon).
        frobenius: Norm of the difference over that of the reference.
        cosine: Cosine of output and reference.
        random_mere: `mere` with standard normal inputs, gradients and weights instead.
    """

    site: str
    direction: Direction
    recipe: RecipeName
    mere: float
    frobenius: float
    cosine: float
    random_mere: float


@dataclass(frozen=True)
class Operands:
    """Inputs (B, K), weights (N, K) and output gradients (B, N) of a layer."""

    inputs: Tensor
    weight: Tensor
    gradients: Tensor

    @classmethod
    def probed(cls, site: SiteProbe, generator: torch.Generator) -> "Operands":
        """Operands drawn from the distributions of a layer."""
        return cls(
            site.inputs.sample(ROWS, generator),
            site.weights.sample(generator),
            site.gradients.sample(ROWS, generator),
        )

    @classmethod
    def random(cls, site: SiteProbe, generator: torch.Generator) -> "Operands":
        """Standard normal operands of the same shapes."""
        outputs, inputs = site.weights.shape
        shapes = (ROWS, inputs), (outputs, inputs), (ROWS, outputs)
        return cls(*(torch.randn(shape, generator=generator) for shape in shapes))

    def of(self, direction: Direction) -> tuple[Tensor, Tensor]:
        """The operands A and B of a direction's product A B^T."""
        if direction == "forward":
            return self.inputs, self.weight
        if direction == "input_grad":
            return self.gradients, self.weight.t()
        return self.gradients.t(), self.inputs.t()


def measure_errors(
    probe: Probe, recipes: Sequence[RecipeName] = CANDIDATES, seed: int = 0
) -> Iterator[RecipeError]:
    """The errors of recipes for each layer that was probed, and direction."""
    generator = torch.Generator().manual_seed(seed)
    for name, site in probe.by_name():
        if site.inputs.count < 2 or site.gradients.count < 2:
            continue
        probed = [Operands.probed(site, generator) for _ in range(PAIRS)]
        random = [Operands.random(site, generator) for _ in range(PAIRS)]
        for direction in DIRECTIONS:
            for recipe in recipes:
                errors = torch.stack([_errors(pair, direction, recipe) for pair in probed]).mean(0)
                of_random = torch.stack([_errors(p, direction, recipe) for p in random]).mean(0)
                mere, frobenius, cosine = errors.tolist()
                yield RecipeError(
                    name, direction, recipe, mere, frobenius, cosine, float(of_random[0])
                )


def _errors(operands: Operands, direction: Direction, recipe: RecipeName) -> Tensor:
    """MERE, relative Frobenius norm and cosine (3)."""
    a, b = operands.of(direction)
    gradients = direction != "forward", False
    reference, output = product(a, b, "fp32", gradients), product(a, b, recipe, gradients)
    measures = mean_relative_error, relative_frobenius_error, cosine
    return torch.stack([measure(output, reference) for measure in measures])


def relative_frobenius_error(output: Tensor, reference: Tensor) -> Tensor:
    """Norm of the difference over that of the reference."""
    error: Tensor = (output - reference).norm() / reference.norm().clamp(min=1e-30)
    return error


def cosine(output: Tensor, reference: Tensor) -> Tensor:
    """Cosine of output and reference as vectors; 0 if one is 0."""
    norms: Tensor = output.norm() * reference.norm()
    return (output * reference).sum() / norms.clamp(min=1e-30)


def mean_relative_error(output: Tensor, reference: Tensor) -> Tensor:
    """MERE: the mean of |output - reference| / (|reference| + epsilon)."""
    epsilon = RELATIVE_EPSILON * reference.square().mean(-1, keepdim=True).sqrt()
    return ((output - reference).abs() / (reference.abs() + epsilon).clamp(min=1e-30)).mean()
