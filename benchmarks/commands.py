"""`gemline bench NAME`: one file a benchmark."""

from benchmarks import (
    ablation,
    agreement,
    calibration,
    data,
    history,
    house,
    kills,
    kuairand,
    model,
    operations,
    quality,
    sequence,
    serving,
    simulator,
    staleness,
    tabular,
    transfer,
)

COMMANDS = {
    "bench": {
        "kuairand": kuairand.bench,
        "history": history.bench,
        "simulator": simulator.bench,
        "data": data.bench,
        "tabular": tabular.bench,
        "sequence": sequence.bench,
        "quality": quality.bench,
        "ablation": ablation.bench,
        "agreement": agreement.bench,
        "model": model.bench,
        "transfer": transfer.bench,
        "staleness": staleness.bench,
        "calibration": calibration.bench,
        "serving": serving.bench,
        "operations": operations.bench,
        "kills": kills.bench,
        "house": house.bench,
    }
}
