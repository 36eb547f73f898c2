"""`gemline bench NAME`: one file a benchmark."""

from benchmarks import history, kuairand

COMMANDS = {"bench": {"kuairand": kuairand.bench, "history": history.bench}}
