"""P(class | labels) is found from the classes of campaigns alone, and what cannot be is refused."""

import itertools
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.array_types import Float64, Int64
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.sections import AudienceSpec
from etl.tables import arrow, audience_schemas
from etl.tables.lake import Lake, arrow_schema
from features.audience.additive import CampaignAudits, fit_additive
from features.audience.estimate import AudienceFit, fit_audience, quality_rows
from features.audience.quality import Supply, labels_to_buy, normalized_information, rank_purchases

CLASSES, UNKNOWN = 3, 3  # the last label of each provider is that of users whom it does not know
PROVIDERS = ("good", "poor", "copy")
LABELS = ("x", "y", "z", "unknown")


class Users:
    """Users with a class, labelled by a good provider, a poor one, and one that copies the good."""

    def __init__(self, seed: int, count: int = 40_000) -> None:
        self.rng = np.random.default_rng(seed)
        self.classes = self.rng.choice(CLASSES, count, p=[0.5, 0.3, 0.2])
        good, poor = (self._label(accuracy) for accuracy in (0.8, 0.3))
        labels = np.stack([good, poor, np.where(self.rng.random(count) < 0.9, good, poor)], 1)
        is_known = self.rng.random(labels.shape) < [0.9, 0.6, 0.8]
        self.labels = np.where(is_known, labels, UNKNOWN)
        self.combinations, index = np.unique(self.labels, axis=0, return_inverse=True)
        self.combination = index.ravel()
        self.impressions = np.bincount(self.combination).astype(float)

    def _label(self, accuracy: float) -> Int64:
        is_right = self.rng.random(len(self.classes)) < accuracy
        wrong = self.rng.choice(CLASSES, len(self.classes), p=[0.2, 0.5, 0.3])
        return np.where(is_right, self.classes, wrong)

    def audits(self, campaigns: int, audited: int) -> CampaignAudits:
        """Audits of campaigns that buy labels of one provider each, in different shares."""
        mixtures = np.zeros((campaigns, len(self.combinations)))
        by_class = np.zeros((campaigns, CLASSES))
        for c in range(campaigns):
            bid = self.rng.dirichlet(np.full(len(LABELS), 0.6))
            weight = bid[self.labels[:, self.rng.integers(len(PROVIDERS))]]
            people = self.rng.choice(len(self.classes), 5000, p=weight / weight.sum())
            mixtures[c] = np.bincount(self.combination[people], minlength=mixtures.shape[1])
            panel = people[:audited]
            by_class[c] = np.bincount(self.classes[panel], minlength=CLASSES)
        mixtures /= mixtures.sum(1, keepdims=True)
        names = (LABELS,) * len(PROVIDERS)
        return CampaignAudits(PROVIDERS, names, self.combinations, mixtures, by_class)

    def supply(self, min_count: int = 1) -> Supply:
        return Supply(self.impressions, self.impressions, min_count)

    def confusion(self, provider: int) -> Float64:
        """The true P(class | label) (labels, classes)."""
        joint = np.zeros((len(LABELS), CLASSES))
        np.add.at(joint, (self.labels[:, provider], self.classes), 1)
        return np.asarray(joint / joint.sum(1, keepdims=True))


def test_estimates_find_the_truth_where_attribution_in_proportion_does_not() -> None:
    users = Users(0)
    audits = users.audits(campaigns=60, audited=3000)
    model = fit_additive(audits)
    for provider in range(len(PROVIDERS)):
        truth = users.confusion(provider)
        found = model.confusion(provider, users.impressions).value
        error = np.abs(found - truth).mean()
        assert error < 0.015
        weights = audits.mixtures @ audits.one_hot_labels(provider)
        shares = audits.audited / audits.audited.sum(1, keepdims=True)
        proportional = weights.T @ shares / weights.sum(0)[:, None]
        assert np.abs(proportional - truth).mean() > 4 * error


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    covered = []
    for seed in range(20):
        users = Users(seed)
        model = fit_additive(users.audits(campaigns=30, audited=500))
        for provider in range(len(PROVIDERS)):
            truth, found = users.confusion(provider), model.confusion(provider, users.impressions)
            covered.append((found.low <= truth) & (truth <= found.high))
    assert 0.93 <= np.mean(covered) <= 0.99


def test_impressions_of_few_people_widen_the_intervals() -> None:
    """The same shares, reported as if each person had been counted ten times."""
    audits = Users(1).audits(campaigns=40, audited=200)
    users = Users(1)
    tenfold = fit_additive(replace(audits, audited=audits.audited * 10))
    once = fit_additive(audits)
    assert once.dispersion < 1.5 and tenfold.dispersion > 6
    widths = [m.confusion(0, users.impressions) for m in (once, tenfold)]
    ratio = np.mean(widths[1].high - widths[1].low) / np.mean(widths[0].high - widths[0].low)
    assert 0.75 < ratio < 1.25


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_estimates_are_distributions_and_ignore_the_order(seed: int) -> None:
    users = Users(seed % 5)
    audits = users.audits(campaigns=20, audited=300)
    expected = fit_additive(audits).confusion(0, users.impressions)
    np.testing.assert_allclose(expected.value.sum(1), 1)
    assert (expected.low <= expected.value).all() and (expected.value <= expected.high).all()
    rng = np.random.default_rng(seed)
    campaigns, order = rng.permutation(20), rng.permutation(len(users.combinations))
    moved = replace(
        audits,
        labels=audits.labels[order],
        mixtures=audits.mixtures[campaigns][:, order],
        audited=audits.audited[campaigns],
    )
    found = fit_additive(moved).confusion(0, users.impressions[order])
    np.testing.assert_allclose(found.value, expected.value, atol=2e-3)


def test_a_campaign_audited_in_two_halves_counts_as_one() -> None:
    users = Users(2)
    audits = users.audits(campaigns=12, audited=400)
    halves = replace(
        audits,
        mixtures=np.concatenate((audits.mixtures, audits.mixtures[:1])),
        audited=np.concatenate(
            (audits.audited[:1] / 2, audits.audited[1:], audits.audited[:1] / 2)
        ),
    )
    joined, split = (fit_additive(a).confusion(1, users.impressions) for a in (audits, halves))
    np.testing.assert_allclose(split.value, joined.value, atol=2e-3)


def with_repeated_provider(audits: CampaignAudits) -> CampaignAudits:
    """The audits with a further provider, whose labels are those of the first."""
    return replace(
        audits,
        providers=(*PROVIDERS, "again"),
        label_names=(LABELS,) * 4,
        labels=np.concatenate((audits.labels, audits.labels[:, :1]), 1),
    )


def test_a_provider_that_repeats_another_adds_no_certainty() -> None:
    users = Users(3)
    audits = users.audits(campaigns=40, audited=1000)
    twice = with_repeated_provider(audits)
    once, repeated = fit_additive(audits), fit_additive(twice)
    np.testing.assert_allclose(
        repeated.class_probabilities(), once.class_probabilities(), atol=0.05
    )


def test_a_provider_that_repeats_another_needs_no_further_campaigns() -> None:
    """Ten directions for three providers of four labels, also if one is there twice."""
    users = Users(3)
    audits = users.audits(campaigns=40, audited=1000)
    twice = with_repeated_provider(audits)
    for several in (audits, twice):
        assert several.identified_directions(users.impressions) == (10, 10)
    few = replace(twice, mixtures=twice.mixtures[:6], audited=twice.audited[:6])
    assert few.identified_directions(users.impressions) == (6, 10)
    weights = [
        fit_additive(one).confusion(0, users.impressions).prior_weight for one in (twice, few)
    ]
    assert weights[0].max() < 0.01 and weights[1].max() > 0.02


def test_labels_that_no_campaign_distinguishes_are_refused() -> None:
    users = Users(4)
    audits = users.audits(campaigns=30, audited=400)
    same_mix = replace(audits, mixtures=np.tile(audits.mixtures[:1], (30, 1)))
    with pytest.raises(UserError, match="too similar shares of the labels of good") as refusal:
        fit_additive(same_mix)
    assert "condition number" in str(refusal.value)
    assert "Audit a campaign that reaches mostly people with the label" in str(refusal.value)
    with pytest.raises(UserError, match="3 audited campaigns cannot tell the 4 labels of good"):
        fit_additive(replace(audits, mixtures=audits.mixtures[:3], audited=audits.audited[:3]))
    rare = audits.mixtures * np.where((audits.labels == UNKNOWN).any(1), 1e-4, 1.0)
    fit_additive(replace(audits, mixtures=rare / rare.sum(1, keepdims=True)))
    silent = replace(
        audits,
        label_names=(LABELS, ("unknown",), LABELS),
        labels=audits.labels * np.array([1, 0, 1]),
    )
    with pytest.raises(UserError, match=r"provider poor gave all people .* the label unknown"):
        fit_additive(silent)


def test_information_is_zero_for_labels_that_say_nothing_and_one_for_certain_ones() -> None:
    shares = np.array([0.2, 0.5, 0.3])
    assert normalized_information(np.tile([0.6, 0.4], (3, 1)), shares) == pytest.approx(0)
    assert normalized_information(np.eye(3), shares) == pytest.approx(1)


def test_the_chosen_labels_have_the_highest_rate_of_all_that_reach_as_many() -> None:
    rng = np.random.default_rng(5)
    rates, available = rng.random(4), np.array([100.0, 50, 80, 300])
    bought = labels_to_buy(rates, available, 150)
    assert bought.sum() == 150 and (bought <= available).all()
    for _ in range(200):
        other = rng.dirichlet(np.ones(4)) * 150
        if (other <= available).all():
            assert other @ rates <= bought @ rates + 1e-9


def test_the_best_provider_for_a_target_comes_first_and_unknown_users_are_not_bought() -> None:
    users = Users(6)
    model = fit_additive(users.audits(campaigns=60, audited=2000))
    purchases = rank_purchases(model, users.supply(), [2], 4000)
    assert [purchase.provider for purchase in purchases][2] == "poor"
    for purchase in purchases:
        assert purchase.labels[0] == "z" and "unknown" not in purchase.labels
        provider = PROVIDERS.index(purchase.provider)
        truth = users.confusion(provider)[LABELS.index("z"), 2]
        if purchase.labels == ("z",):
            assert purchase.low <= truth <= purchase.high
    nobody = Supply(0 * users.impressions, users.impressions, 1)
    with pytest.raises(UserError, match="the audience is empty"):
        rank_purchases(model, nobody, [2], 10)
    scarce = rank_purchases(model, users.supply(), [2], 1e9)
    assert all(p.impressions < 1e9 and len(p.labels) == 3 for p in scarce)


def test_labels_of_too_few_impressions_are_not_bought() -> None:
    users = Users(6)
    model = fit_additive(users.audits(campaigns=60, audited=2000))
    of_label = [np.bincount(users.labels[:, p], minlength=len(LABELS))[:UNKNOWN] for p in range(3)]
    fewest = int(min(counts.min() for counts in of_label)) + 1
    for purchase in rank_purchases(model, users.supply(fewest), [2], 1e9):
        counts = of_label[PROVIDERS.index(purchase.provider)]
        bought = {name for name, n in zip(LABELS, counts, strict=False) if n >= fewest}
        assert set(purchase.labels) == bought
    with pytest.raises(UserError, match="as many users as min_count"):
        rank_purchases(model, users.supply(10**6), [2], 10)


def test_labels_of_few_users_are_neither_published_nor_bought() -> None:
    """One user with many impressions is not enough."""
    people = Users(6)
    model = fit_additive(people.audits(campaigns=60, audited=2000))
    has_rare = people.combinations[:, 0] == LABELS.index("z")
    users = np.where(has_rare, 0, people.impressions)
    users[has_rare.argmax()] = 1
    audience = AudienceSpec(classes=LABELS[:3], providers=PROVIDERS, campaign="advertiser_id")
    fit = AudienceFit(audience, model, people.impressions, users)
    published = {
        (str(row["provider"]), str(row["label"]))
        for row in quality_rows("age", fit, date(2026, 1, 1))
    }
    assert ("good", "z") not in published and {("good", "x"), ("poor", "x")} <= published
    purchases = rank_purchases(model, Supply(people.impressions, users, 20), [2], 1e9)
    bought = {purchase.provider: purchase.labels for purchase in purchases}
    assert set(bought["good"]) == {"x", "y"} and "z" in bought["poor"]


def test_days_of_a_campaign_count_as_their_panels(tmp_path: Path, lake_spec: DataSpec) -> None:
    """Days of as many impressions, of other labels, audited by 20 and by 500 people."""
    classes, rates = ("18-24", "25-34"), {"x": 0.9, "y": 0.1}
    audience = AudienceSpec(classes=classes, providers=("acme",), campaign="advertiser_id")
    spec = lake_spec.model_copy(update={"audiences": {"age": audience}})
    lake, rng = Lake(str(tmp_path), spec), np.random.default_rng(0)
    counts, audits = [], []
    for campaign, (number, panel) in itertools.product(range(12), enumerate((20, 500))):
        shared = {
            "audience": "age",
            "campaign": f"b{campaign}",
            "day": date(2026, 1, 1) + timedelta(days=number),
        }
        share = rng.uniform()
        for label, of_label in (("x", share), ("y", 1 - share)):
            size = round(1000 * of_label)
            counts.append(shared | {"labels": [label], "impressions": size, "users": size})
        true = share * rates["x"] + (1 - share) * rates["y"]
        for class_, of_class in zip(classes, (true, 1 - true), strict=True):
            row = {"true_class": class_, "share": of_class, "impressions": panel}
            audits.append(shared | row)
    for schema, rows in (
        (audience_schemas.audience_counts(spec), counts),
        (audience_schemas.audits(spec), audits),
    ):
        table = pa.Table.from_pylist(rows, schema=arrow_schema(schema))
        arrow.replace_rows(lake, schema, table, "day IS NOT NULL", {})
    fit = fit_audience(lake, "age", date(2026, 1, 2))
    assert fit.model.audits.label_names == (("x", "y"),)
    found = fit.model.confusion(0, fit.impressions).value[:, 0]
    np.testing.assert_allclose(found, [rates["x"], rates["y"]], atol=0.04)
