"""Batch scoring on Spark, beside the exported program alone."""

from typing import TYPE_CHECKING

from benchmarks.result import Result

if TYPE_CHECKING:
    from benchmarks.serving import ServingArgs


def measure(args: "ServingArgs", result: Result) -> None:
    """Nothing yet."""
    result.take("batch_ratio", None, "scores are not yet written by a Spark job")
