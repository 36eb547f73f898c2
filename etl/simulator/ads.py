"""Ad requests, and the logging policy that selects the ads."""

from dataclasses import dataclass

import numpy as np

from etl.simulator.arrays import Events, Floats, Ints, RowBatch, new_ids, sample_without_replacement
from etl.simulator.config import EventType
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

    impression: Ints
    request: Ints
    session: Ints
    ad: Ints
    position: Ints
    time_ms: Ints
    propensity: Floats
    affinity: Floats


def serve_ads(
    world: World, day: int, sessions: Sessions, steps: Steps, rng: np.random.Generator
) -> Impressions:
    """Fill the slots of every request with ads drawn from its candidates.

    Ads are drawn without replacement from the softmax of a noisy estimate of affinity.
    """
    requests = steps.take(steps.is_ad_request)
    session = sessions.take(requests.session)
    candidates = _candidates(world.ads.active_on(day), len(requests), rng)
    interest = world.users.interest(world.taste)[session.user]
    affinity = world.taste.affinity(interest, session.surface, world.ads.latent[candidates])
    estimate = affinity + POLICY_NOISE * rng.standard_normal(affinity.shape)
    order, propensity = sample_without_replacement(POLICY_INVERSE_TEMPERATURE * estimate, rng)

    slots = rng.integers(1, MAX_SLOTS_BY_SURFACE[session.surface] + 1)
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


def _candidates(active: Ints, requests: int, rng: np.random.Generator) -> Ints:
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
