"""Ad requests, and the logging policy that selects the ads.

Ground truth: logistic models of the outcomes of an impression, and conversion delays.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from etl.array_types import Floats, Int64
from etl.simulator.arrays import Events, RowBatch, new_ids, sample_without_replacement, sigmoid
from etl.simulator.config import DAY_MS, SALES, VIDEO, WIFI, EventType
from etl.simulator.entities import TIER
from etl.simulator.sessions import Sessions, Steps
from etl.simulator.world import World

CANDIDATES = 12
MAX_SLOTS_BY_SURFACE = np.array([6, 5, 4])
POLICY_INVERSE_TEMPERATURE = 1.5
POLICY_NOISE = 0.6  # sigma of the error of the policy's estimate of affinity


@dataclass(frozen=True)
class Impressions(RowBatch):
    """One row per ad shown, ordered by session, then by request, then by position.

    Attributes:
        impression, request: (n,) ids, unique over the run.
        session: (n,) row of the session.
        ad: (n,) row of the ad.
        position: (n,) position in the request, from 0.
        time_ms: (n,) epoch ms.
        propensity: (n,) probability with which the policy drew this ad for this position.
        affinity: (n,) how much the user likes the ad on this surface.
    """

    impression: Int64
    request: Int64
    session: Int64
    ad: Int64
    position: Int64
    time_ms: Int64
    propensity: Floats
    affinity: Floats


def serve_ads(
    world: World, day: int, sessions: Sessions, steps: Steps, rng: np.random.Generator
) -> Impressions:
    """Fill the slots of every request with ads drawn from its candidates.

    Ads are drawn without replacement from the softmax of a noisy estimate of affinity. Targeted ads
    are drawn for the users that they buy only, so that some slots may stay empty.
    """
    requests = steps.take(steps.is_ad_request)
    session = sessions.take(requests.session)
    candidates = _candidates(world.ads.active_on(day), len(requests), rng)
    interest = world.users.interest(world.taste)[session.user]
    affinity = world.taste.affinity(interest, session.surface, world.ads.latent[candidates])
    estimate = affinity + POLICY_NOISE * rng.standard_normal(affinity.shape)
    logits = POLICY_INVERSE_TEMPERATURE * estimate
    eligible = np.full(len(requests), CANDIDATES)
    if world.audience is not None:
        is_eligible = world.audience.is_eligible(session.user, world.ads.advertiser[candidates])
        logits, eligible = np.where(is_eligible, logits, -np.inf), is_eligible.sum(axis=1)
    order, propensity = sample_without_replacement(logits, rng)

    slots = np.minimum(rng.integers(1, MAX_SLOTS_BY_SURFACE[session.surface] + 1), eligible)
    request, position = np.nonzero(np.arange(CANDIDATES) < slots[:, None])
    drawn = order[request, position]
    return Impressions(
        impression=new_ids(day, request.size),
        request=new_ids(day, len(requests))[request],
        session=requests.session[request],
        ad=candidates[request, drawn],
        position=position,
        time_ms=requests.time_ms[request],
        propensity=propensity[request, position].astype(np.float32),
        affinity=affinity[request, drawn],
    )


def _candidates(active: Int64, requests: int, rng: np.random.Generator) -> Int64:
    """(requests, CANDIDATES) distinct active ads: one from each stratum of a shuffled list."""
    edges = np.linspace(0, active.size, CANDIDATES + 1).astype(np.int64)
    return rng.permutation(active)[rng.integers(edges[:-1], edges[1:], (requests, CANDIDATES))]


def impression_events(sessions: Sessions, impressions: Impressions) -> Events:
    """The records of the impressions."""
    session = sessions.take(impressions.session)
    return Events.of_type(
        EventType.AD_IMPRESSION,
        session=impressions.session,
        user=session.user,
        item=impressions.ad,
        surface=session.surface,
        event_time=impressions.time_ms,
        request=impressions.request,
        impression=impressions.impression,
        position=impressions.position,
        propensity=impressions.propensity,
        device=session.device,
        connection=session.connection,
    )


# Rows: feed, reels, messaging. Columns: image, video, carousel, story.
FORMAT_ON_SURFACE = np.array([[0.2, 0.0, 0.3, -0.3], [-0.5, 0.5, -0.3, 0.4], [0.3, -0.4, 0.1, 0.2]])
# Rows: android, ios, web.
FORMAT_ON_DEVICE = np.array([[0.0, 0.1, -0.1, 0.1], [0.0, 0.1, 0.1, 0.1], [0.2, -0.2, 0.2, -0.4]])

CLICK_BIAS = np.array([-3.6, -4.05, -2.85])  # by surface
CLICK_POSITION = np.array([-0.18, -0.30, -0.10])  # by surface
CLICK_AFFINITY, CLICK_INTENT, CLICK_NEED = 0.8, 0.8, 2.3

LONG_VIEW_BIAS = np.array([-2.2, -1.8, -2.4])  # by surface
LONG_VIEW_POSITION = -0.12
LONG_VIEW_AFFINITY, LONG_VIEW_VIDEO, LONG_VIEW_SLOW_VIDEO, LONG_VIEW_NEED = 1.3, 0.7, -0.4, 0.4
LONG_VIEW_QUALITY, LONG_VIEW_CLICKINESS = 0.5, 0.4

CONVERSION_BIAS, CONVERSION_NEED, CONVERSION_AFFINITY = -3.5, 2.0, 0.3
CONVERSION_SALES, CONVERSION_TIER, CONVERSION_PRICE = 0.7, 0.3, -0.3

ATTRIBUTION_WINDOW_MS = 3 * DAY_MS
MEAN_DELAY_MS, MAX_DELAY_MS = 1 * DAY_MS, 5 * DAY_MS


@dataclass(frozen=True)
class OutcomeProbabilities(RowBatch):
    """(n,) probabilities of the outcomes of impressions; a conversion requires a click."""

    click: Floats
    long_view: Floats
    conversion_given_click: Floats


@dataclass(frozen=True)
class GroundTruth(RowBatch):
    """The true probabilities of impressions, which the logs do not contain.

    Attributes:
        impression: (n,) id.
        event_time: (n,) epoch ms.
        p_click, p_long_view: (n,) probabilities.
        p_conversion: (n,) probability of a click and a conversion within the attribution window.
        expected_value: (n,) bid times the probability of the event that the campaign pays for.
    """

    impression: Int64
    event_time: Int64
    p_click: Floats
    p_long_view: Floats
    p_conversion: Floats
    expected_value: Floats


def outcome_probabilities(
    world: World, sessions: Sessions, impressions: Impressions
) -> OutcomeProbabilities:
    """The true probabilities of the outcomes of impressions."""
    session, ad = sessions.take(impressions.session), world.ads.take(impressions.ad)
    user = world.users.take(session.user)
    surface = session.surface
    need = world.cycles.need(world.taste, session.user, ad.category, impressions.time_ms)
    is_video = ad.format == VIDEO
    click = (
        CLICK_BIAS[surface]
        + CLICK_AFFINITY * impressions.affinity
        + CLICK_POSITION[surface] * impressions.position
        + CLICK_INTENT * (session.intent == ad.category)
        + CLICK_NEED * need
        + FORMAT_ON_SURFACE[surface, ad.format]
        + FORMAT_ON_DEVICE[session.device, ad.format]
        + ad.quality
        + user.clickiness
    )
    long_view = (
        LONG_VIEW_BIAS[surface]
        + LONG_VIEW_AFFINITY * impressions.affinity
        + LONG_VIEW_POSITION * impressions.position
        + LONG_VIEW_NEED * need
        + LONG_VIEW_VIDEO * is_video
        + LONG_VIEW_SLOW_VIDEO * (is_video & (session.connection != WIFI))
        + LONG_VIEW_QUALITY * ad.quality
        + LONG_VIEW_CLICKINESS * user.clickiness
    )
    conversion = (
        CONVERSION_BIAS
        + CONVERSION_AFFINITY * impressions.affinity
        + CONVERSION_NEED * need
        + CONVERSION_SALES * (ad.goal == SALES)
        + CONVERSION_TIER * user.attributes[:, TIER]
        + CONVERSION_PRICE * (np.log(world.taste.price[ad.category]) - 3)
        + ad.trust
    )
    return OutcomeProbabilities(sigmoid(click), sigmoid(long_view), sigmoid(conversion))


def ground_truth(
    world: World, impressions: Impressions, probabilities: OutcomeProbabilities
) -> GroundTruth:
    """The predictions of a perfect model for the impressions."""
    p_in_window = delay_cdf(ATTRIBUTION_WINDOW_MS)
    conversion = probabilities.click * probabilities.conversion_given_click * p_in_window
    by_goal = np.stack([probabilities.long_view, probabilities.click, conversion])
    goal = world.ads.goal[impressions.ad]
    return GroundTruth(
        impression=impressions.impression,
        event_time=impressions.time_ms,
        p_click=probabilities.click,
        p_long_view=probabilities.long_view,
        p_conversion=conversion,
        expected_value=world.ads.bid[impressions.ad] * by_goal[goal, np.arange(len(impressions))],
    )


def delay_cdf(delay_ms: float) -> float:
    """Probability of a conversion within a delay: exponential, truncated at MAX_DELAY_MS."""
    return float(np.expm1(-delay_ms / MEAN_DELAY_MS) / np.expm1(-MAX_DELAY_MS / MEAN_DELAY_MS))


def draw_delays(count: int, rng: np.random.Generator) -> Int64:
    """(count,) delays from click to conversion in ms, at least 1: the inverse of `delay_cdf`."""
    truncation = np.expm1(-MAX_DELAY_MS / MEAN_DELAY_MS)
    delay_ms = -MEAN_DELAY_MS * np.log1p(rng.random(count) * truncation)
    return cast(Int64, np.ceil(delay_ms).astype(np.int64))
