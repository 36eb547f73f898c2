"""Which days a model learns from, is calibrated on and is tested on; always in that order."""

from datetime import date, timedelta

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from training.data.chunks import Ripened


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
        return Ripened(0, spec.day_end(self.train_last))

    def calibrating(self, spec: DataSpec) -> Ripened:
        """Labels that became final between training and calibration."""
        assert self.calibration is not None
        return Ripened(spec.day_end(self.train_last), spec.day_end(self.calibration))

    def testing(self, spec: DataSpec) -> Ripened:
        """All labels that are final by now."""
        return Ripened(0, spec.day_end(self.landed))


def default_split(spec: DataSpec, first: date, last: date) -> Split:
    """Test on the newest day whose labels are all final, calibrate on the one before it.

    Raises UserError where too few days are left to train on.
    """
    shortest = min(o.ripens_after for o in spec.objectives.values())
    ripening = spec.ripens_after_days if shortest < 86400 <= _longest(spec) else 0
    test = last - timedelta(days=ripening)
    split = Split(
        train_first=first,
        train_last=test - timedelta(days=2),
        calibration=test - timedelta(days=1),
        test_first=test,
        test_last=test,
        landed=last,
    )
    if split.train_last < first:
        raise UserError(
            f"{first} to {last} is too short: labels need {ripening} days to ripen, and one day "
            "each is for test, calibration and training"
        )
    return split


def _longest(spec: DataSpec) -> int:
    return max(o.ripens_after for o in spec.objectives.values())
