"""The model card of a ranker: what it is for, what it was made from, and how it was judged."""

from collections.abc import Iterator, Sequence

from etl.event_time import format_utc
from etl.spec.model import DataSpec
from etl.spec.units import format_duration
from ranking.registry.manifest import RankerManifest, RankerTraining
from ranking.scoring.calibration import PlattScaling
from ranking.scoring.segment_calibration import (
    ALL_ROWS,
    MAX_SIGMA,
    SegmentCalibration,
    SegmentEvaluation,
    segment_name,
    worst_segment,
)

WORST_SEGMENTS = 10  # rows of a table of segments, besides those of all rows


def model_card(manifest: RankerManifest) -> str:
    """The model card as Markdown."""
    return "\n".join(_lines(manifest)) + "\n"


def _lines(manifest: RankerManifest) -> Iterator[str]:
    spec, training = manifest.spec, manifest.training
    objectives = [name for name in spec.objectives if manifest.surface in spec.surfaces_of(name)]
    yield f"# Ranker of {manifest.surface}, {manifest.version}"
    yield ""
    yield f"- **Intended use**: to order the ads of surface {manifest.surface} of {spec.name}."
    yield f"- **Predicts**, for one impression: {', '.join(objectives)}, each a probability; for"
    yield "  objectives with values also the expected value of an outcome."
    for name in objectives:
        objective = spec.objectives[name]
        within = format_duration(objective.window)
        yield f"  - {name}: {objective.event} within {within} of the impression."
    if spec.position_bias:
        served = spec.position_bias.served_position
        yield f"- **Position**: probabilities are for position {served}."
    yield "- **Not for** other surfaces or specs. Items that it has no row for (from index"
    yield f"  {manifest.num_items} on) are read as an unknown one."
    yield ""
    yield from _training_lines(spec, training) if training else ("No record of its training.",)
    yield ""
    yield "## Calibration"
    yield ""
    yield "| objective | fit | slope | intercept |"
    yield "|---|---|---|---|"
    for name in objectives:
        fitted = manifest.calibration[name]
        numbers = ("", "")
        if isinstance(fitted, PlattScaling):
            numbers = f"{fitted.slope:.3f}", f"{fitted.intercept:+.3f}"
        yield f"| {name} | {fitted.kind} | {numbers[0]} | {numbers[1]} |"
    yield ""
    yield from _value_lines(manifest)
    yield from _segment_lines(spec, training.evaluation if training else None)


def _value_lines(manifest: RankerManifest) -> Iterator[str]:
    """Predicted values of outcomes; nothing if none were judged."""
    evaluation = manifest.training.evaluation if manifest.training else None
    if evaluation is None or not evaluation.values:
        return
    yield "## Values of outcomes"
    yield ""
    yield "| objective | outcomes | predicted | actual | predicted / actual |"
    yield "|---|---|---|---|---|"
    for value in evaluation.values:
        sums = f"{value.predicted:,.2f} | {value.actual:,.2f}"
        yield f"| {value.objective} | {value.outcomes:,} | {sums} | {value.ratio:.2f} |"
    yield ""


def _segment_lines(spec: DataSpec, evaluation: SegmentEvaluation | None) -> Iterator[str]:
    yield "## Calibration by segment"
    yield ""
    segments = evaluation.segments if evaluation else ()
    worst = worst_segment(segments)
    if evaluation is None or worst is None:
        yield "Not judged: no labels that were predicted before they were learned, or too few."
        return
    yield f"On labels final from {format_utc(evaluation.labels_from)} to"
    yield f"{format_utc(evaluation.labels_until)} UTC, each predicted before it was learned. Errors"
    yield f"are in units of noise (sigma): the worst of {len(segments)} segments is at"
    yield f"{worst[1]:.1f}, corrected for their number; up to {MAX_SIGMA:.0f} is within noise."
    yield ""
    yield from _segment_table(spec, segments)


def _segment_table(spec: DataSpec, segments: Sequence[SegmentCalibration]) -> Iterator[str]:
    """A row of each objective for all rows, and the segments with the least probable errors."""
    yield "| objective | segment | positives | predictions / outcomes | sigma |"
    yield "|---|---|---|---|---|"
    overall = [segment for segment in segments if segment.segment == ALL_ROWS]
    others = [segment for segment in segments if segment.segment != ALL_ROWS]
    for row in (*overall, *sorted(others, key=lambda s: s.p_value)[:WORST_SEGMENTS]):
        name = segment_name(spec, row)
        numbers = f"{row.positives:,} | {row.ratio:.2f} | {row.sigma:.1f}"
        yield f"| {row.objective} | {name} | {numbers} |"


def _training_lines(spec: DataSpec, training: RankerTraining) -> Iterator[str]:
    yield "## Training"
    yield ""
    yield f"- **Days**: impressions from {training.first_day} on; labels final by"
    yield f"  {format_utc(training.labels_until)} UTC."
    for name, time in training.newest_labels.items():
        newest = f"{format_utc(time)} UTC" if time else "none"
        yield f"  - newest impression with a learned label of {name}: {newest}"
    if training.refit_of:
        yield f"- **Refit** of {training.refit_of}, which the gate below has evaluated."
    teachers = ", ".join(training.teacher_versions) or "none: labels only"
    yield f"- **Teacher** (GEM): {teachers}."
    if training.shared_gem:
        yield f"- **Modules of GEM** that it started with: those of {training.shared_gem}."
    tables = ", ".join(f"{name} {version}" for name, version in training.table_versions.items())
    yield f"- **Tables** and their versions: {tables}."
    yield f"- **Seed** {training.config.seed}; the whole configuration is in the manifest."
    yield ""
    yield "## Evaluation at the gate"
    yield ""
    yield from (f"- {reason}" for reason in training.gate or ("not evaluated yet",))
    if training.gate_segments:
        yield ""
        yield "Calibration by segment on the test days, errors in units of noise (sigma):"
        yield ""
        yield from _segment_table(spec, training.gate_segments)
