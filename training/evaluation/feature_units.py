"""Units of features, and batches without them or with them permuted.

B examples, R requests.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from etl.errors import UserError
from etl.spec.counters import CounterKey
from etl.spec.load import declared_names
from etl.spec.model import DataSpec
from features.schema import FeatureSchema, feature_schema
from training.data.batch import Batch

Tensors = dict[str, Tensor]
SAME_CORRELATION = 0.9


@dataclass(frozen=True)
class FeatureUnit:
    """An attribute, or all counters of a key: what one line of a spec declares.

    `row_numeric` and `user_numeric` are columns of the batch's numbers; the other tuples name
    columns of ids and of vectors.
    """

    name: str
    row_numeric: tuple[int, ...] = ()
    user_numeric: tuple[int, ...] = ()
    row_categorical: tuple[str, ...] = ()
    user_categorical: tuple[str, ...] = ()
    row_vectors: tuple[str, ...] = ()
    user_vectors: tuple[str, ...] = ()
    context_vectors: tuple[str, ...] = ()
    vector_width: int = 0

    @property
    def num_columns(self) -> int:
        """The number of columns of examples that the unit is made of."""
        parts = (
            self.row_numeric,
            self.user_numeric,
            self.row_categorical,
            self.user_categorical,
            self.row_vectors,
            self.user_vectors,
            self.context_vectors,
        )
        return sum(map(len, parts))

    def input_width(self, embedding_dim: int) -> int:
        """The inputs of a model's first layer that a candidate's columns of the unit fill."""
        width = len(self.row_numeric) + embedding_dim * len(self.row_categorical)
        return width if self.user_vectors else width + self.vector_width


def all_units(spec: DataSpec) -> dict[str, FeatureUnit]:
    """All units of a spec by name."""
    units = [*_attribute_units(spec), *_counter_units(feature_schema(spec))]
    return {unit.name: unit for unit in units}


def optional_units(spec: DataSpec) -> dict[str, FeatureUnit]:
    """The units that may be left out of a spec: the spec without one of them is valid."""
    return {name: unit for name, unit in all_units(spec).items() if _can_be_dropped(spec, name)}


def _attribute_units(spec: DataSpec) -> Iterable[FeatureUnit]:
    schema = feature_schema(spec)
    for entity, prefix, group in (
        ("user", "user", schema.user),
        ("item", "item", schema.item),
        ("context", "ctx", schema.context),
    ):
        numbers = schema.user.numeric if entity == "user" else schema.numeric_columns
        side = "user" if entity == "user" else "row"
        for name in getattr(spec.attributes, entity):
            column = f"{prefix}_{name}"
            fields: dict[str, Any] = {}
            if column in group.categorical:
                fields[f"{side}_categorical"] = (column,)
            elif column in group.numeric:
                fields[f"{side}_numeric"] = (numbers.index(column),)
            elif column in group.vectors:
                fields["row_vectors" if entity == "item" else f"{entity}_vectors"] = (column,)
                fields["vector_width"] = group.vectors[column]
            if fields:
                yield FeatureUnit(f"{entity}.{name}", **fields)


def _counter_units(schema: FeatureSchema) -> Iterable[FeatureUnit]:
    by_key: dict[CounterKey, list[int]] = {}
    for position, key in enumerate(schema.numeric_keys):
        if key:
            by_key.setdefault(key, []).append(position)
    for key, positions in by_key.items():
        yield FeatureUnit(_counter_unit_name(key), row_numeric=tuple(positions))


def _counter_unit_name(key: Sequence[str]) -> str:
    return f"counters by {', '.join(key)}"


def _can_be_dropped(spec: DataSpec, name: str) -> bool:
    try:
        spec_without(spec, [name])
    except UserError:
        return False
    return True


def spec_without(spec: DataSpec, names: Collection[str]) -> DataSpec:
    """The spec without some units. Raises UserError if another section needs one of them."""
    content = drop_units(spec.model_dump(mode="json"), names)
    try:
        return DataSpec.model_validate(content, context=declared_names(content))
    except ValidationError as error:
        reasons = "; ".join(e["msg"] for e in error.errors())
        raise UserError(f"{', '.join(names)} cannot be left out: {reasons}") from None


def drop_units(content: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The content of a spec's file without some units."""
    attributes = {
        entity: {name: value for name, value in declared.items() if f"{entity}.{name}" not in names}
        for entity, declared in content.get("attributes", {}).items()
    }
    keys = [key for key in content["counters"]["keys"] if _counter_unit_name(key) not in names]
    counters = content["counters"] | {"keys": keys}
    kept = content | {"attributes": attributes, "counters": counters}
    if content.get("forecast"):  # a targeting cannot name what is not declared
        named = content["forecast"]["attributes"]
        known = {*attributes.get("user", {}), *attributes.get("context", {})}
        left = [name for name in named if name in known]
        kept["forecast"] = content["forecast"] | {"attributes": left} if left else None
    return kept


def without_units(batch: Batch, units: Collection[FeatureUnit]) -> Batch:
    """The batch with missing values in the columns of some units, also of history items."""

    def missing(values: Tensor, columns: tuple[int, ...]) -> Tensor:
        values = values.clone()
        values[:, list(columns)] = torch.nan
        return values

    def zeros(tensors: Tensors, names: Collection[str]) -> Tensors:
        return {k: torch.zeros_like(v) if k in names else v for k, v in tensors.items()}

    for unit in units:
        history = replace(
            batch.history,
            item_categorical=zeros(batch.history.item_categorical, unit.row_categorical),
            item_vectors=zeros(batch.history.item_vectors, unit.row_vectors),
        )
        batch = replace(_changed(batch, unit, missing, zeros), history=history)
    return batch


def with_permuted_unit(batch: Batch, unit: FeatureUnit, generator: torch.Generator) -> Batch:
    """The batch in which the values of a unit are those of other examples, or of other requests."""
    rows = torch.randperm(len(batch), generator=generator)
    requests = torch.randperm(len(batch.as_of), generator=generator)

    def permuted(values: Tensor, columns: tuple[int, ...]) -> Tensor:
        order = rows if len(values) == len(rows) else requests
        values = values.clone()
        values[:, list(columns)] = values[order][:, list(columns)]
        return values

    def reordered(tensors: Tensors, names: Collection[str]) -> Tensors:
        return {
            k: v[rows if len(v) == len(rows) else requests] if k in names else v
            for k, v in tensors.items()
        }

    return _changed(batch, unit, permuted, reordered)


class UnitPermutation:
    """Permutes units in batches, by random numbers of one generator, seeded with 0."""

    def __init__(self, units: Sequence[FeatureUnit]) -> None:
        self.units = units
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, batch: Batch) -> Batch:
        """The next batch of a pass, with the units permuted."""
        for unit in self.units:
            batch = with_permuted_unit(batch, unit, self.generator)
        return batch


def _changed(
    batch: Batch,
    unit: FeatureUnit,
    numbers: Callable[[Tensor, tuple[int, ...]], Tensor],
    tensors: Callable[[Tensors, Collection[str]], Tensors],
) -> Batch:
    """The batch with a change of the columns of a unit."""
    return replace(
        batch,
        row_numeric=numbers(batch.row_numeric, unit.row_numeric),
        user_numeric=numbers(batch.user_numeric, unit.user_numeric),
        row_categorical=tensors(batch.row_categorical, unit.row_categorical),
        user_categorical=tensors(batch.user_categorical, unit.user_categorical),
        row_vectors=tensors(batch.row_vectors, unit.row_vectors),
        user_vectors=tensors(batch.user_vectors, unit.user_vectors),
        context_vectors=tensors(batch.context_vectors, unit.context_vectors),
    )


def correlated_units(units: Mapping[str, FeatureUnit], numbers: Tensor) -> list[tuple[str, ...]]:
    """Units in groups of which each member's columns are nearly functions of another's.

    Permuting one of two such units shows little, because the other one remains: they are permuted
    together. A unit joins another if its columns (B of `numbers`) have, on average, a correlation
    of at least 0.9 with one of the other's.
    """
    columns = torch.nan_to_num(numbers - torch.nanmean(numbers, 0))
    columns = columns / columns.square().mean(0).sqrt().clamp(min=1e-6)
    correlation = (columns.T @ columns / len(columns)).abs()
    groups = {name: {name} for name in units}
    for a in units:
        for b in units:
            own, other = list(units[a].row_numeric), list(units[b].row_numeric)
            if a == b or not own or not other:
                continue
            if correlation[own][:, other].amax(1).mean() >= SAME_CORRELATION:
                merged = groups[a] | groups[b]
                groups.update(dict.fromkeys(merged, merged))
    return sorted({tuple(sorted(group)) for group in groups.values()})
