"""GEM's predictions of the test days, by the model that was trained until training ended."""

from etl.spec.units import each_day
from etl.tables.lake import Lake
from training.data.parts import Shuffle
from training.gem import load_trained
from training.predictions import Predictions, predict
from training.split import Split


def predict_test(lake: Lake, split: Split, batch_rows: int = 2048) -> Predictions:
    """Probabilities on all rows of the test days that have a final label."""
    trained, reader = load_trained(lake, split.train_last)
    days = list(each_day(split.test_first, split.test_last))
    batches = reader.batches(days, split.testing(lake.spec), batch_rows, Shuffle(None))
    return predict(lambda batch: trained.model(batch).logits, batches, list(lake.spec.objectives))
