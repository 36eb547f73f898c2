"""The labels of examples that a pass uses: those of objectives, and extra ones for training.

Extra labels are those of auxiliary objectives or, with window mixing, those of extra windows.

B impressions, O objectives, A extra labels, n of either.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from etl.array_types import Bools, Float32, Float64, Int64
from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from training.data.label_window import LabelWindow

NEVER = np.iinfo(np.int64).max
MAX_DWELL_SECONDS = DAY  # a tab that was left open for weeks is not of more interest


@dataclass(frozen=True)
class Labels:
    """Labels and values of outcomes (B, O), and extra labels (B, A).

    `mask` (B, O) and `extra_mask` (B, A) mark the labels that a pass uses. A is 0 unless its window
    includes auxiliary labels or mixes windows; labels with the target `dwell` are ln(1 + seconds).
    """

    values: Float32
    mask: Bools
    outcome_values: Float32
    extra_labels: Float32
    extra_mask: Bools

    def of_rows(self, selected: Bools, mask: Bools) -> Labels:
        """The labels of selected rows (B), with another mask (B, O)."""
        return Labels(
            self.values[selected],
            mask[selected],
            self.outcome_values[selected],
            self.extra_labels[selected],
            self.extra_mask[selected],
        )


def label_columns(spec: DataSpec, window: LabelWindow) -> list[str]:
    """The columns of `impressions` that `labels_of` reads."""
    columns = ["surface"]
    for name in (*spec.objectives, *_extra_names(spec, window)):
        columns += [f"label_{name}", f"label_mature_ts_{name}"]
        summed = _summed_column(spec, name)
        columns += [f"{summed}_{name}"] if summed else []
    return columns


def labels_of(
    spec: DataSpec, impressions: pa.Table, window_draw: Float64, window: LabelWindow, span: str
) -> Labels:
    """The labels of impressions.

    A label of an auxiliary objective is trained on once, together with the first label of an
    objective that is trained on when it is final. So it selects no rows of its own.

    With window mixing, each row has one label per objective: that of the window it is assigned to.

    Args:
        spec: Declares the objectives.
        impressions: Their `label_columns` (B).
        window_draw: A number in [0, 1) for each row (B), which assigns it to windows that are
            mixed.
        window: The labels to use.
        span: The days of the rows, for messages.

    Raises:
        UserError: A label should be final but is null in the table.
    """
    stored = _StoredLabels.read(spec, tuple(spec.objectives), impressions)
    extra = _StoredLabels.read(spec, _extra_names(spec, window), impressions)
    if window.skips_null_labels:
        stored, extra = stored.only(stored.is_final), extra.only(extra.is_final)
    learned = stored
    if window.mixes_windows:
        assigned = assigned_windows(spec, window_draw)
        learned = stored.only(assigned.longest)
        extra = extra.only(assigned.extra)
        trained_ts, extra_ts = learned.times, extra.times
    else:
        trained_ts = learned.times
        extra_ts = _first_time_from(extra, trained_ts)
    if window.only_unlearned:
        first_ts = _first_of_objective(spec, trained_ts, extra_ts, window)
        mask = stored.has_label & window.contains(stored.mature_ts) & (first_ts >= window.start)
    else:
        mask = learned.has_label & window.contains(trained_ts)
    extra_mask = extra.has_label & window.contains(extra_ts)
    stored.require_final(mask, span)
    extra.require_final(extra_mask, span)
    summed = [_summed_column(spec, name) for name in extra.names]
    is_dwell = np.array([column == "dwell_ms" for column in summed], bool)
    seconds = np.minimum(extra.sums / 1000, MAX_DWELL_SECONDS)
    return Labels(
        stored.labels,
        mask,
        np.nan_to_num(stored.sums),
        np.where(is_dwell, np.log1p(np.nan_to_num(seconds)), extra.labels),
        extra_mask & ~(is_dwell & np.isnan(extra.sums)),
    )


def _extra_names(spec: DataSpec, window: LabelWindow) -> tuple[str, ...]:
    if window.mixes_windows:
        return spec.extra_window_labels
    return tuple(spec.auxiliary_objectives) if window.include_auxiliary else ()


def _summed_column(spec: DataSpec, name: str) -> str | None:
    """The column of sums of a label; labels of extra windows have none."""
    objective = spec.all_objectives.get(name)
    return objective.summed_column if objective else None


@dataclass(frozen=True)
class AssignedWindows:
    """Whether a row learns an objective's longest window (B, O), or which extra window (B, A)."""

    longest: Bools
    extra: Bools


def assigned_windows(spec: DataSpec, window_draw: Float64) -> AssignedWindows:
    """The window by which each row learns each objective (Zipper of Lattice, 2512.09200).

    All windows of an objective have the same share of the rows.
    """
    longest = np.ones((len(window_draw), len(spec.objectives)), bool)
    extra = np.zeros((len(window_draw), len(spec.extra_window_labels)), bool)
    for i, (name, objective) in enumerate(spec.objectives.items()):
        labels = [e for e in spec.extra_window_labels if spec.objective_labels[e][0] == name]
        assigned = (window_draw * (1 + len(objective.extra_windows))).astype(np.int64)
        longest[:, i] = assigned == 0
        for k, label in enumerate(labels, 1):
            extra[:, spec.extra_window_labels.index(label)] = assigned == k
    return AssignedWindows(longest, extra)


@dataclass(frozen=True)
class _StoredLabels:
    """Columns of `impressions` for some objectives, as arrays (B, n).

    `sums` are values or dwells, NaN where they are null or the objective has none. `mature_ts` are
    in epoch seconds; `has_label` is true where the surface has the objective.
    """

    names: Collection[str]
    labels: Float32
    sums: Float32
    mature_ts: Int64
    is_final: Bools
    has_label: Bools

    @classmethod
    def read(cls, spec: DataSpec, names: Collection[str], table: pa.Table) -> _StoredLabels:
        """The columns of some objectives."""
        shape, surface = (table.num_rows, len(names)), table["surface"].to_numpy()
        stored = cls(
            names=names,
            labels=np.zeros(shape, np.float32),
            sums=np.full(shape, np.nan, np.float32),
            mature_ts=np.zeros(shape, np.int64),
            is_final=np.zeros(shape, bool),
            has_label=np.zeros(shape, bool),
        )
        for i, name in enumerate(names):
            objective, _ = spec.label_windows[name]
            codes = [spec.surface_codes[s] for s in spec.surfaces_of(objective)]
            stored.has_label[:, i] = np.isin(surface, codes)
            stored.mature_ts[:, i] = table[f"label_mature_ts_{name}"].to_numpy() // MICROS["s"]
            label = table[f"label_{name}"]
            stored.is_final[:, i] = label.is_valid().to_numpy()
            stored.labels[:, i] = label.fill_null(0).to_numpy()
            summed = _summed_column(spec, name)
            if summed:
                stored.sums[:, i] = table[f"{summed}_{name}"].to_numpy()
        return stored

    @property
    def times(self) -> Int64:
        """When each label (B, n) is trained on, in epoch seconds; NEVER where there is none."""
        return np.where(self.has_label, self.mature_ts, NEVER)

    def only(self, rows: Bools) -> _StoredLabels:
        """The same labels, where a mask (B, n) says that there are some."""
        return replace(self, has_label=self.has_label & rows)

    def require_final(self, mask: Bools, span: str) -> None:
        """Raises UserError if a label to use (B, n) is null."""
        is_missing = (mask & ~self.is_final).any(0)
        if is_missing.any():
            name = list(self.names)[int(np.argmax(is_missing))]
            raise UserError(
                f"labels of {name} on {span} are null in table impressions although their window "
                "has closed; run `gemline etl labels` up to the latest day"
            )


def _first_of_objective(
    spec: DataSpec, trained_ts: Int64, extra_ts: Int64, window: LabelWindow
) -> Int64:
    """When the first label of each objective is trained on (B, O), of any of its windows."""
    first = trained_ts.copy()
    if window.mixes_windows:
        for column, objective in enumerate(spec.extra_window_objectives):
            first[:, objective] = np.minimum(first[:, objective], extra_ts[:, column])
    return first


def _first_time_from(auxiliary: _StoredLabels, trained_ts: Int64) -> Int64:
    """When each auxiliary label can be learned (B, A), NEVER if it cannot.

    That is the earliest of the times (B, O) at which an objective of the row is learned and the
    auxiliary label is already final.
    """
    is_final = trained_ts[:, None, :] >= auxiliary.mature_ts[:, :, None]
    times: Int64 = np.where(is_final, trained_ts[:, None, :], NEVER).min(2)
    return times
