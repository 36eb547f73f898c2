"""Carries the weights of a trained GEM over to a GEM of changed features, by name."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from etl.errors import UserError
from training.model.alignment import SEPARATOR
from training.model.feature_axes import INDEX, Axes, Axis, feature_axes, list_names
from training.model.gem import Gem

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class CarryOver:
    """The correspondence between the parameters of two models.

    `changed` are the columns that both have but read differently: each counts as another feature of
    the same name. `numbers` counts the numbers that were carried over, added and dropped. New
    positions start as a template, where their axis has one, only if `uses_templates`.
    """

    old: Gem
    new: Gem
    changed: Collection[str] = ()
    numbers: Counter[str] = field(default_factory=Counter)
    uses_templates: bool = True

    def without_counts(self) -> "CarryOver":
        """The same correspondence, for further state of the same parameters."""
        return replace(self, numbers=Counter())

    def of_optimizer(self) -> "CarryOver":
        """The same correspondence for the state of an optimizer, which no position starts with."""
        return replace(self, numbers=Counter(), uses_templates=False)

    def carried(self, old: Tensors, new: Tensors) -> dict[str, Tensor]:
        """Whether each position of the new tensors, by parameter name, has the value of an old one.

        Args:
            old: Tensors of the old model.
            new: Tensors of the new model.
        """
        ones = {name: torch.ones_like(values) for name, values in old.items()}
        zeros = {name: torch.zeros_like(values) for name, values in new.items()}
        is_carried = self.of_optimizer().tensors(ones, zeros)
        return {name: values.bool() for name, values in is_carried.items()}

    def tensors(self, old: Tensors, new: Tensors, prefix: str = "") -> dict[str, Tensor]:
        """The tensors of the new model, with the values of the old one where it has them.

        Args:
            old: Tensors by parameter name, with a `prefix`.
            new: Their values in a new model.
            prefix: What precedes the names of parameters.

        Raises:
            UserError: The models have other sizes, not only other features.
        """
        old_axes, new_axes = feature_axes(self.old), feature_axes(self.new)
        old_names = self._names(self.old, old, prefix)
        carried = dict(new)
        found = 0
        for identity, key in self._names(self.new, new, prefix).items():
            if identity not in old_names:
                continue
            source = old_names[identity]
            carried[key], kept = self._carry(
                key,
                (old[source], new[key]),
                (old_axes.get(source.removeprefix(prefix)), new_axes.get(key.removeprefix(prefix))),
            )
            found += kept
        total = sum(values.numel() for values in carried.values())
        self.numbers["carried"] += found
        self.numbers["added"] += total - found
        self.numbers["dropped"] += sum(values.numel() for values in old.values()) - found
        return carried

    def _names(self, gem: Gem, tensors: Tensors, prefix: str) -> dict[str, str]:
        """The key of each tensor by its identity; without modules of changed columns.

        A module of a list that has one for each feature is identified by the feature's name.
        """
        lists = list_names(gem)
        names = {}
        for key in tensors:
            identity = key.removeprefix(prefix)
            for module, features in lists.items():
                if identity.startswith(f"{module}."):
                    number, _, rest = identity.removeprefix(f"{module}.").partition(".")
                    identity = f"{module}.{features[int(number)]}.{rest}"
            if not set(identity.split(".")) & set(self.changed):
                names[identity] = key
        return names

    def _carry(
        self,
        key: str,
        values: tuple[Tensor, Tensor],
        axes: tuple[Axes | None, Axes | None],
    ) -> tuple[Tensor, int]:
        """The new one of two tensors with the values of the old one, and how many those are."""
        old, new = values
        if not new.dim():  # a number of steps
            return old.clone(), 1
        by_dim = [names or (INDEX,) * new.dim() for names in axes]
        result, selected, positions = new.clone(), old, []
        for dim, (before, after) in enumerate(zip(*by_dim, strict=True)):
            if before is None or after is None:
                _check_same_size(key, old, new, dim)
                positions.append(torch.arange(new.shape[dim]))
                continue
            source, target = self._common(before, after)
            if after.is_input:
                is_new = torch.ones(len(after.names), dtype=torch.bool)
                is_new[target] = False
                result.index_fill_(dim, is_new.nonzero().flatten(), 0.0)
            selected = selected.index_select(dim, source)
            positions.append(target)
        result[torch.meshgrid(*positions, indexing="ij")] = selected
        for dim, after in enumerate(by_dim[1]):
            if self.uses_templates and after is not None and after.template is not None:
                added = sorted(set(range(new.shape[dim])) - set(positions[dim].tolist()))
                source = torch.full((len(added),), after.names.index(after.template))
                result.index_copy_(
                    dim, torch.tensor(added).long(), result.index_select(dim, source)
                )
        return result, selected.numel()

    def _common(self, old: Axis, new: Axis) -> tuple[Tensor, Tensor]:
        """Positions in both axes of the names that they share."""
        position = {name: number for number, name in enumerate(old.names)}
        shared = [
            (position[name], number)
            for number, name in enumerate(new.names)
            if name in position and not set(name.split(SEPARATOR)) & set(self.changed)
        ]
        both = torch.tensor(shared, dtype=torch.int64).view(-1, 2)
        return both[:, 0], both[:, 1]


def _check_same_size(key: str, old: Tensor, new: Tensor, dim: int) -> None:
    if old.shape[dim] != new.shape[dim]:
        raise UserError(
            f"{key} has {old.shape[dim]} positions in the trained GEM, and {new.shape[dim]} in the "
            "new one: other features can be carried over, other widths cannot, because LayerNorm "
            "over a wider layer changes all predictions. Keep the sizes, or train a new GEM"
        )
