"""Click probabilities of an oracle that knows the simulator's parameters, but not its latent state.

It reads what the log shows before each impression. An exact posterior is intractable, so this is a
filter, and its NE an upper bound of what the observable history allows:

- own interests and clickiness of users: a Gaussian by user, updated once a day (extended Kalman
  filter) by dwells, by the posts that a user chose within their category, and by clicks and long
  views of ads; the categories of chosen posts are not used;
- latent vectors of items: their posterior given category and creative;
- appeal of ads (quality): a Gaussian by ad and one by advertiser, updated once a day by clicks;
- intent of a session: its posterior given the categories of the posts viewed in it so far;
- need: the probability that the next purchase is due, given the last one.

U users, D latent dimensions, K = D + 1 (clickiness is the last), n events, C categories.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from scipy.stats import binom

from benchmarks.studies.observed_log import Impressions, ObservedDay, Sessions, purchases_before
from benchmarks.studies.oracle_beliefs import Beliefs, ItemPosterior, Need, first_purchase_is_due
from etl.array_types import Float64, Int64
from etl.simulator import ads as truth
from etl.simulator import behavior, entities, sessions, world
from etl.simulator.arrays import sample_without_replacement, sigmoid
from etl.simulator.config import VIDEO, WIFI, SimulatorConfig
from etl.simulator.entities import DIMENSIONS, TasteSpace
from etl.simulator.simulate import simulate_days
from etl.simulator.world import World
from training.evaluation.predictions import Predictions

OWN_SCALE = (1 - entities.PEER_VARIANCE_SHARE) ** 0.5
CENSORED_EXCESS, CENSORED_VARIANCE = 0.35, 2.0  # log dwells cut off by the next step


@cache
def choice_strength() -> float:
    """The effect of affinity on a choice among few posts, relative to one among all posts."""
    rng = np.random.default_rng(0)
    scores = behavior.CHOICE_AFFINITY_WEIGHT * rng.standard_normal(
        (100_000, behavior.CANDIDATE_POSTS)
    )
    weights = np.exp(scores)
    chosen = (weights * scores).sum(1) / weights.sum(1)
    return float(chosen.mean() / behavior.CHOICE_AFFINITY_WEIGHT**2)


@cache
def intent_odds(categories: int) -> float:
    """The factor on the odds that a viewed post is of the intended category."""
    n = np.arange(behavior.CANDIDATE_POSTS + 1)
    probability = binom.pmf(n, behavior.CANDIDATE_POSTS, 1 / categories)
    weight = n * np.exp(behavior.CHOICE_INTENT_WEIGHT)
    chosen = float(probability @ (weight / (weight + behavior.CANDIDATE_POSTS - n)))
    return chosen / (1 - chosen) * (categories - 1)


@cache
def policy_tilt() -> Float64:
    """How far the affinity of an ad at each position is above what else is known of it.

    In standard deviations, as the policy shows ads of which it estimates a high affinity.
    """
    rng = np.random.default_rng(0)
    affinity = rng.standard_normal((50_000, truth.CANDIDATES))
    estimate = affinity + truth.POLICY_NOISE * rng.standard_normal(affinity.shape)
    order, _ = sample_without_replacement(truth.POLICY_INVERSE_TEMPERATURE * estimate, rng)
    return np.asarray(np.take_along_axis(affinity, order, 1).mean(0))


@dataclass
class ObservableOracle:
    """The filter of one simulated run."""

    config: SimulatorConfig
    taste: TasteSpace
    posts: ItemPosterior
    ads: ItemPosterior
    first_world: World
    beliefs: Beliefs
    peer: Float64 = field(default_factory=lambda: np.zeros((0, DIMENSIONS)))

    @classmethod
    def of(cls, first: World) -> "ObservableOracle":
        """Before the first day of a world, of which only parameters and attributes are used."""
        return cls(
            first.config,
            first.taste,
            ItemPosterior.of(first.posts, first.taste),
            ItemPosterior.of(first.ads, first.taste),
            first,
            Beliefs.prior(first.config),
        )

    def start_day(self, attributes: Int64, day: int) -> None:
        """A day begins with these attributes of users (U, 3)."""
        if day:
            self.beliefs.drift()
        age = self.taste.age_band[attributes[:, entities.AGE_BAND]]
        country = self.taste.country[attributes[:, entities.COUNTRY]]
        share = entities.PEER_VARIANCE_SHARE**0.5
        self.peer = share * entities.mix_variance(0.6, age, country).astype(np.float64)

    def learn(self, day: ObservedDay) -> None:
        """Update the beliefs with the events of a day."""
        parts = [self._view_evidence(day), self._impression_evidence(day)]
        user = np.concatenate([part[0] for part in parts])
        order = np.argsort(user, kind="stable")
        gradient = np.concatenate([part[1] for part in parts])[order]
        information = np.concatenate([part[2] for part in parts])[order]
        self.beliefs.update_users(user[order], gradient, information)
        imp = day.impressions
        p = self.predict(day)
        self.beliefs.update_appeal(
            imp.item, self.first_world.ads.advertiser[imp.item], imp.is_click - p, p * (1 - p)
        )

    def predict(self, day: ObservedDay) -> Float64:
        """Click probabilities (n) of the impressions of a day."""
        logit, variance = self._click_logit(day.impressions)
        return self._mix_need_and_intent(day, logit, 1 / np.sqrt(1 + np.pi / 8 * variance))

    def _direction(self, surface: Int64, latent: Float64) -> Float64:
        """How affinity depends on interests: (n, D)."""
        return np.asarray(self.taste.emphasis[surface] * latent / DIMENSIONS**0.5)

    def _view_evidence(self, day: ObservedDay) -> tuple[Int64, Float64, Float64]:
        """User, gradient (n, K) and information (n, K, K) of post views: dwell and choice."""
        views, posts = day.views, self.posts
        own, peer = self.beliefs.mean[views.user, :-1], self.peer[views.user]
        interest = peer + OWN_SCALE * own
        direction = self._direction(views.surface, posts.mean[views.item])
        dwell = np.log(np.maximum(views.dwell_ms, 1) / behavior.DWELL_MEDIAN_MS)
        dwell = dwell + CENSORED_EXCESS * views.is_cut
        error = dwell - behavior.DWELL_AFFINITY * (interest * direction).sum(1)
        precision = 1 / (
            behavior.DWELL_SPREAD**2 * np.where(views.is_cut, CENSORED_VARIANCE, 1.0)
            + behavior.DWELL_AFFINITY**2 * posts.variance
        )
        h = _with_clickiness(behavior.DWELL_AFFINITY * OWN_SCALE * direction, 0.0)
        gradient = h * (precision * error)[:, None]
        information = precision[:, None, None] * h[:, :, None] * h[:, None, :]

        tilt = choice_strength() * behavior.CHOICE_AFFINITY_WEIGHT / DIMENSIONS**0.5
        slope = tilt * posts.spread * self.taste.emphasis[views.surface]  # of the residual
        residual_error = posts.residual[views.item] - slope * interest
        gradient[:, :-1] += OWN_SCALE * slope * residual_error / posts.spread
        diagonal = np.arange(DIMENSIONS)
        information[:, diagonal, diagonal] += (OWN_SCALE * slope) ** 2 / posts.spread
        return views.user, gradient, information

    def _impression_evidence(self, day: ObservedDay) -> tuple[Int64, Float64, Float64]:
        """User, gradient (n, K) and information (n, K, K) of clicks and long views of ads."""
        imp = day.impressions
        direction = OWN_SCALE * self._direction(imp.surface, self.ads.mean[imp.item])
        click = self.predict(day)
        long_view = sigmoid(self._long_view_logit(day))
        parts = (
            (imp.is_click - click, click, truth.CLICK_AFFINITY, 1.0),
            (imp.is_long_view - long_view, long_view, truth.LONG_VIEW_AFFINITY,
             truth.LONG_VIEW_CLICKINESS),
        )  # fmt: skip
        k = DIMENSIONS + 1
        gradient, information = np.zeros((len(imp.user), k)), np.zeros((len(imp.user), k, k))
        for surprise, p, affinity, clickiness in parts:
            h = _with_clickiness(affinity * direction, clickiness)
            gradient += h * surprise[:, None]
            information += (p * (1 - p))[:, None, None] * h[:, :, None] * h[:, None, :]
        return imp.user, gradient, information

    def _affinity(self, imp: Impressions) -> tuple[Float64, Float64]:
        """Mean and variance (n) of the affinity with shown ads."""
        interest = self.peer[imp.user] + OWN_SCALE * self.beliefs.mean[imp.user, :-1]
        direction = self._direction(imp.surface, self.ads.mean[imp.item])
        covariance = self.beliefs.covariance[imp.user][:, :-1, :-1]
        variance = OWN_SCALE**2 * np.einsum("nk,nkl,nl->n", direction, covariance, direction)
        weighted = interest * self.taste.emphasis[imp.surface]
        variance += self.ads.variance * (weighted**2).mean(1)
        mean = (interest * direction).sum(1) + policy_tilt()[imp.position] * variance
        return np.asarray(mean), np.asarray(variance)

    def _appeal(self, ad: Int64) -> Float64:
        advertiser = self.first_world.ads.advertiser[ad]
        return np.asarray(self.beliefs.ad[ad] + self.beliefs.advertiser[advertiser])

    def _click_logit(self, imp: Impressions) -> tuple[Float64, Float64]:
        """Logit (n) without need and intent, and its variance."""
        ad_format = self.first_world.ads.format[imp.item]
        affinity, variance = self._affinity(imp)
        logit = (
            truth.CLICK_BIAS[imp.surface]
            + truth.CLICK_AFFINITY * affinity
            + truth.CLICK_POSITION[imp.surface] * imp.position
            + truth.FORMAT_ON_SURFACE[imp.surface, ad_format]
            + truth.FORMAT_ON_DEVICE[imp.device, ad_format]
            + self._appeal(imp.item)
            + self.beliefs.mean[imp.user, -1]
        )
        variance = truth.CLICK_AFFINITY**2 * variance
        variance += self.beliefs.covariance[imp.user, -1, -1]
        variance += 1 / self.beliefs.ad_precision[imp.item]
        advertiser = self.first_world.ads.advertiser[imp.item]
        variance += 1 / self.beliefs.advertiser_precision[advertiser]
        return logit, variance

    def _long_view_logit(self, day: ObservedDay) -> Float64:
        imp, need = day.impressions, self._need(day)
        is_video = self.first_world.ads.format[imp.item] == VIDEO
        is_slow = is_video & (imp.connection != WIFI)
        return np.asarray(
            truth.LONG_VIEW_BIAS[imp.surface]
            + truth.LONG_VIEW_AFFINITY * self._affinity(imp)[0]
            + truth.LONG_VIEW_POSITION * imp.position
            + truth.LONG_VIEW_NEED * (need.due + (1 - need.due) * need.otherwise)
            + truth.LONG_VIEW_VIDEO * is_video
            + truth.LONG_VIEW_SLOW_VIDEO * is_slow
            + truth.LONG_VIEW_QUALITY * self._appeal(imp.item)
            + truth.LONG_VIEW_CLICKINESS * self.beliefs.mean[imp.user, -1]
        )

    def _mix_need_and_intent(
        self, day: ObservedDay, logit: Float64, shrink: float | Float64 = 1.0
    ) -> Float64:
        """Probabilities (n) averaged over whether a purchase is due, and over the intent."""
        need, intent = self._need(day), self._intent(day)
        total = np.zeros(len(logit))
        for p_need, effect in ((need.due, np.ones(len(logit))), (1 - need.due, need.otherwise)):
            for p_intent, intended in ((intent, 1.0), (1 - intent, 0.0)):
                shifted = logit + truth.CLICK_NEED * effect + truth.CLICK_INTENT * intended
                total += p_need * p_intent * sigmoid(shrink * shifted)
        return total

    def _need(self, day: ObservedDay) -> "Need":
        """The need for the category of each impression."""
        imp = day.impressions
        category = self.first_world.ads.category[imp.item]
        last_ms = purchases_before(day, imp.user, category, self.config.categories)
        period = self.taste.period_ms[category]
        is_cyclic = world.CYCLES_PER_USER / self.config.categories
        return Need.of(
            (imp.time_ms - last_ms) / period,
            last_ms >= 0,
            first_purchase_is_due((imp.time_ms - self.config.start_ms) / period, is_cyclic),
        )

    def _intent(self, day: ObservedDay) -> Float64:
        """The probability (n) that an impression's category is the intent of its session."""
        imp = day.impressions
        interest = self.peer + OWN_SCALE * self.beliefs.mean[:, :-1]
        affinity = (interest @ self.taste.category.T / DIMENSIONS**0.5)[imp.user]
        tilt = choice_strength() * behavior.CHOICE_AFFINITY_WEIGHT
        share = np.exp(tilt * affinity)
        share /= share.sum(1, keepdims=True)
        odds = intent_odds(self.config.categories)
        counts = Sessions.of(day).views_before(day, self.first_world.posts.category)
        score = sessions.INTENT_AFFINITY_WEIGHT * affinity + counts * np.log(odds)
        score -= counts.sum(1, keepdims=True) * np.log1p((odds - 1) * share)
        posterior = np.exp(score - score.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        category = self.first_world.ads.category[imp.item]
        return np.asarray(posterior[np.arange(len(category)), category])


def _with_clickiness(direction: Float64, weight: float) -> Float64:
    """Directions (n, D) and the weight of clickiness as (n, K)."""
    return np.concatenate((direction, np.full((len(direction), 1), weight)), 1)


def filtered_days(config: SimulatorConfig) -> Iterator[tuple[ObservedDay, Float64]]:
    """Each day of a run, and the click probabilities of its impressions given the log before."""
    oracle = log = None
    for day, (world_today, events, _) in enumerate(simulate_days(config)):
        oracle = oracle or ObservableOracle.of(world_today)
        log = ObservedDay.of(config, day, events, log)
        oracle.start_day(world_today.users.attributes, day)
        yield log, oracle.predict(log)
        oracle.learn(log)


def with_observable_probabilities(rows: Predictions, config: SimulatorConfig) -> Predictions:
    """The same rows with the oracle's click probabilities; other objectives keep theirs.

    Raises KeyError for an impression that the simulator did not log.
    """
    probability: dict[str, float] = {}
    for day, predicted in filtered_days(config):
        names = np.char.add("i", day.impressions.impression.astype(str))
        probability.update(zip(names.tolist(), predicted.tolist(), strict=True))
    probabilities = rows.probabilities.copy()
    column = rows.objectives.index("click")
    probabilities[:, column] = [probability[name] for name in rows.impression_ids]
    return replace(rows, probabilities=probabilities)
