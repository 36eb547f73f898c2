"""`gemline audience fit` and `choose`: published figures, and refusals that write nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml

from dags.advertiser_steps import audience_steps
from dags.steps import PipelinePaths
from etl.spec import load_spec
from etl.spec.sections import UNKNOWN_LABEL
from etl.tables import arrow, audience_schemas
from etl.tables.lake import Lake
from features.audience.estimate import fit_audience
from gemline import main
from tests.features.audits import Labels, write_audience

AUDIENCE, CLASSES, PROVIDERS = "age_band", ("young", "old"), ("acme", "bluefin")
DAY = date(2026, 1, 2)
DATA_UNTIL = ("--data-until", str(DAY))
RATES = {"x": 0.8, "y": 0.2, UNKNOWN_LABEL: 0.5}  # P(young | label of acme)
Counts = dict[str, dict[Labels, int]]


@dataclass(frozen=True)
class Audited:
    """A lake with audits of two providers, of which the second gives all labels at random."""

    lake: Lake
    spec_path: Path

    def write(self, counts: Counts, audited: tuple[str, ...] | None = None) -> None:
        """Replace impressions, and audits of some campaigns; by default of all."""
        shares = {}
        for campaign in counts if audited is None else audited:
            by_labels = counts.get(campaign, {("x", "x"): 1})
            young = sum(size * RATES[labels[0]] for labels, size in by_labels.items())
            share = young / sum(by_labels.values())
            shares[campaign] = {"young": share, "old": 1 - share}
        write_audience(self.lake, AUDIENCE, DAY, counts, shares)

    def run(self, command: str, *flags: str) -> int:
        lake_flags = ("--spec", str(self.spec_path), "--lake", self.lake.root, *DATA_UNTIL)
        return main(["audience", command, *lake_flags, *flags])

    def quality(self) -> pa.Table:
        return arrow.snapshot(self.lake, audience_schemas.audience_quality(self.lake.spec)).read()

    def versions(self) -> dict[str, int]:
        names = [schema(self.lake.spec).name for schema in audience_schemas.AUDIENCE_SCHEMAS]
        return {name: self.lake.version(name) for name in names if self.lake.exists(name)}


@pytest.fixture
def audited(tmp_path: Path, spec_path: Path) -> Audited:
    """An audience that can be estimated, and its estimate of the day."""
    spec = yaml.safe_load(spec_path.read_text())
    spec["audiences"][AUDIENCE] |= {"classes": [*CLASSES], "providers": [*PROVIDERS]}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    world = Audited(Lake(str(tmp_path / "lake"), load_spec(path)), path)
    world.write(distinct_campaigns())
    assert world.run("fit") == 0
    return world


def distinct_campaigns() -> Counts:
    """Twelve campaigns with few people whom the first provider does not know."""
    rng = np.random.default_rng(0)
    counts: Counts = {}
    for number in range(12):
        of_first = rng.dirichlet([8, 2, 1])
        of_second = rng.dirichlet([1, 1])
        counts[f"b{number}"] = {
            (first, second): int(10_000 * of_first[i] * of_second[j]) + 1
            for i, first in enumerate(RATES)
            for j, second in enumerate(("x", "y"))
        }
    return counts


def test_lift_and_coverage_are_about_all_impressions_not_the_audited_ones(audited: Audited) -> None:
    """Audited campaigns reach mostly the young; most impressions are of other campaigns."""
    counts = distinct_campaigns()
    of_all = {"x": 300_000, "y": 600_000, UNKNOWN_LABEL: 100_000}
    for label, size in of_all.items():
        known = sum(n for c in counts.values() for labels, n in c.items() if labels[0] == label)
        counts.setdefault("large", {})[label, "x"] = size - known
    audited.write(counts, tuple(distinct_campaigns()))
    assert audited.run("fit") == 0
    young_share = sum(size * RATES[label] for label, size in of_all.items()) / 1_000_000
    quality = audited.quality().to_pylist()
    shares = {"young": young_share, "old": 1 - young_share}
    of_acme = [row for row in quality if row["provider"] == "acme"]
    assert {row["label"] for row in of_acme} == {*RATES}
    for row in of_acme:
        rates = {"young": RATES[row["label"]], "old": 1 - RATES[row["label"]]}
        expected = rates[row["true_class"]] / shares[row["true_class"]]
        assert row["lift"] == pytest.approx(expected, rel=0.05)
        assert row["coverage"] == pytest.approx(0.9)
    for class_ in CLASSES:  # P(class) = sum of P(label) P(class | label)
        weighted = [r["lift"] * r["impressions"] for r in of_acme if r["true_class"] == class_]
        assert sum(weighted) == pytest.approx(1_000_000, rel=1e-6)
    assert {row["coverage"] for row in quality if row["provider"] == "bluefin"} == {1.0}


def test_choose_compares_with_the_rate_of_all_impressions(
    audited: Audited, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = distinct_campaigns() | {"old": {("y", "x"): 1_000_000}}
    audited.write(counts, tuple(distinct_campaigns()))
    goal = ("--audience", AUDIENCE, "--target", "young", "--impressions", "100")
    capsys.readouterr()
    assert audited.run("choose", *goal) == 0
    rate = float(capsys.readouterr().out.rpartition("of all impressions: ")[2].split()[0])
    assert rate < 0.3


def silent(audited: Audited) -> None:
    """The first provider knows nobody whom an audited campaign reached."""
    counts: dict[str, dict[tuple[str, ...], int]] = {
        campaign: {(UNKNOWN_LABEL, second): n for (_, second), n in by_labels.items()}
        for campaign, by_labels in distinct_campaigns().items()
    }
    others: dict[str, dict[tuple[str, ...], int]] = {
        "large": {("x", "x"): 10_000, ("y", "x"): 10_000}
    }
    audited.write(counts | others, tuple(counts))


def same_mix(audited: Audited) -> None:
    counts = distinct_campaigns()
    audited.write(dict.fromkeys(counts, counts["b0"]))


def no_impressions(audited: Audited) -> None:
    """Only campaigns that nobody saw were audited."""
    audited.write(distinct_campaigns(), ("b100", "b101", "b102"))


def no_audits(audited: Audited) -> None:
    audited.write(distinct_campaigns(), ())


REFUSED: dict[Callable[[Audited], None], str] = {
    silent: "provider acme gave all people of the audited campaigns the label unknown, so that "
    "nobody audited it: audit a campaign that reaches people whom it labels, or remove it",
    same_mix: "the audited campaigns have too similar shares of the labels of acme",
    no_impressions: f"no campaign with impressions until {DAY} has audits of {AUDIENCE}",
    no_audits: f"audience {AUDIENCE} has no audits until {DAY} in its window: load an auditor's",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_audits_that_do_not_suffice_are_refused_and_nothing_is_written(
    audited: Audited, capsys: pytest.CaptureFixture[str], change: Callable[[Audited], None]
) -> None:
    change(audited)
    quality, versions = audited.quality(), audited.versions()
    capsys.readouterr()
    assert audited.run("fit") == 2
    error = capsys.readouterr().err
    assert REFUSED[change] in error and AUDIENCE in error and error.count("\n") == 1
    assert audited.versions() == versions and audited.quality() == quality


@pytest.mark.parametrize("change", [same_mix, no_audits], ids=lambda change: change.__name__)
def test_the_step_of_the_pipeline_leaves_out_what_cannot_be_estimated_and_goes_on(
    audited: Audited, capsys: pytest.CaptureFixture[str], change: Callable[[Audited], None]
) -> None:
    """Its rows of the day would be those of other audits."""
    paths = PipelinePaths(audited.spec_path, "logs", audited.lake.root)
    *_, step = audience_steps(audited.lake.spec, paths, (), DATA_UNTIL)
    capsys.readouterr()
    change(audited)
    assert audited.quality().num_rows and main(step.command) == 0
    assert REFUSED[change] in capsys.readouterr().out
    assert not audited.quality().num_rows


def test_an_audience_of_nobody_is_refused(
    audited: Audited, capsys: pytest.CaptureFixture[str]
) -> None:
    """No label has as many users as may be bought."""
    counts: Counts = {f"b{n}": {(UNKNOWN_LABEL, UNKNOWN_LABEL): 1000} for n in range(6)}
    for n, labels in enumerate((("x", UNKNOWN_LABEL), ("y", UNKNOWN_LABEL), (UNKNOWN_LABEL, "x"))):
        counts[f"b{n}"][labels] = 5
    audited.write(counts)
    versions = audited.versions()
    goal = ("--audience", AUDIENCE, "--impressions", "100", "--target", "young")
    capsys.readouterr()
    assert audited.run("choose", *goal) == 2
    assert "the audience is empty: no known label of any provider" in capsys.readouterr().err
    assert audited.versions() == versions


def test_coefficients_that_the_prior_decides_are_reported(
    audited: Audited, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three campaigns tell the labels of each provider apart, but not those of both together."""
    few = dict(list(distinct_campaigns().items())[:3])
    enough = audited.quality()
    capsys.readouterr()
    audited.write(distinct_campaigns(), tuple(few))
    assert audited.run("fit") == 0
    note = f"note: audience {AUDIENCE}: the 3 audited campaigns identify 3 of 4 directions"
    assert note in capsys.readouterr().out
    weights = [pc.max(quality["prior_weight"]).as_py() for quality in (enough, audited.quality())]
    assert 0 <= weights[0] < 0.02 and 0.05 < weights[1] <= 1
    audited.write(distinct_campaigns())
    assert audited.run("fit") == 0
    assert "note" not in capsys.readouterr().out
    assert fit_audience(audited.lake, AUDIENCE, DAY).notes == []
