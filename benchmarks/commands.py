"""`gemline bench NAME`: one file a benchmark."""

from benchmarks import kuairand

COMMANDS = {"bench": {"kuairand": kuairand.bench}}
