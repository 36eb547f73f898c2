"""The command `gemline`: joins the folders' commands; imports a folder when it is called."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from etl.cli import run

# Group -> the module that owns its commands, and what the group is.
GROUPS = {
    "simulate": ("etl.commands", "write raw logs of simulated surfaces"),
    "etl": ("etl.commands", "raw logs to clean, labelled tables"),
    "features": ("features.commands", "clean tables to histories, counters and examples"),
    "train": ("training.commands", "examples to GEM, and the baseline"),
    "knowledge": ("training.commands", "GEM's scores and embeddings as a table"),
    "rank": ("ranking.commands", "one calibrated ranker per surface"),
    "report": ("ranking.commands", "what happened, in one HTML file"),
    "explain": ("ranking.commands", "all that is known of one impression"),
    "run": ("dags.commands", "the whole line, here and now"),
    "batch": ("dags.commands", "several commands in one process"),
    "upgrade": ("dags.commands", "a lake's tables under a changed spec"),
    "airflow": ("dags.commands", "Airflow on this machine, with the line's DAGs"),
    "bench": ("benchmarks.commands", "the figures that the README quotes"),
    "doctor": ("etl.commands", "what is installed, and what is missing with its fix"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _quieten()
    if not words or words[0] in {"-h", "--help"}:
        print("usage: gemline COMMAND …\n")
        print("\n".join(f"  {name:<10} {what}" for name, (_, what) in GROUPS.items()))
        return 0
    group = words.pop(0)
    if group not in GROUPS:
        print(f"gemline: no command {group!r}; known: {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    commands: dict[str, Any] = importlib.import_module(GROUPS[group][0]).COMMANDS[group]
    if callable(commands):
        return run(commands, words, f"gemline {group}")
    if not words or words[0] not in commands:
        print(f"usage: gemline {group} COMMAND …\n")
        for name, command in commands.items():
            print(f"  {name:<12} {(command.__doc__ or '').splitlines()[0]}")
        return 0 if words[:1] in ([], ["-h"], ["--help"]) else 2
    return run(commands[words[0]], words[1:], f"gemline {group} {words[0]}")


def _quieten() -> None:
    """Leave out what libraries say of their own future."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.setdefault("TORCH_LOGS", "-all")
    for library in ("torchrec", "alembic", "mlflow"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict)\b")


if __name__ == "__main__":
    sys.exit(main())
