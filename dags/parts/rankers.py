"""A ranker a surface: trained, judged, promoted if it is better, and its scores."""

from dataclasses import replace
from typing import Any

from airflow.sdk import DAG, chain, task, task_group

from dags.line import Days, Step, model_steps, newest_mature, ranker_steps, score_step
from dags.operators import operator_of
from dags.parts.flags import FLAGS
from dags.parts.part import PINNED, Line, after, tell, this_run
from dags.runs import Run
from etl.errors import UserError

ANY = "SURFACE"  # stands for a surface until a mapped task knows which
ONE_SURFACE = ("ranker-", "promotion-", "scores-")


def rankers(line: Line) -> DAG:
    """The DAG of all that is made of a split of days, with a mapped task a surface."""
    settings, assets = line.settings, line.assets

    def split(run: Run) -> Days:
        return newest_mature(line.spec, settings.first_day, run.last)

    about = "rankers, judged and promoted"
    with line.dag("rankers", after(assets.gem & assets.knowledge), about, split=split) as dag:

        @task.short_circuit
        def enough_days(**context: Any) -> bool:
            """Whether a day is there for each of training, calibration and test."""
            try:
                split(this_run(context))
            except UserError as reason:
                print(reason)
                return False
            return True

        @task_group
        def surface(name: str) -> None:
            chain(*(_of_surface(line, step, name) for step in _steps_of_a_surface(line)))

        @task(outlets=[assets.rankers])
        def publish_rankers(**context: Any) -> None:
            tell(context, assets.rankers, this_run(context))

        hold = line.hold()
        judged = _judged(line)
        made = surface.expand(name=list(line.spec.ad_surfaces))
        enough_days() >> hold >> [*judged.values(), made]
        made >> judged["online"] >> publish_rankers()
        [*judged.values(), made] >> line.release(hold)
        [made, *(task for name, task in judged.items() if name != "report")] >> judged["report"]
    return dag


def _judged(line: Line) -> dict[str, Any]:
    """The tasks of all surfaces together."""
    _, steps = model_steps(line.spec, line.settings.place, FLAGS)
    return {
        step.name: operator_of(step, line.settings, PINNED)
        for step in steps
        if not step.name.startswith(ONE_SURFACE)
    }


def _steps_of_a_surface(line: Line) -> list[Step]:
    place = line.settings.place
    return [*ranker_steps(place, FLAGS, ANY), score_step(place, FLAGS, ANY)]


def _of_surface(line: Line, step: Step, surface: Any) -> Any:
    command = tuple(surface if word == ANY else word for word in step.command)
    named = replace(step, name=step.name.removesuffix(f"-{ANY}"), command=command)
    words = "application_args" if step.engine == "spark" else "command"
    shown = f"{{{{ task.{words}[{command.index(surface)}] }}}}"
    return operator_of(named, line.settings, PINNED, map_index_template=shown)
