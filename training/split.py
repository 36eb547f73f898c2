"""Which days a model learns from, is calibrated on and is tested on; always in that order."""

from datetime import date

from etl.spec.base import Strict
from etl.spec.model import DataSpec
from training.data.ripened import Ripened


class Split(Strict):
    """Days: train, then one for calibration, then test; labels may ripen until `landed`."""

    train_first: date
    train_last: date
    calibration: date | None
    test_first: date
    test_last: date
    landed: date

    def learning(self, spec: DataSpec) -> Ripened:
        """Labels that were final when training ended."""
        return Ripened(0, spec.day_end(self.train_last), "training")

    def calibrating(self, spec: DataSpec) -> Ripened:
        """Labels that became final between training and calibration, of rows not learned."""
        assert self.calibration is not None
        span = spec.day_end(self.train_last), spec.day_end(self.calibration)
        return Ripened(*span, "calibration")

    def testing(self, spec: DataSpec) -> Ripened:
        """All labels that are final by now."""
        return Ripened(0, spec.day_end(self.landed))
