"""The `gemline` command line: finds the package that owns a command and runs it.

Packages are imported only when one of their commands is called.
"""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etl.cli.runner import run_command

# Command or group of commands: the module that defines it, and its line in the help.
COMMAND_GROUPS = {
    "simulate": ("etl.commands", "Write simulated raw logs."),
    "spec": ("etl.commands", "Infer a data spec from files, and check one against them."),
    "etl": ("etl.commands", "Turn raw logs into clean, labeled tables."),
    "features": ("features.commands", "Build histories, counters and training examples."),
    "audience": ("features.audience.commands", "Measure how good labels of data providers are."),
    "train": ("training.commands", "Train and evaluate GEM and the LightGBM baseline."),
    "teacher-predictions": ("training.commands", "Write GEM's predictions and embeddings."),
    "rank": ("ranking.commands", "Train, promote and serve a calibrated ranker per surface."),
    "forecast": ("ranking.forecast.commands", "Forecast reach and performance of a targeting."),
    "roi": ("ranking.roi.commands", "Fit response curves of campaigns and plan budgets."),
    "registry": (
        "ranking.registry.commands",
        "List the features: owners, sources, freshness, models.",
    ),
    "report": ("ranking.commands", "Write an HTML report of the pipeline's results."),
    "explain": ("ranking.commands", "Show everything known about one impression."),
    "run": ("dags.commands", "Run the whole pipeline locally."),
    "refresh": ("dags.commands", "Update the current day's tables, and refit live rankers."),
    "batch": ("dags.commands", "Run several pipeline steps in one process."),
    "manifests": ("dags.commands", "Write the pipeline as Kubernetes manifests or Slurm scripts."),
    "erase": ("ranking.erasure", "Remove users from a lake."),
    "upgrade": ("dags.commands", "Migrate a lake to a changed spec."),
    "airflow": ("dags.commands", "Start a local Airflow with the pipeline's DAGs."),
    "bench": ("benchmarks.commands", "Run the benchmarks behind the figures in the README."),
    "doctor": ("etl.commands", "Check the installation and suggest fixes."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 2 for refused input, 75 for a temporary failure; see etl/errors.py.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _silence_libraries()
    if not words or words[0] in {"-h", "--help"}:
        _print_usage("gemline", {name: help_ for name, (_, help_) in COMMAND_GROUPS.items()})
        return 0
    group = words.pop(0)
    if group not in COMMAND_GROUPS:
        print(
            f"gemline: unknown command {group!r}; known: {', '.join(COMMAND_GROUPS)}",
            file=sys.stderr,
        )
        return 2
    commands: Any = importlib.import_module(COMMAND_GROUPS[group][0]).COMMANDS[group]
    if callable(commands):
        return run_command(commands, words, f"gemline {group}")
    return _run_group(group, commands, words)


def _run_group(
    group: str, commands: Mapping[str, Callable[[Any], object]], words: list[str]
) -> int:
    """Run a command of a group; without a known one, print the group's help."""
    if words and words[0] in commands:
        return run_command(commands[words[0]], words[1:], f"gemline {group} {words[0]}")
    summaries = {name: (c.__doc__ or "").partition("\n")[0] for name, c in commands.items()}
    _print_usage(f"gemline {group}", summaries)
    return 0 if words[:1] in ([], ["-h"], ["--help"]) else 2


def _print_usage(prog: str, summaries: Mapping[str, str]) -> None:
    print(f"usage: {prog} COMMAND …\n")
    width = max(map(len, summaries))
    for name, summary in summaries.items():
        print(f"  {name:<{width}}  {summary}")


def _silence_libraries() -> None:
    """Hide the deprecation warnings and the informational logs of libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.setdefault("TORCH_LOGS", "-all")
    for library in ("torchrec", "alembic", "mlflow"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict)\b")


if __name__ == "__main__":
    sys.exit(main())
