"""`gemline bench NAME`: one file a benchmark."""

from benchmarks import data, history, kuairand, model, simulator, tabular

COMMANDS = {
    "bench": {
        "kuairand": kuairand.bench,
        "history": history.bench,
        "simulator": simulator.bench,
        "data": data.bench,
        "tabular": tabular.bench,
        "model": model.bench,
    }
}
