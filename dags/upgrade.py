"""After a change of the spec: which steps need not run again, as their tables are kept."""

from collections.abc import Collection, Sequence

from dags.inputs import inputs_of
from dags.line import Place, Step
from etl.spec import DataSpec
from etl.tables import records


def remember(
    spec: DataSpec, place: Place, steps: Sequence[Step], kept: Collection[str]
) -> list[str]:
    """Steps whose tables are all kept have finished under the new spec, too; returns these."""
    found = []
    for step in steps:
        record = records.read(place.lake, step.name)
        if record and set(step.writes) <= set(kept):
            inputs = inputs_of(spec, place, steps, step)
            records.write(place.lake, step.name, inputs, record.seconds)
            found.append(step.name)
    return found
