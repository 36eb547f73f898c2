"""A ranker with programs that are compiled for this machine, to be timed beside those of ONNX."""

import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

from etl.errors import UserError
from ranking.compiled import CompiledProgram
from ranking.package.program import Program
from ranking.package.ranker import Ranker
from ranking.student.programs import Traced, require_compiler, traced
from ranking.student.trained import TrainedStudent
from training.data.parts import Shuffle
from training.data.ripened import EVERYTHING

EXAMPLE_ROWS = 64


def compiled_form(ranker: Ranker, student: TrainedStudent, day: date) -> Ranker | None:
    """The ranker with the programs of a student of its sizes; None without a C++ compiler."""
    try:
        require_compiler()
    except UserError:
        return None
    batch = next(student.assembly.reader.batches([day], EVERYTHING, EXAMPLE_ROWS, Shuffle(None)))
    user, rank = traced(student, student.assembly(batch))
    return replace(
        ranker,
        user_program=_compiled(user, ranker.user_program),
        rank_program=_compiled(rank, ranker.rank_program),
    )


def _compiled(program: Traced, same: Program) -> CompiledProgram:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.pt2")
        program.to_native(path)
        return CompiledProgram(path.read_bytes(), "the compiled program", same)
