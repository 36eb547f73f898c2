"""GEM learns what has ripened, and tells of the new day what it knew before."""

from typing import Any

from airflow.sdk import DAG, chain, task

from dags.line import model_steps
from dags.operators import GemlineOperator, operator_of
from dags.parts.flags import FLAGS
from dags.parts.part import DAYS, PINNED, Line, after, tell, this_run


def gem(line: Line) -> DAG:
    """The DAG of the one model of all surfaces."""
    settings, assets = line.settings, line.assets
    steps, _ = model_steps(line.spec, settings.place, FLAGS, settings.gem_flags)
    with line.dag("gem", after(assets.features), "GEM and its knowledge") as dag:

        @task(outlets=[assets.gem])
        def publish_gem(**context: Any) -> None:
            tell(context, assets.gem, this_run(context))

        hold = line.hold()
        train, tell_of = (operator_of(step, settings, PINNED) for step in steps)
        chain(hold, train, tell_of, _healthy(line), line.publish("knowledge"), line.release(hold))
        train >> publish_gem()
    return dag


def _healthy(line: Line) -> GemlineOperator:
    """The task that fails where GEM has foretold the day badly: then no ranker learns from it."""
    command = ("train", "health", *line.settings.place.flags, "--days", DAYS, *PINNED)
    return GemlineOperator(task_id="health", command=command)
