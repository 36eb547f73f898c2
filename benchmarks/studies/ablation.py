"""`gemline bench ablation`: what each part of GEM contributes.

A long, resumable study on simulated logs of three surfaces. Each row changes one option of the
default GEM, over several seeds: the difference of NE with a bootstrap interval over users, paired
by impression. Options of sequence layers are changed in a GEM of three layers, and compared with
it, because many have no effect in a single one. Model selection never uses these days.

`gemline bench agreement`: whether small models rank changes of GEM like large ones.

The changes of `gemline bench ablation` at two scales: Kendall's tau between their differences of
NE, with a bootstrap interval over users. A long, resumable study.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import DEMO_SIMULATOR, RESULTS, SIMULATOR_SPEC, BenchmarkResult
from dags.commands import Scale
from dags.pipeline import PipelinePaths, all_days_flags, data_steps, latest_mature_split
from dags.runner import run_pipeline
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.spec.units import parse_date_range
from training.config import TrainConfig

if TYPE_CHECKING:
    from benchmarks.studies.trials import TrialRunner
    from training.evaluation.predictions import ConfidenceInterval, Predictions

DAYS = "2026-01-01:2026-01-11"
TEST_DAYS = 3
OBJECTIVE = "click"

ADS = ["ad_impression", "ad_view", "ad_long_view", "ad_click", "conversion"]
POSTS = ["post_view", "post_like", "message_sent", "post_purchase"]


def model_change(**options: object) -> dict[str, object]:
    """Options that differ from the default model."""
    return {"model": options}


def sequence_change(**options: object) -> dict[str, object]:
    """Options that differ from the default sequence encoder."""
    return model_change(sequence=options)


DEPTH = 3
DEEP = f"{DEPTH} layers"


def deep_change(**options: object) -> dict[str, object]:
    """Options that differ from a sequence encoder of DEPTH layers; many need several layers."""
    return sequence_change(num_layers=DEPTH, **options)


DEEP_CHANGES: Mapping[str, dict[str, object]] = {
    "flow: s2n": deep_change(flow="s2n"),
    "flow: n2s": deep_change(flow="n2s"),
    "flow: int": deep_change(flow="int"),
    "flow: int, PFFN": deep_change(flow="int", personalization="pffn"),
    "flow: int, GDPA as its kernel": deep_change(
        flow="int", gdpa_scale="weights", gdpa_activation="silu"
    ),
    "flow: int, hierarchical seed pooling": deep_change(flow="int", pooling="hsp"),
    "flow: int, CLS rows": deep_change(flow="int", cls_tokens=2),
    "flow: int, MaskNet": deep_change(flow="int", masknet=True),
    "flow: int, 32 events": deep_change(flow="int", max_events=32),
    "flow: int, 32 events of each candidate": deep_change(
        flow="int", context="candidate", max_events=32
    ),
    "computation skip": deep_change(flow="int", computation_skip=True),
    "rotary time": deep_change(rotary=True),
    "HSTU layers": deep_change(layer="hstu"),
    "families of events": deep_change(
        event_groups={"ads": {"events": ADS}, "posts": {"events": POSTS}}
    ),
    "pyramid": deep_change(pyramid_stride=4),
}

CHANGES: Mapping[str, dict[str, object]] = {
    "Wukong: static projection": model_change(input_dependent_projection=False),
    "Wukong: cross-layer attention": model_change(cross_layer_rows=4),
    "Wukong: rows shrink": model_change(wukong_rows=[48, 24]),
    "DCNv2": model_change(interaction="dcnv2"),
    "Wukong, DCNv2 beside": model_change(parallel_interaction="dcnv2"),
    "DHEN": model_change(interaction="dhen"),
    "two streams": model_change(interaction="finalmlp"),
    "no interactions (MLP)": model_change(interaction="plain"),
    "weak features share rows": model_change(low_cardinality_threshold=64),
    "rows of users": model_change(user_hash_buckets=2**17),
    "flow: sole": sequence_change(flow="sole"),
    "activation unit": sequence_change(target_attention="activation_unit"),
    "next-action loss": sequence_change(next_action_weight=0.1),
    "no history": {"max_length": 0},
    "32 events": {"max_length": 32},
    "click, then conversion": model_change(esmm_parents={"conversion": "click"}),
    "no auxiliary objectives": model_change(auxiliary_weight=0),
    "value head": model_change(value_loss_weight=0.05),
    "a quarter of the negatives": {"negative_sampling_rate": {"click": 0.25, "long_view": 0.25}},
    "DIN": model_change(
        interaction="plain", sequence={"flow": "sole", "target_attention": "activation_unit"}
    ),
    "HSTU": model_change(
        interaction="plain", sequence={"layer": "hstu", "rotary": True, "num_layers": DEPTH}
    ),
    DEEP: deep_change(),
    **{f"{DEEP}, {name}": change for name, change in DEEP_CHANGES.items()},
}
DEFAULT = "default"
SEPARATE = "a model for each surface"
LIGHTGBM = "LightGBM"


class AblationArgs(StrictModel):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder for logs, tables and finished trainings")]
    seeds: int = Field(default=5, ge=1)
    scale: Scale = "small"
    only: Annotated[
        tuple[str, ...], tyro.conf.arg(help="only these changes; the study is then not saved")
    ] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_ablation(args: AblationArgs) -> None:
    """Difference of NE by each part of GEM, on simulated logs (long; resumable)."""
    unknown = sorted(set(args.only) - {*CHANGES, SEPARATE, LIGHTGBM})
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(CHANGES)}")
    trials = prepare_trials(args.work)
    differences = dict(ne_differences(trials, args.scale, args.seeds, args.only))
    result = BenchmarkResult(
        f"NE of {OBJECTIVE} less that of GEM {args.scale} (of {DEEP}, where a change names them), "
        f"{args.seeds} seeds, 1e-4 [95 %]",
        ("change", "difference of NE", ""),
    )
    for name, interval in differences.items():
        result.rows.append((name, str(interval), _verdict(interval)))
        result.figures[name] = [round(x, 6) for x in (interval.value, interval.low, interval.high)]
    result.show(args.as_json)
    if not args.only:
        command = f"gemline bench ablation --work work/ablation --seeds {args.seeds}"
        result.save_study(RESULTS / "ablation.json", command, differences)


def _verdict(difference: "ConfidenceInterval") -> str:
    if not difference.is_significant:
        return "within noise"
    return "worse" if difference.low > 0 else "better"


def prepare_trials(work: Path) -> "TrialRunner":
    """Simulated logs and their tables, built once, and the trainings on them."""
    from benchmarks.studies.trials import TrialRunner
    from etl.commands import SimulateArgs, simulate
    from etl.spec.units import DaySplit
    from etl.tables.lake import Lake

    spec, work = load_spec(SIMULATOR_SPEC), work.resolve()
    paths = PipelinePaths(SIMULATOR_SPEC, str(work / "raw"), str(work / "lake"))
    days = latest_mature_split(spec, *parse_date_range(DAYS))
    simulate(SimulateArgs(simulator=DEMO_SIMULATOR, out=Path(paths.raw)))
    run_pipeline(spec, paths, data_steps(paths, all_days_flags(days)))
    split = DaySplit(
        train_first=days.train_first,
        train_last=days.test_last - timedelta(days=TEST_DAYS),
        calibration=None,
        test_first=days.test_last - timedelta(days=TEST_DAYS - 1),
        test_last=days.test_last,
        data_until=days.data_until,
    )
    return TrialRunner(Lake(paths.lake, spec), split, work / "trials")


def ne_differences(
    trials: "TrialRunner", scale: Scale, seeds: int, only: tuple[str, ...]
) -> Iterator[tuple[str, "ConfidenceInterval"]]:
    """Each change and its difference of NE from its reference; all changes if `only` is empty."""
    from training.evaluation.predictions import paired_ne_difference

    configs = [TrainConfig(scale=scale, seed=seed) for seed in range(seeds)]
    for name in (*CHANGES, SEPARATE, LIGHTGBM):
        if not only or name in only:
            changed = predictions_of_change(trials, name, configs)
            reference = predictions_of_change(trials, reference_of(name), configs)
            yield name, paired_ne_difference(changed, reference, OBJECTIVE)


def reference_of(change: str) -> str:
    """The model that a change is compared with: DEFAULT, or that of DEPTH layers."""
    return DEEP if change.startswith(f"{DEEP}, ") else DEFAULT


def predictions_of_change(
    trials: "TrialRunner", change: str, configs: list[TrainConfig]
) -> list["Predictions"]:
    """Predictions with a change, one per configuration (one in all for LightGBM)."""
    from training.baseline import BaselineConfig

    if change == DEFAULT:
        return [trials.gem_all_surfaces(config) for config in configs]
    if change == SEPARATE:
        return [trials.gem_per_surface(config) for config in configs]
    if change == LIGHTGBM:
        return [trials.lightgbm(BaselineConfig()).sorted_by_impression()]
    return [
        trials.gem_all_surfaces(TrainConfig.model_validate(config.model_dump() | CHANGES[change]))
        for config in configs
    ]


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from benchmarks.studies.trials import TrialRunner

    Floats = npt.NDArray[np.float64]

RESAMPLES = 500


class AgreementArgs(StrictModel):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder of `gemline bench ablation`")]
    small_scale: Scale = "tiny"
    large_scale: Scale = "base"
    seeds: int = Field(default=3, ge=1)
    only: Annotated[tuple[str, ...], tyro.conf.arg(help="only these changes")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_agreement(args: AgreementArgs) -> None:
    """Kendall's tau between two scales' orders of GEM's changes (long; resumable)."""
    names = args.only or tuple(CHANGES)
    unknown = sorted(set(names) - set(CHANGES))
    if unknown or len(names) < 3:
        raise UserError(
            f"--only needs three changes or more of {', '.join(CHANGES)}"
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
        )
    trials = prepare_trials(args.work)
    small_losses, large_losses = (
        user_logloss(trials, scale, args.seeds, names)
        for scale in (args.small_scale, args.large_scale)
    )
    tau, low, high = kendall_tau_interval(small_losses, large_losses)
    result = BenchmarkResult(
        f"Changes of GEM at {args.small_scale} and at {args.large_scale}, {args.seeds} seeds",
        ("changes", "Kendall's tau", "95 %"),
    )
    result.rows.append((str(len(names)), f"{tau:.2f}", f"{low:.2f} to {high:.2f}"))
    for key, value in (("tau", tau), ("tau_low", low), ("tau_high", high)):
        result.record(key, value, "all changes are equal")
    result.show(args.as_json)


def user_logloss(trials: "TrialRunner", scale: Scale, seeds: int, names: Sequence[str]) -> "Floats":
    """Logloss by user, mean over seeds (U, 1 + changes): of the default, then of each change."""
    import numpy as np

    from training.evaluation.predictions import sums_by_user

    configs = [TrainConfig(scale=scale, seed=seed) for seed in range(seeds)]
    models = [[trials.gem_all_surfaces(config) for config in configs]]
    models += [predictions_of_change(trials, name, configs) for name in names]
    return np.stack([sums_by_user(model, OBJECTIVE)[:, :-2].mean(1) for model in models], 1)


def kendall_tau_interval(
    small_losses: "Floats", large_losses: "Floats", seed: int = 0
) -> tuple[float, float, float]:
    """Kendall's tau between two scales' losses (U, 1 + changes), and its 95 % bounds."""
    import numpy as np

    users = len(small_losses)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(users, np.full(users, 1 / users), RESAMPLES)
    resampled = [kendall_tau(drawn @ small_losses, drawn @ large_losses) for drawn in weights]
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return kendall_tau(small_losses.sum(0), large_losses.sum(0)), float(low), float(high)


def kendall_tau(small_losses: "Floats", large_losses: "Floats") -> float:
    """Kendall's tau between the scales' loss differences from the default, of (1 + changes)."""
    from scipy.stats import kendalltau

    small_effects = small_losses[1:] - small_losses[0]
    large_effects = large_losses[1:] - large_losses[0]
    return float(kendalltau(small_effects, large_effects).statistic)
