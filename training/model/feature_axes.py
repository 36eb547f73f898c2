"""Names of the positions of GEM's parameters that depend on the features of a spec.

With them a trained model is carried over to a changed spec by name. A parameter whose shape depends
on the features must be declared here; a test finds those that are not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

from torch import nn

from features.recency import AGE_BUCKETS, PHASE_BUCKETS
from features.schema import ITEM_TABLE
from training.model.alignment import SEPARATOR
from training.model.embeddings import UNKNOWN_VALUE_ROW, GroupedFeatureRows
from training.model.gem import Gem
from training.model.numeric import NumericEmbedding


@dataclass(frozen=True)
class Axis:
    """The names of the positions of one dimension of a parameter.

    New positions of an axis of inputs start at zero, so that they do not change the outputs. With a
    `template`, new positions start as the one of that name; others start as in a new model.
    """

    names: tuple[str, ...]
    is_input: bool = False
    template: str | None = None


Axes = tuple[Axis | None, ...]  # by dimension; None: the same positions in all models
INDEX: None = None


def feature_axes(gem: Gem) -> dict[str, Axes]:
    """The axes of the parameters and buffers of a GEM that depend on its features, by name."""
    features = gem.features
    surfaces = Axis(("unknown", *features.surfaces))
    objectives = Axis((*features.objectives, *_auxiliary_names(gem)))
    values = Axis(_names(("log_mean", "raw_std"), features.objectives))
    return {
        "surface.weight": (surfaces, INDEX),
        "gate.surface.weight": (surfaces, INDEX),
        "experts.specific_weight": (objectives, INDEX, INDEX, INDEX),
        "experts.specific_bias": (objectives, INDEX, INDEX),
        "experts.gate": (objectives, INDEX, INDEX),
        "heads.weight": (objectives, INDEX, INDEX),
        "heads.bias": (objectives, INDEX),
        "heads.out_weight": (objectives, INDEX),
        "heads.out_bias": (objectives,),
        "heads.surface_weight": (surfaces, objectives, INDEX),
        "heads.surface_bias": (surfaces, objectives),
        "value_head.out.weight": (values, INDEX),
        "value_head.out.bias": (values,),
        "user_alignment.weight": (INDEX, _inputs(gem.user_alignment.added_names)),
        "candidate_alignment.weight": (INDEX, _inputs(gem.candidate_alignment.added_names)),
        "row_alignment.weight": (INDEX, _inputs(gem.row_alignment.added_names)),
        "trunk_scale.weight": (_inputs(_trunk_inputs(gem)),),
        "trunk.0.weight": (INDEX, _inputs(_trunk_inputs(gem))),
        **_numeric_axes("candidate_numeric", features.numeric_columns, gem.candidate_numeric),
        **_numeric_axes("user_numeric", features.user.numeric, gem.user_numeric),
        **_table_axes(gem),
        **_history_axes(gem),
    }


def _auxiliary_names(gem: Gem) -> tuple[str, ...]:
    """Names of auxiliary heads; one of an event is that of the objective that it may become."""
    targets = gem.auxiliary_objectives.items()
    return tuple(f"dwell{SEPARATOR}{name}" if t == "dwell" else name for name, t in targets)


def list_names(gem: Gem) -> dict[str, tuple[str, ...]]:
    """The names of the modules of each module list that has one for each of some features."""
    return {
        "history.matched_attention": gem.features.similarity_columns,
        "history.recency": gem.features.similarity_columns,
        "type_similarities": tuple(gem.features.item.vectors),
    }


def _names(*parts: Iterable[object]) -> tuple[str, ...]:
    """The names of all combinations, the last part varying fastest."""
    return tuple(SEPARATOR.join(map(str, name)) for name in product(*parts))


def _inputs(names: Sequence[str]) -> Axis:
    return Axis(tuple(names), is_input=True)


def _trunk_inputs(gem: Gem) -> tuple[str, ...]:
    """The interaction's output, then the features that bypass it; see `Gem.forward`."""
    features, config_width = gem.features, gem.norm.normalized_shape[0]
    vectors = features.item.vectors
    return (
        *_names(["interaction"], range(gem.interaction.out_rows * config_width)),
        *features.numeric_columns,
        *features.user.numeric,
        *_widths(vectors),
        *_names(vectors, features.events),
        *_widths(features.user.vectors),
        *_widths(features.context.vectors),
    )


def _widths(widths: Mapping[str, int]) -> tuple[str, ...]:
    """The names of concatenated vectors of some widths."""
    return tuple(f"{name}{SEPARATOR}{i}" for name, width in widths.items() for i in range(width))


def _numeric_axes(
    module: str, columns: Sequence[str], numeric: NumericEmbedding
) -> dict[str, Axes]:
    """The axes of a `NumericEmbedding` of some columns."""
    statistics = Axis(tuple(columns))
    inputs = _inputs(columns)
    return {
        f"{module}.standardizer.mean": (statistics,),
        f"{module}.standardizer.variance": (statistics,),
        f"{module}.standardizer.count": (statistics,),
        f"{module}.encoding.edges": (statistics, INDEX),
        f"{module}.scale.weight": (inputs,),
        f"{module}.linear": (inputs, INDEX),
        f"{module}.piecewise": (inputs, INDEX, INDEX),
        f"{module}.missing": (inputs, INDEX),
        f"{module}.bias": (Axis(tuple(map(str, numeric.group_names))), INDEX),
    }


def _table_axes(gem: Gem) -> dict[str, Axes]:
    """The axes of the modules that read embeddings of categorical features."""
    axes: dict[str, Axes] = {}
    groups: dict[str, GroupedFeatureRows] = {
        "user_ids": gem.user_ids,
        "candidate_ids": gem.candidate_ids,
    }
    width = gem.norm.normalized_shape[0]
    for name, group in groups.items():
        inputs = _inputs(_names(group.low_cardinality, range(width)))
        axes[f"{name}.project.weight"] = (INDEX, inputs)
    for table, linear in gem.narrow_embeddings.by_table.items():
        inputs = _inputs(_names(["width"], range(cast("nn.Linear", linear).in_features)))
        axes[f"narrow_embeddings.by_table.{table}.weight"] = (INDEX, inputs)
    return axes


def _history_axes(gem: Gem) -> dict[str, Axes]:
    features, width = gem.features, gem.norm.normalized_shape[0]
    types = ("unknown", *features.events)
    tables = sorted((ITEM_TABLE, *features.item.categorical))
    item = _inputs((*_names(tables, range(width)), *_widths(features.item.vectors)))
    axes: dict[str, Axes] = {
        "history.event_tokenizer.surface.weight": (Axis(("unknown", *features.surfaces)), INDEX),
        "history.event_tokenizer.action.weight": (Axis(types), INDEX),
        "history.event_tokenizer.item_projection.weight": (INDEX, item),
        "history.candidate_projection.weight": (INDEX, item),
    }
    for attribute, num_rows in features.history_attributes.items():
        rows = tuple(map(str, range(num_rows)))
        values = Axis(rows, template=rows[UNKNOWN_VALUE_ROW])
        axes[f"history.event_tokenizer.attributes.{attribute}.weight"] = (values, INDEX)
    for number, column in enumerate(features.similarity_columns):
        module = f"history.recency.{number}"
        ages = Axis(_names(types, range(AGE_BUCKETS + 1)))
        phases = Axis(_names(types, range(PHASE_BUCKETS + 1)))
        values = Axis(_names(["value"], range(features.item.categorical[column])))
        axes |= {
            f"{module}.age_embedding.weight": (ages, INDEX),
            f"{module}.user_phase.weight": (phases, INDEX),
            f"{module}.population_phase.weight": (phases, INDEX),
            f"{module}.inter_arrival.total_span": (values, Axis(types)),
            f"{module}.inter_arrival.gap_count": (values, Axis(types)),
        }
    return axes
