"""Users and items as rows. n entities, d width."""

import torch
from torch import Tensor, nn

from training.ops.ragged import runs
from training.sequential.files import Attribute

SPREAD = 0.1  # of new rows: products of fainter ones are too small to learn from


class Values(nn.Module):
    """The mean row of the values that an entity has of an attribute."""

    values: Tensor
    offsets: Tensor

    def __init__(self, attribute: Attribute, width: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.from_numpy(attribute.values), persistent=False)
        self.register_buffer("offsets", torch.from_numpy(attribute.offsets), persistent=False)
        self.table = nn.EmbeddingBag(attribute.size, width, mode="mean")
        nn.init.normal_(self.table.weight, std=SPREAD)

    def forward(self, entities: Tensor) -> Tensor:
        """(n) to (n, d)."""
        first = self.offsets[entities]
        at, cuts = runs(first, self.offsets[entities + 1] - first)
        return self.table(self.values[at], cuts[:-1])


class Names(nn.Module):
    """A row of an entity's own, and one of each attribute."""

    def __init__(self, size: int, attributes: dict[str, Attribute], width: int) -> None:
        super().__init__()
        self.own = nn.Embedding(size, width)
        nn.init.normal_(self.own.weight, std=SPREAD)
        self.attributes = nn.ModuleList(Values(a, width) for a in attributes.values())
        self.rows = 1 + len(attributes)

    @property
    def tables(self) -> list[Tensor]:
        """The weights of single values."""
        return list(self.parameters())

    def forward(self, index: Tensor, entity: Tensor) -> Tensor:
        """Indexes of own rows and entities, both (n), to (n, rows, d)."""
        entities, at = torch.unique(entity, return_inverse=True)
        told = (values(entities)[at] for values in self.attributes)
        return torch.stack((self.own(index), *told), 1)
