"""The split of days into training, calibration and test; used by DAGs, models and the report."""

from datetime import date

from etl.spec.base import StrictModel


class DaySplit(StrictModel):
    """Days for training, then one for calibration, then those for testing.

    Labels are taken as they are known at the end of `data_until`, the last day with logs, so that
    labels of the test days can mature. `calibration` is None where nothing is calibrated.
    """

    train_first: date
    train_last: date
    calibration: date | None
    test_first: date
    test_last: date
    data_until: date
