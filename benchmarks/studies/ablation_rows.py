"""The rows of the ablation: what is trained for each, and their differences of NE."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from benchmarks.studies.model_changes import CHANGES, DataSet
from dags.commands import Scale
from training.config import TrainConfig
from training.model.config import SizeName

if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import SeededEstimate
    from training.evaluation.predictions import Predictions

OBJECTIVE = "click"
DEPTH = 3
DEEP = f"{DEPTH} layers"
DEEP_SIZES: dict[SizeName, int] = {"layers": DEPTH, "event_layers": DEPTH}
DEFAULT = "default"
SEPARATE = "a model for each surface"
LIGHTGBM = "LightGBM"
CONTROLS = (SEPARATE, LIGHTGBM)
Differences = dict[DataSet, dict[str, "SeededEstimate"]]


class AblationTrials(Protocol):
    """Trainings on a data set, kept once they are finished."""

    def gem(self, config: TrainConfig) -> "Predictions":
        """Predictions of a GEM on the test days, sorted by impression."""

    def lightgbm(self) -> "Predictions":
        """Predictions of LightGBM on the same rows."""

    def gem_per_surface(self, config: TrainConfig) -> "Predictions | None":
        """Predictions of a GEM for each surface; None where surfaces have too few rows."""

    def trained_at(self) -> set[str]:
        """Dates and commits of the trainings whose predictions were read, where recorded."""


def all_rows() -> tuple[str, ...]:
    """The names of all rows, in the order of the table."""
    return (DEEP, *CHANGES, *CONTROLS)


def has_row(data: DataSet, name: str) -> bool:
    """Whether a data set has a row; KuaiRand's surfaces have too few rows for a model each."""
    if name in CHANGES:
        return data in CHANGES[name]
    return name != SEPARATE or data == "simulated"


def config_of(data: DataSet, name: str, scale: Scale, seed: int) -> TrainConfig | None:
    """The configuration of a row; None where the data set does not have it."""
    config = TrainConfig(scale=scale, seed=seed, sizes={} if name == DEFAULT else DEEP_SIZES)
    if name not in CHANGES:
        return config
    options = CHANGES[name].get(data)
    return None if options is None else TrainConfig.model_validate(config.model_dump() | options)


def predictions_of(
    trials: AblationTrials, data: DataSet, name: str, scale: Scale, seed: int
) -> "Predictions | None":
    """Predictions of a row with a seed; None where the data set does not have it."""
    config = config_of(data, name, scale, seed)
    if name == LIGHTGBM:
        return trials.lightgbm() if seed == 0 else None
    if config is None:
        return None
    return trials.gem_per_surface(config) if name == SEPARATE else trials.gem(config)


def ne_differences(
    trials: AblationTrials,
    data: DataSet,
    scale: Scale,
    seeds: int,
    names: Sequence[str],
    objectives: Sequence[str],
    reference: str = DEEP,
) -> dict[str, dict[str, "SeededEstimate"]]:
    """For each objective the rows of a data set with their difference of NE from a reference.

    That of the row DEEP is from the default.
    """
    from benchmarks.studies.seeded_estimates import ne_difference_over_seeds

    def all_seeds(name: str) -> "list[Predictions]":
        by_seed = [predictions_of(trials, data, name, scale, seed) for seed in range(seeds)]
        return [predictions for predictions in by_seed if predictions is not None]

    references = {name: all_seeds(name) for name in (DEFAULT, reference)}
    differences: dict[str, dict[str, SeededEstimate]] = {objective: {} for objective in objectives}
    for name in names:
        changed = all_seeds(name)
        control = references[DEFAULT if name == DEEP else reference]
        for objective in objectives if changed else ():
            difference = ne_difference_over_seeds(changed, control, objective)
            differences[objective][name] = difference
    return differences
