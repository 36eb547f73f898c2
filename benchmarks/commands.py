"""`gemline bench NAME`. Benchmarks import torch, Spark, Arrow and NumPy only when they run."""

from collections.abc import Callable
from typing import Any

from benchmarks.public import sequence, tabular

ON_USER_FILES: dict[str, Callable[[Any], object]] = {
    "tabular": tabular.bench,
    "sequence": sequence.bench,
}


def benchmarks_of_the_repository() -> dict[str, Callable[[Any], object]]:
    """Benchmarks that need a checkout: the wheel has neither them nor their configurations."""
    try:
        from benchmarks import code_quality
        from benchmarks.public import kuairand
        from benchmarks.studies import (
            ablation,
            agreement,
            audience,
            calibration,
            features,
            forecast,
            freshness,
            growth,
            history_length,
            portfolio,
            precision,
            quality,
            roi,
            scaling,
            staleness,
            transfer,
        )
        from benchmarks.system import kills, suites
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks."):
            raise
        return {}
    return {
        "kuairand": kuairand.bench,
        "history": history_length.bench_history,
        "simulator": suites.bench_simulator,
        "data": suites.bench_data,
        "quality": quality.bench_quality,
        "ablation": ablation.bench_ablation,
        "features": features.bench_features,
        "agreement": agreement.bench_agreement,
        "audience": audience.bench_audience,
        "model": suites.bench_model,
        "transfer": transfer.bench,
        "staleness": staleness.bench,
        "portfolio": portfolio.bench_portfolio,
        "precision": precision.bench_precision,
        "forecast": forecast.bench_forecast,
        "freshness": freshness.bench_freshness,
        "growth": growth.bench_growth,
        "roi": roi.bench_roi,
        "scaling": scaling.bench_scaling,
        "calibration": calibration.bench,
        "serving": suites.bench_serving,
        "operations": suites.bench_operations,
        "kills": kills.bench,
        "house": code_quality.bench_code_quality,
    }


COMMANDS = {"bench": {**ON_USER_FILES, **benchmarks_of_the_repository()}}
