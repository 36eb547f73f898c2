"""`gemline bench NAME`: one file a benchmark."""

from benchmarks import history, kuairand, simulator

COMMANDS = {
    "bench": {"kuairand": kuairand.bench, "history": history.bench, "simulator": simulator.bench}
}
