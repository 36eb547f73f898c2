"""`gemline bench ablation`: what is each part of GEM worth? A long study; it goes on where stopped.

Simulated logs of three surfaces. Each row changes one thing of the default GEM; five seeds each,
difference of NE over users drawn with replacement, paired. Model selection never sees these days.
"""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.result import Result
from dags.commands import Scale
from dags.line import Place, data_steps, newest_mature
from dags.local import run_line
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import Strict
from etl.spec.units import parse_days
from training.config import TrainConfig
from training.study import Study

if TYPE_CHECKING:
    from training.loop.paired import Interval
    from training.predictions import Predictions
    from training.trials import Trials

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
SIMULATOR = ROOT / "conf" / "simulator" / "demo.yaml"
DAYS = "2026-01-01:2026-01-11"
TEST_DAYS = 3
RESULTS = ROOT / "benchmarks" / "results" / "ablation.json"
OBJECTIVE = "click"

ADS = ["ad_impression", "ad_view", "ad_long_view", "ad_click", "conversion"]
POSTS = ["post_view", "post_like", "message_sent", "post_purchase"]


def model(**options: object) -> dict[str, object]:
    """What differs from the default model."""
    return {"model": options}


def sequence(**options: object) -> dict[str, object]:
    """What differs from the default sequence side."""
    return model(sequence=options)


CHANGES: Mapping[str, dict[str, object]] = {
    "Wukong: static projection": model(attentive=False),
    "Wukong: cross-layer attention": model(across_rows=4),
    "DCNv2": model(interaction="dcnv2"),
    "Wukong, DCNv2 beside": model(beside="dcnv2"),
    "DHEN": model(interaction="dhen"),
    "two streams": model(interaction="two_streams"),
    "no interactions (MLP)": model(interaction="plain"),
    "weak features share rows": model(weak_below=64),
    "no rows of users": model(user_rows=0),
    "flow: sole": sequence(flow="sole"),
    "flow: s2n": sequence(flow="s2n"),
    "flow: n2s": sequence(flow="n2s"),
    "flow: int": sequence(flow="int"),
    "flow: int, PFFN": sequence(flow="int", personal="pffn"),
    "hierarchical seed pooling": sequence(pooling="hsp"),
    "CLS rows": sequence(cls_rows=2),
    "rotary time": sequence(rotary=True),
    "HSTU layer": sequence(layer="hstu"),
    "computation skip": sequence(skip=True),
    "families of events": sequence(
        families={"ads": {"events": ADS, "layers": 2}, "posts": {"events": POSTS}}
    ),
    "pyramid": sequence(
        shorten=4, families={"all": {"events": [*ADS, *POSTS], "layers": 2}}
    ),
    "next-action loss": sequence(next_action=0.1),
    "no history": {"max_length": 0},
    "32 events": {"max_length": 32},
    "click, then conversion": model(after={"conversion": "click"}),
    "value head": model(value=0.05),
    "a quarter of the negatives": {"negatives": {"click": 0.25, "long_view": 0.25}},
    "DIN": model(interaction="plain", sequence={"flow": "sole"}),
    "HSTU": model(interaction="plain", sequence={"layer": "hstu", "rotary": True}),
}  # fmt: skip
SEPARATE = "a model for each surface"
LIGHTGBM = "LightGBM"


class AblationArgs(Strict):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder for logs, tables and finished trainings")]
    seeds: int = Field(default=5, ge=1)
    scale: Scale = "small"
    only: Annotated[
        tuple[str, ...], tyro.conf.arg(help="some of the changes; the table is not kept then")
    ] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: AblationArgs) -> None:
    """Difference of NE by each part of GEM, on simulated logs (long; resumable)."""
    unknown = sorted(set(args.only) - {*CHANGES, SEPARATE, LIGHTGBM})
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(CHANGES)}")
    trials = tables(args.work)
    found = dict(differences(trials, args.scale, args.seeds, args.only))
    result = Result(
        f"NE of {OBJECTIVE} less that of GEM {args.scale}, {args.seeds} seeds, 1e-4 [95 %]",
        ("change", "difference of NE", ""),
    )
    for name, interval in found.items():
        verdict = "within noise" if not interval.sure else "worse" if interval.low > 0 else "better"
        result.rows.append((name, str(interval), verdict))
        result.figures[name] = [round(x, 6) for x in (interval.value, interval.low, interval.high)]
    result.show(args.as_json)
    if not args.only:
        kept(args, result, found)


def kept(args: AblationArgs, result: Result, found: Mapping[str, "Interval"]) -> None:
    """The table and its picture, where the report finds them."""
    Study(
        title=result.title,
        command=f"gemline bench ablation --work work/ablation --seeds {args.seeds}",
        columns=tuple(result.columns),
        rows=tuple(result.rows),
        intervals={n: (1e4 * i.value, 1e4 * i.low, 1e4 * i.high) for n, i in found.items()},
    ).keep(RESULTS)


def tables(work: Path) -> "Trials":
    """Simulated logs and their tables, once, and the trainings on them that were ended."""
    from etl.commands import SimulateArgs, simulate
    from etl.tables.lake import Lake
    from training.split import Split
    from training.trials import Trials

    spec, work = load_spec(SPEC), work.resolve()
    place = Place(SPEC, str(work / "raw"), str(work / "lake"))
    days = newest_mature(spec, *parse_days(DAYS))
    simulate(SimulateArgs(simulator=SIMULATOR, out=Path(place.raw)))
    run_line(spec, place, data_steps(place, days.landed))
    split = Split(
        train_first=days.first,
        train_last=days.test_last - timedelta(days=TEST_DAYS),
        calibration=None,
        test_first=days.test_last - timedelta(days=TEST_DAYS - 1),
        test_last=days.test_last,
        landed=days.last,
    )
    return Trials(Lake(place.lake, spec), split, work / "trials")


def differences(
    trials: "Trials", scale: Scale, seeds: int, only: tuple[str, ...]
) -> Iterator[tuple[str, "Interval"]]:
    """Each change and its difference of NE from the default."""
    from training.loop.paired import apart

    configs = [TrainConfig(scale=scale, seed=seed) for seed in range(seeds)]
    default = [trials.pooled(config) for config in configs]
    for name in (*CHANGES, SEPARATE, LIGHTGBM):
        if not only or name in only:
            yield name, apart(changed(trials, name, configs), default, OBJECTIVE)


def changed(trials: "Trials", name: str, configs: list[TrainConfig]) -> list["Predictions"]:
    """Predictions of a change, a seed each."""
    from training.baseline import BaselineConfig

    if name == SEPARATE:
        return [trials.separate(config) for config in configs]
    if name == LIGHTGBM:
        return [trials.lightgbm(BaselineConfig()).in_order()]
    told = [config.model_dump() | CHANGES[name] for config in configs]
    return [trials.pooled(TrainConfig.model_validate(each)) for each in told]
