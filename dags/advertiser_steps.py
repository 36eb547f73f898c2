"""Steps for advertisers: audiences, return on spend and forecasts, where a spec declares them."""

from dags.steps import ModelFlags, PipelinePaths, Step
from etl.spec import DataSpec

LABEL_TABLES = ("audience_labels", "audience_label_snapshots")
AUDIENCE_TABLES = (*LABEL_TABLES, "audits", "audience_counts")
FORECAST_TABLES = ("forecast_margins", "forecast_sketches", "forecast_supply", "forecast_sample")


def audience_steps(
    spec: DataSpec,
    paths: PipelinePaths,
    day_flags: tuple[str, ...],
    data_until: tuple[str, ...],
    raw_flags: tuple[str, ...] = (),
) -> list[Step]:
    """Count impressions by the labels of data providers, and estimate how good these are.

    No steps for a spec without audiences. `raw_flags` are further flags of the steps that read raw
    files.
    """
    if not spec.audiences:
        return []
    flags = paths.cli_flags
    return [
        Step(
            "audience",
            "spark",
            ("audience", "count", *flags, "--raw", paths.raw, *raw_flags, *day_flags),
            ("raw", "events", "attributes_item"),
            (*AUDIENCE_TABLES, "quarantine"),
        ),
        Step(
            "audience_quality",
            "torch",
            ("audience", "fit", *flags, *data_until, "--skip-unidentified"),
            AUDIENCE_TABLES,
            ("audience_quality",),
        ),
    ]


def roi_steps(
    spec: DataSpec,
    paths: PipelinePaths,
    day_flags: tuple[str, ...],
    data_until: tuple[str, ...],
    raw_flags: tuple[str, ...] = (),
) -> list[Step]:
    """Join billed spend with outcomes, and fit response curves; no steps without campaigns.

    `raw_flags` are further flags of the steps that read raw files.
    """
    if spec.roi is None:
        return []
    flags = paths.cli_flags
    return [
        Step(
            "campaign_days",
            "spark",
            ("roi", "load", *flags, "--raw", paths.raw, *raw_flags, *day_flags),
            ("raw", "impressions", "attributes_item"),
            ("campaign_spend", "campaign_days", "quarantine"),
        ),
        Step(
            "response_curves",
            "torch",
            ("roi", "report", *flags, *data_until),
            ("campaign_days",),
            ("response_curves",),
        ),
    ]


def forecast_steps(spec: DataSpec, paths: PipelinePaths, flags: ModelFlags) -> list[Step]:
    """Sample the scored impressions for forecasts; no step for a spec without a forecast."""
    if spec.forecast is None:
        return []
    scores = (f"scores/surface={surface}" for surface in spec.ad_surfaces)
    labels = LABEL_TABLES if spec.audiences else ()
    step = Step(
        "forecast",
        "spark",
        ("forecast", "build", *paths.cli_flags, *flags.data_until),
        (*scores, "events", "attributes_user", *labels),
        FORECAST_TABLES,
    )
    return [step]
