"""Reports of a student's loss that is not finite: the non-finite tensors, and what to change."""

from etl.errors import UserError
from ranking.student.trained import TrainedStudent


def non_finite_loss_error(student: TrainedStudent) -> UserError:
    """The error to raise if the loss of a student is not finite."""
    surfaces = ", ".join(student.input_builder.reader.surfaces)
    names = [
        name
        for module in (student.student, student.tables)
        for name, tensor in module.state_dict().items()
        if not tensor.isfinite().all()
    ]
    return UserError(
        f"the loss of the ranker of {surfaces} is not finite; not finite: "
        f"{', '.join(names) or 'the loss alone'}. Extreme values of numeric attributes need "
        "`transform: log` in the spec; otherwise run `gemline rank train` with a lower --dense-lr "
        "or --embedding-lr"
    )
