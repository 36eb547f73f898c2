"""`gemline bench audience`: labels of data providers measured by audits, against alternatives.

Worlds are simulated, so that P(class | label) and the best purchase are known.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult, interleaved_median_seconds, require_known
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.audience_world import AudienceWorld
    from etl.array_types import Float64
    from features.audience.additive import AdditiveModel

PARTS = ("estimates", "counts")
CAMPAIGNS = (10, 20, 50, 100)
GOAL_CAMPAIGNS = 50
WANTED_SHARE = 0.02  # of all impressions, in a purchase
CLAIMS = (0.8, 0.98)  # of the accuracy that providers state, which says nothing about the truth
LABEL_COUNTS = (1_000_000, 10_000_000)
GOALS = {
    "confusion_error_ratio": "<= 0.5",
    "interval_coverage": "0.93 to 0.97",
    "in_target_lift": ">= 1.2",
    "in_target_share_of_best": ">= 0.9",
    "count_growth": "<= 1.1",
}


class AudienceArgs(StrictModel):
    """Arguments of the benchmark."""

    worlds: int = Field(default=20, ge=2)
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="estimates, counts; by default both")] = (
        "estimates",
        "counts",
    )
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_audience(args: AudienceArgs) -> None:
    """Errors of P(class | label), in-target rates of purchases, and growth of the counts."""
    require_known(args.only, PARTS)
    result = BenchmarkResult("Audiences", ("figure", "ours", "alternatives", "goal"))
    if "estimates" in args.only:
        measure_estimates(result, args.worlds)
    if "counts" in args.only:
        measure_counts(result)
    result.show(args.as_json)


def measure_estimates(result: BenchmarkResult, worlds: int) -> None:
    """Errors and coverage by number of campaigns, and what is bought after GOAL_CAMPAIGNS."""
    from benchmarks.studies.audience_world import AudienceWorld
    from features.audience.additive import fit_additive

    purchases: list[Mapping[str, float]] = []
    for campaigns in CAMPAIGNS:
        errors: list[Mapping[str, float]] = []
        for seed in range(worlds):
            world = AudienceWorld.draw(seed)
            audits = world.audits(campaigns)
            model = fit_additive(audits)
            errors.append(errors_of(world, model))
            if campaigns == GOAL_CAMPAIGNS:
                purchases += purchases_of(world, model)
        _record_errors(result, campaigns, {n: mean(e[n] for e in errors) for n in errors[0]})
    _record_purchases(result, {n: mean(p[n] for p in purchases) for n in purchases[0]})


def errors_of(world: "AudienceWorld", model: "AdditiveModel") -> Mapping[str, float]:
    """Mean absolute errors of P(class | label) of all providers, and coverage of intervals."""
    import numpy as np

    from benchmarks.studies.audience_world import PROVIDERS, least_squares, proportional

    rows = []
    for provider in range(len(PROVIDERS)):
        truth = world.confusion(provider)
        found = model.confusion(provider, world.impressions)
        rows.append({
            "ours": np.abs(found.value - truth).mean(),
            "coverage": ((found.low <= truth) & (truth <= found.high)).mean(),
            "proportional": np.abs(proportional(model.audits, provider) - truth).mean(),
            "one provider": np.abs(least_squares(model.audits, provider) - truth).mean(),
        })  # fmt: skip
    return {name: float(mean(row[name] for row in rows)) for name in rows[0]}


def _record_errors(result: BenchmarkResult, campaigns: int, errors: Mapping[str, float]) -> None:
    result.record(f"confusion_error_{campaigns}", errors["ours"], "")
    others = (
        f"{errors['proportional']:.3f} in proportion, "
        f"{errors['one provider']:.3f} least squares of one provider"
    )
    is_goal = campaigns == GOAL_CAMPAIGNS
    if is_goal:
        result.record("confusion_error_ratio", errors["ours"] / errors["proportional"], "")
        result.record("interval_coverage", errors["coverage"], "")
    goal = GOALS["confusion_error_ratio"] + " of proportion" if is_goal else ""
    result.rows.append((f"error, {campaigns} campaigns", f"{errors['ours']:.3f}", others, goal))
    coverage = GOALS["interval_coverage"] if is_goal else ""
    result.rows.append(
        (f"coverage, {campaigns} campaigns", f"{errors['coverage']:.3f}", "", coverage)
    )


def purchases_of(world: "AudienceWorld", model: "AdditiveModel") -> list[Mapping[str, float]]:
    """True in-target rates of what is bought for each class as the target."""
    import numpy as np

    from benchmarks.studies.audience_world import CLASSES, LABELS, PROVIDERS, UNKNOWN
    from features.audience.quality import Supply, labels_to_buy, rank_purchases

    wanted = WANTED_SHARE * len(world.classes)
    truths = [world.confusion(provider) for provider in range(len(PROVIDERS))]
    known = np.array([label != UNKNOWN for label in LABELS])
    available = [np.bincount(world.labels[:, s], minlength=len(LABELS)) * known
                 for s in range(len(PROVIDERS))]  # fmt: skip

    def true_rate(provider: int, guessed: "Float64", k: int) -> float:
        bought = labels_to_buy(guessed, available[provider], wanted)
        return float(bought @ truths[provider][:, k] / bought.sum())

    supply = Supply(world.impressions, world.impressions, min_count=1)
    rates: list[Mapping[str, float]] = []
    for k in range(len(CLASSES)):
        best = max(true_rate(s, truths[s][:, k], k) for s in range(len(PROVIDERS)))
        claims = world.rng.uniform(*CLAIMS, len(PROVIDERS))
        claimed = true_rate(int(claims.argmax()), np.eye(len(LABELS))[k], k)
        chosen = rank_purchases(model, supply, [k], wanted)[0]
        provider = PROVIDERS.index(chosen.provider)
        estimated = model.confusion(provider, world.impressions).value[:, k]
        rates.append({"ours": true_rate(provider, estimated, k), "claimed": claimed, "best": best})
    return rates


def _record_purchases(result: BenchmarkResult, rates: Mapping[str, float]) -> None:
    result.record("in_target_lift", rates["ours"] / rates["claimed"], "")
    result.record("in_target_share_of_best", rates["ours"] / rates["best"], "")
    others = f"{rates['claimed']:.3f} by claims, {rates['best']:.3f} best possible"
    goal = f"{GOALS['in_target_lift']} of claims, {GOALS['in_target_share_of_best']} of best"
    row = (f"in-target rate, {GOAL_CAMPAIGNS} campaigns", f"{rates['ours']:.3f}", others, goal)
    result.rows.append(row)


def measure_counts(result: BenchmarkResult) -> None:
    """Seconds of Spark's counts a label, for the larger number of labels over the smaller."""
    from etl.runtime.spark import spark_session

    spark_session("bench audience")
    with tempfile.TemporaryDirectory() as folder:
        runs = {str(n): _counting_run(Path(folder), n) for n in LABEL_COUNTS}
        runs[str(LABEL_COUNTS[0])]()
        seconds = interleaved_median_seconds(runs, 3)
    per_label = [seconds[str(n)] / n for n in LABEL_COUNTS]
    result.record("count_growth", per_label[1] / per_label[0], "")
    for n in LABEL_COUNTS:
        result.record(f"count_seconds_{n // 1_000_000}m", seconds[str(n)], "")
    text = ", ".join(f"{n // 1_000_000} M labels in {seconds[str(n)]:.1f} s" for n in LABEL_COUNTS)
    ratio = f"{per_label[1] / per_label[0]:.2f}"
    result.rows.append(("seconds a label, 10 M over 1 M", ratio, text, GOALS["count_growth"]))


def _counting_run(folder: Path, labels: int) -> Callable[[], None]:
    """Counts of a day with as many labels, of three providers, and a third as many impressions."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from features.audience.counts import count_by_labels

    spark, providers = SparkSession.active(), ("a", "b", "c")
    users = labels // len(providers)
    rows = spark.range(labels).select(
        F.format_string("u%d", F.floor(F.col("id") / 3)).alias("user_id"),
        (F.rand(1) * 1e9).cast("bigint").alias("ts"),
        F.element_at(F.array(*map(F.lit, providers)), F.col("id").cast("int") % 3 + 1).alias(
            "provider"
        ),
        F.format_string("l%d", (F.rand(2) * 6).cast("int")).alias("label"),
    )
    impressions = spark.range(users).select(
        F.format_string("u%d", (F.rand(3) * users).cast("bigint")).alias("user_id"),
        (F.rand(4) * 2e9).cast("bigint").alias("ts"),
        F.format_string("b%d", (F.rand(5) * 100).cast("int")).alias("campaign"),
        F.lit("2026-01-01").cast("date").alias("day"),
    )
    rows.write.parquet(f"{folder}/labels-{labels}")
    impressions.write.parquet(f"{folder}/impressions-{labels}")
    read = spark.read

    def run() -> None:
        counts = count_by_labels(
            read.parquet(f"{folder}/impressions-{labels}"),
            read.parquet(f"{folder}/labels-{labels}"),
            providers,
        )
        counts.write.format("noop").mode("overwrite").save()

    return run
