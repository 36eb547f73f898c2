"""The space shared by what users like and what items are about."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from etl.sources.simulator.columns import Floats, Ints
from etl.sources.simulator.config import DAY_MS
from etl.sources.simulator.vocabulary import AGE_BANDS, COUNTRIES, SURFACES

DIMENSIONS = 12
CREATIVE_WIDTH = 16
SURFACE_CONTRAST = 0.5
SHORTEST_CYCLE_DAYS = 1.5
LONGEST_CYCLE_DAYS = 6.0
BASKET_SPREAD = 0.3


@dataclass(frozen=True)
class Taste:
    """Directions of the space, D wide, every one of variance 1 per dimension.

    emphasis    (surfaces, D)    how strongly each surface feels each dimension
    category    (categories, D)  centres
    age_band    (bands, D)       what people of an age share
    country     (countries, D)   what people of a country share
    period_ms   (categories,)    time between two purchases of the same person
    price       (categories,)    money
    creative    (D, 16)          map from what an item is about to what can be seen of it
    """

    emphasis: Floats
    category: Floats
    age_band: Floats
    country: Floats
    period_ms: Floats
    price: Floats
    creative: Floats

    @classmethod
    def draw(cls, categories: int, rng: np.random.Generator) -> Self:
        """A space with this many categories; their periods spread over the allowed range."""
        emphasis = np.exp(SURFACE_CONTRAST * gaussian((len(SURFACES), DIMENSIONS), rng))
        return cls(
            emphasis=emphasis / np.sqrt(np.mean(emphasis**2, axis=1, keepdims=True)),
            category=gaussian((categories, DIMENSIONS), rng),
            age_band=gaussian((len(AGE_BANDS), DIMENSIONS), rng),
            country=gaussian((len(COUNTRIES), DIMENSIONS), rng),
            period_ms=DAY_MS
            * rng.permutation(np.linspace(SHORTEST_CYCLE_DAYS, LONGEST_CYCLE_DAYS, categories)),
            price=np.exp(3 + 0.6 * rng.standard_normal(categories)),
            creative=gaussian((DIMENSIONS, CREATIVE_WIDTH), rng) / np.sqrt(DIMENSIONS),
        )

    def affinity(self, interest: Floats, surface: Ints, latent: Floats) -> Floats:
        """How much users like items on surfaces, about N(0, 1) over random pairs.

        interest (n, D), surface (n,), latent (n, k, D) -> (n, k)
        """
        felt = interest * self.emphasis[surface]
        return np.einsum("nd,nkd->nk", felt, latent) / np.sqrt(DIMENSIONS, dtype=np.float32)

    def basket(self, category: Ints, rng: np.random.Generator) -> Floats:
        """(n,) money spent in one purchase in each of the categories."""
        spread = np.exp(BASKET_SPREAD * rng.standard_normal(category.size))
        return np.round(self.price[category] * spread, 2)


def gaussian(shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Standard normal draws, single precision."""
    return rng.standard_normal(shape, dtype=np.float32)


def blend(share: float, common: Floats, own: Floats) -> Floats:
    """Sum of two unit-variance parts, `share` of its variance from the first."""
    return np.float32(np.sqrt(share)) * common + np.float32(np.sqrt(1 - share)) * own
