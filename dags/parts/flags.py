"""The days of models, as templates that a run fills in."""

from dags.line import ModelFlags
from dags.parts.part import DAYS, NEW_DAYS, RUN

SPLIT = f"split({RUN})"


def _split(*names: str) -> str:
    return ":".join(f"{{{{ {SPLIT}.{name} }}}}" for name in names)


TESTED = _split("test_first", "test_last")
LANDED = ("--landed", _split("last"))
FLAGS = ModelFlags(
    learned=("--days", NEW_DAYS),
    known=("--days", DAYS),
    split=(
        *("--train", _split("first", "train_last")),
        *("--calibration", _split("calibration")),
        *("--test", TESTED),
        *LANDED,
    ),
    tested=("--days", TESTED),
    landed=LANDED,
)
