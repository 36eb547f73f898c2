"""The padded arrays that a ranker reads, the same from stored examples and from a live request.

Axes, as the fields of the named tuples below declare them: R requests, L history events, C
candidates, K earlier impressions with a teacher embedding, I width of an item's vectors, V of its
content vectors, U of the user's embeddings and vectors, X of the context's, Z of a teacher
embedding, F numeric features of a candidate, G of a user, M similarity attributes, E event types
and the unknown one. R, L, C and K vary from call to call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import numpy.typing as npt

from etl.array_types import Bools, Float32, Int64
from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.schema import ITEM_TABLE
from ranking.inputs.recency_features import RecencyArrays

CategoricalIds = dict[str, Int64]


def is_known_item(item_index: Int64, num_items: int) -> Bools:
    """Which items (…) a ranker knows that was trained on `num_items` indices.

    Reserved indices stand for no item, or for items that have no index yet: none of them is known.
    """
    known: Bools = (item_index >= RESERVED_ITEM_INDICES) & (item_index < num_items)
    return known


@dataclass(frozen=True)
class ItemFeatures:
    """Items in any shape (…): a row of each embedding table, and content vectors (…, V)."""

    categorical: CategoricalIds
    content_vectors: Float32


@dataclass(frozen=True)
class TeacherHistoryFeatures:
    """A user's earlier impressions with GEM's embeddings (R, K, Z) of them, the most recent last.

    `age_seconds` (R, K) counts from the impression, and is 0 in padding.
    """

    items: ItemFeatures
    teacher_embeddings: Float32
    age_seconds: Float32


@dataclass(frozen=True)
class RequestFeatures:
    """The user's side of requests.

    `types`, `surfaces`, `dwells` and `age_seconds` belong to events (R, L), oldest first; ages are
    0 in padding. `user_categorical` holds rows of tables (R); `user_numeric` (R, G) is NaN if a
    value is missing, `user_vectors` (R, …) are zeros.
    """

    events: ItemFeatures
    types: Int64
    surfaces: Int64
    dwells: Int64
    age_seconds: Float32
    user_categorical: CategoricalIds
    user_numeric: Float32
    user_vectors: Float32
    teacher_history: TeacherHistoryFeatures


@dataclass(frozen=True)
class CandidateFeatures:
    """The candidates' side (R, C): `numeric` (R, C, F) is NaN if a value is missing.

    `context_vectors` (R, C, …) are zeros if a value is missing.

    `recency` has arrays (R, C, E) for each similarity attribute. `mask` is False in the padding of
    requests with fewer candidates.
    """

    items: ItemFeatures
    context_categorical: CategoricalIds
    context_vectors: Float32
    numeric: Float32
    surfaces: Int64
    recency: tuple[RecencyArrays, ...]
    mask: Bools


@dataclass(frozen=True)
class PaddedIndex:
    """Positions (R, n) of the elements of ragged groups, and a mask that is False in padding."""

    indices: Int64
    mask: Bools

    def __call__(self, values: npt.NDArray[np.generic], fill_value: float = 0) -> np.ndarray:
        """The elements of `values` (N, …) as a padded array (R, n, …)."""
        shape = (*self.indices.shape, *values.shape[1:])
        padded = values[self.indices] if len(values) else np.empty(shape, values.dtype)
        padded[~self.mask] = fill_value
        return padded


def pad_slices(starts: Int64, stops: Int64) -> PaddedIndex:
    """The elements from `starts` to before `stops` of each group (R), in their order."""
    slot = np.arange(max(1, int((stops - starts).max(initial=0))))
    mask = slot < (stops - starts)[:, None]
    return PaddedIndex(np.where(mask, starts[:, None] + slot, 0), mask)


def pad_last(offsets: Int64, max_length: int) -> PaddedIndex:
    """The last `max_length` elements of each group; `offsets` (R+1) delimit the groups."""
    return pad_slices(np.maximum(offsets[:-1], offsets[1:] - max_length), offsets[1:])


ArrayT = TypeVar("ArrayT")
GatherFn = Callable[[CategoricalIds, Float32], ArrayT]
DYNAMIC_AXES = {"R", "L", "K", "C"}


class TeacherHistoryInputs(NamedTuple, Generic[ArrayT]):
    """Earlier impressions, after table lookup."""

    items: Annotated[ArrayT, "R K I"]
    similarity_ids: Annotated[ArrayT, "R K M"]
    embeddings: Annotated[ArrayT, "R K Z"]
    age_seconds: Annotated[ArrayT, "R K"]


class UserInputs(NamedTuple, Generic[ArrayT]):
    """The user's side, after table lookup: the inputs of the user program, in this order."""

    history_items: Annotated[ArrayT, "R L I"]
    history_similarity_ids: Annotated[ArrayT, "R L M"]
    event_types: Annotated[ArrayT, "R L"]
    event_surfaces: Annotated[ArrayT, "R L"]
    event_dwells: Annotated[ArrayT, "R L"]
    event_age_seconds: Annotated[ArrayT, "R L"]
    user_embeddings: Annotated[ArrayT, "R U"]
    user_numeric: Annotated[ArrayT, "R G"]
    teacher_history: TeacherHistoryInputs[ArrayT] | None


class CandidateInputs(NamedTuple, Generic[ArrayT]):
    """The candidates' side, after table lookup: inputs of the rank program after the UserState."""

    items: Annotated[ArrayT, "R C I"]
    similarity_ids: Annotated[ArrayT, "R C M"]
    context: Annotated[ArrayT, "R C X"]
    numeric: Annotated[ArrayT, "R C F"]
    surfaces: Annotated[ArrayT, "R C"]
    last_age: Annotated[ArrayT, "R C M E"]
    span: Annotated[ArrayT, "R C M E"]
    gap_count: Annotated[ArrayT, "R C M E"]


STATE_PREFIX = "state_"  # prefix of outputs of the user program that the rank program reads
CANDIDATE_PREFIX = "candidate_"  # prefix of the other inputs of the rank program


def named_arrays(fields: Any, prefix: str = "") -> dict[str, Any]:
    """The arrays of a named tuple by field name; those of a nested one are prefixed with its name.

    These are the names of a program's inputs and outputs. Fields that are None are left out.
    """
    named: dict[str, Any] = {}
    for name, value in fields._asdict().items():
        if isinstance(value, tuple):
            named |= named_arrays(value, f"{prefix}{name}_")
        elif value is not None:
            named[prefix + name] = value
    return named


def from_named_arrays(tuple_type: Any, named: Mapping[str, Any], prefix: str = "") -> Any:
    """The inverse of `named_arrays`; a nested tuple is None if all of its arrays are missing."""
    fields: dict[str, Any] = {}
    for name, hint in get_type_hints(tuple_type, include_extras=True).items():
        nested_prefix = f"{prefix}{name}_"
        if get_origin(hint) is Annotated:
            fields[name] = named[prefix + name]
        elif any(key.startswith(nested_prefix) for key in named):
            fields[name] = from_named_arrays(_nested_type(hint), named, nested_prefix)
        else:
            fields[name] = None
    return tuple_type(**fields)


def declared_axes(tuple_type: Any, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """The axes that the fields of a named tuple declare, by the names of `named_arrays`."""
    axes: dict[str, tuple[str, ...]] = {}
    for name, hint in get_type_hints(tuple_type, include_extras=True).items():
        if get_origin(hint) is Annotated:
            axes[prefix + name] = tuple(hint.__metadata__[0].split())
        else:
            axes |= declared_axes(_nested_type(hint), f"{prefix}{name}_")
    return axes


def _nested_type(hint: Any) -> Any:
    """The named tuple of a field that is one or None."""
    nested = get_args(hint)[0]
    return get_origin(nested) or nested


@dataclass(frozen=True)
class InputLookup(Generic[ArrayT]):
    """Turns arrays of ids into the inputs of a program, with the tables of NumPy or of torch.

    Attributes:
        gather: Concatenated rows of tables, in the order of the tables' names, then vectors.
        to_array: Converts an array that needs no table.
        similarity_columns: Attributes by which candidates and events are compared.
        num_known_items: Items from this index on were not seen in training; they use row 0.
    """

    gather: GatherFn[ArrayT]
    to_array: Callable[[np.ndarray], ArrayT]
    similarity_columns: Sequence[str]
    num_known_items: int

    def user_inputs(self, requests: RequestFeatures) -> UserInputs[ArrayT]:
        """The user's side."""
        history = requests.teacher_history
        return UserInputs(
            history_items=self._gather_items(requests.events),
            history_similarity_ids=self._similarity_ids(requests.events),
            event_types=self.to_array(requests.types),
            event_surfaces=self.to_array(requests.surfaces),
            event_dwells=self.to_array(requests.dwells),
            event_age_seconds=self.to_array(requests.age_seconds),
            user_embeddings=self.gather(requests.user_categorical, requests.user_vectors),
            user_numeric=self.to_array(requests.user_numeric),
            teacher_history=TeacherHistoryInputs(
                items=self._gather_items(history.items),
                similarity_ids=self._similarity_ids(history.items),
                embeddings=self.to_array(history.teacher_embeddings),
                age_seconds=self.to_array(history.age_seconds),
            ),
        )

    def candidate_inputs(self, candidates: CandidateFeatures) -> CandidateInputs[ArrayT]:
        """The candidates' side."""
        return CandidateInputs(
            items=self._gather_items(candidates.items),
            similarity_ids=self._similarity_ids(candidates.items),
            context=self.gather(candidates.context_categorical, candidates.context_vectors),
            numeric=self.to_array(candidates.numeric),
            surfaces=self.to_array(candidates.surfaces),
            last_age=self._stack_recency(candidates, "last_age"),
            span=self._stack_recency(candidates, "span"),
            gap_count=self._stack_recency(candidates, "gap_count"),
        )

    def _stack_recency(self, candidates: CandidateFeatures, field: str) -> ArrayT:
        """One recency feature of all similarity attributes (R, C, M, E)."""
        by_attribute = [getattr(recency, field) for recency in candidates.recency]
        if not by_attribute:
            return self.to_array(np.zeros((*candidates.surfaces.shape, 0, 0), np.int64))
        return self.to_array(np.stack(by_attribute, 2))

    def _gather_items(self, items: ItemFeatures) -> ArrayT:
        index = items.categorical[ITEM_TABLE]
        known_index = np.where(is_known_item(index, self.num_known_items), index, 0)
        return self.gather(items.categorical | {ITEM_TABLE: known_index}, items.content_vectors)

    def _similarity_ids(self, items: ItemFeatures) -> ArrayT:
        columns = [items.categorical[name] for name in self.similarity_columns]
        if not columns:
            return self.to_array(np.zeros((*items.categorical[ITEM_TABLE].shape, 0), np.int64))
        return self.to_array(np.stack(columns, -1))
