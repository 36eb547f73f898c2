"""Facts and figures to the page."""

import math
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from etl.errors import UserError
from etl.tables import atomic_io, records
from etl.tables.lake import Lake
from etl.tables.place import Place, place
from features.coverage import without_attributes
from ranking.report import facts, figures
from ranking.report.facts import NAMES
from training.knowledge.foretold import foretold
from training.loop.metrics import Score
from training.split import Split
from training.study import kept


@dataclass(frozen=True)
class Cell:
    """A number of the table; the best of its row among the models is marked."""

    text: str
    best: bool = False


def build_report(lake: Lake, raw: str, split: Split) -> Place:
    """Write `report.html` into the lake; returns its path."""
    found = facts.predictions(lake, raw, split)
    if not found:
        raise UserError(f"no model was evaluated in {lake.root}; run `gemline run` first")
    scores = facts.scores(lake, found)
    objectives, steps = facts.measured(lake, scores), records.seconds(lake.root)
    both = "student" in found and "distilled" in found
    compared = facts.compare(lake, found["distilled"], found["student"]) if both else []
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True
    )
    markup = {
        "ne_bars": figures.ne_bars(scores, NAMES, objectives) if objectives else "",
        "reliability": figures.reliability(found, NAMES, objectives) if objectives else "",
        "by_day": figures.by_day(foretold(lake, split.landed)),
        "step_times": figures.step_times(steps) if steps else "",
    }
    template = environment.get_template("page.html.j2")
    page = template.render(
        spec=lake.spec,
        split=split,
        names=NAMES,
        models=list(found),
        summary=summary(scores),
        table=table(scores),
        compared=compared,
        flow=facts.flow(lake),
        reasons=facts.quarantined(lake),
        parked=facts.parked(lake),
        without=without_attributes(lake, lake.days("examples")),
        studies=[(study, figures.study(study)) for study in kept(place(lake.root, "studies"))],
        **{name: environment.filters["safe"](svg) for name, svg in markup.items()},
    )
    path = place(lake.root, "report.html")
    atomic_io.write_text(path, page)
    return path


def table(scores: dict[str, list[Score]]) -> list[dict[str, object]]:
    """A row for each surface and objective, with a cell for each model and measure."""
    keys = [(s.surface, s.objective) for s in next(iter(scores.values()))]
    by = {m: {(s.surface, s.objective): s for s in rows} for m, rows in scores.items()}
    rows, last = [], None
    for surface, objective in keys:
        here = {
            m: found[(surface, objective)]
            for m, found in by.items()
            if (surface, objective) in found
        }
        one = next(iter(here.values()))
        rows.append(
            {
                "surface": surface if surface != last else "",
                "objective": objective,
                "rows": one.rows,
                "positives": one.positives,
                "first": surface != last,
                **{k: _cells(by, here, k) for k in ("ne", "auc", "calibration")},
            }
        )
        last = surface
    return rows


def _cells(models: object, here: dict[str, Score], measure: str) -> dict[str, Cell]:
    values = {m: getattr(s, measure) for m, s in here.items()}
    ours = {m: v for m, v in values.items() if m != "bound" and not math.isnan(v)}
    rank = {"ne": lambda v: v, "auc": lambda v: -v, "calibration": lambda v: abs(v - 1)}[measure]
    best = min(ours, key=lambda m: rank(ours[m])) if ours else None
    return {
        m: Cell(
            "" if m not in values or math.isnan(values[m]) else f"{values[m]:.4f}"[:6], m == best
        )
        for m in models  # type: ignore[attr-defined]
    }


def summary(scores: dict[str, list[Score]]) -> list[str]:
    """The run in a few sentences, one an objective."""
    sentences = []
    for s in scores.get("gem", []):
        if s.surface != "all" or math.isnan(s.ne):
            continue
        said = [f"{s.objective}: GEM has NE {s.ne:.3f} on {s.rows:,} rows"]
        for model in ("lightgbm", "student", "distilled", "bound"):
            other = [
                o for o in scores.get(model, []) if (o.surface, o.objective) == ("all", s.objective)
            ]
            if other and not math.isnan(other[0].ne):
                said.append(f"{NAMES[model]} {other[0].ne:.3f}")
        sentences.append(", ".join(said) + ".")
    return sentences
