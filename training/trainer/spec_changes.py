"""Features that a changed spec adds to a trained GEM, takes from it, or defines anew."""

from etl.spec.attributes import Attribute, Attributes, BagAttribute, CategoricalAttribute
from features.schema import FeatureSchema
from training.trainer.state import Manifest


def changed_columns(old: Attributes, new: Attributes) -> frozenset[str]:
    """Columns that both specs have, but whose values mean something else in the new one."""
    prefixes = {"user": "user", "item": "item", "ctx": "context", "attr": "event"}
    return frozenset(
        f"{prefix}_{name}"
        for prefix, group in prefixes.items()
        for name, attribute in getattr(new, group).items()
        if name in getattr(old, group)
        and not _has_same_values(getattr(old, group)[name], attribute)
    )


def _has_same_values(old: Attribute, new: Attribute) -> bool:
    """Whether a value is read in the same way; a vocabulary may have grown at its end."""
    if isinstance(old, CategoricalAttribute) and isinstance(new, CategoricalAttribute):
        if old.vocabulary is None or new.vocabulary is None:
            return (old.vocabulary, old.size) == (new.vocabulary, new.size)
        return new.vocabulary[: len(old.vocabulary)] == old.vocabulary
    if isinstance(old, BagAttribute) and isinstance(new, BagAttribute):
        unused = {"size"} if getattr(old, "vocabulary", None) is not None else set()
        ignored = {"column", "separator"} | unused
        return old.model_dump(exclude=ignored) == new.model_dump(exclude=ignored)
    return old.model_dump(exclude={"column"}) == new.model_dump(exclude={"column"})


def feature_changes(
    old: Manifest, new: Manifest
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Names that only the new model reads or predicts, and those that only the old one does."""
    changed = changed_columns(old.attributes, new.attributes)
    before, after = _feature_names(old.features), _feature_names(new.features)
    added, dropped = {}, {}
    for kind, names in after.items():
        again = [name for name in names if name in changed and kind.endswith("attribute")]
        added[kind] = [name for name in names if name not in before[kind]] + again
        dropped[kind] = [name for name in before[kind] if name not in names] + again
    return added, dropped


def _feature_names(features: FeatureSchema) -> dict[str, tuple[str, ...]]:
    groups = (features.user, features.item, features.context)
    return {
        "attribute": tuple(name for group in groups for name in group.columns),
        "counter": features.counter_transform.column_names,
        "objective": features.objectives,
        "auxiliary objective": tuple(features.auxiliary_objectives),
        "surface": features.surfaces,
        "event type": features.events,
        "history attribute": tuple(features.history_attributes),
        "similarity attribute": features.similarity_columns,
    }
