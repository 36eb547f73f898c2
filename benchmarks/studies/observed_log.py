"""What the simulator's log of a day shows, as arrays: views of posts, impressions, purchases.

Times are epoch ms, `visible` whole seconds. An event is known to an impression if it was visible
in an earlier second. n events, C categories.
"""

from dataclasses import dataclass

import numpy as np

from etl.array_types import Bools, Float64, Int64
from etl.simulator.arrays import Events, RowBatch
from etl.simulator.config import SECOND_MS, EventType, SimulatorConfig

KEY_STEP = 2**33  # above all epoch seconds
SESSION_GAP_MS = 10 * 60 * SECOND_MS


@dataclass(frozen=True)
class Views(RowBatch):
    """Views of posts; `is_cut` where the next step of the user ended the view."""

    user: Int64
    item: Int64
    surface: Int64
    time_ms: Int64
    visible: Int64
    dwell_ms: Int64
    is_cut: Bools


@dataclass(frozen=True)
class Impressions(RowBatch):
    """Impressions of ads, with the outcomes that were logged on the same day."""

    impression: Int64
    user: Int64
    item: Int64
    surface: Int64
    time_ms: Int64
    position: Int64
    device: Int64
    connection: Int64
    is_click: Float64
    is_long_view: Float64


@dataclass(frozen=True)
class Purchases(RowBatch):
    """Purchases of posts, of this and all earlier days."""

    user: Int64
    category: Int64
    time_ms: Int64
    visible: Int64


@dataclass(frozen=True)
class ObservedDay:
    """The log of a day."""

    views: Views
    impressions: Impressions
    purchases: Purchases

    @classmethod
    def of(
        cls, config: SimulatorConfig, day: int, events: Events, before: "ObservedDay | None"
    ) -> "ObservedDay":
        """From the events that a day caused, without copies; `before` is the day before.

        Outcomes that were logged after the day are left out, as are those of later days.
        """
        events = events.take(np.unique(events.event, return_index=True)[1])
        by_type = {t: events.take(events.type == t) for t in EventType}
        end = config.day_start_ms(day + 1)

        def occurred(event_type: EventType, impression: Int64) -> Float64:
            outcomes = by_type[event_type]
            logged = outcomes.impression[outcomes.ingest_time < end]
            return np.isin(impression, logged).astype(np.float64)

        shown = by_type[EventType.AD_IMPRESSION]
        impressions = Impressions(
            impression=shown.impression,
            user=shown.user,
            item=shown.item,
            surface=shown.surface,
            time_ms=shown.event_time,
            position=shown.position,
            device=shown.device,
            connection=shown.connection,
            is_click=occurred(EventType.AD_CLICK, shown.impression),
            is_long_view=occurred(EventType.AD_LONG_VIEW, shown.impression),
        )
        bought = by_type[EventType.POST_PURCHASE]
        purchases = Purchases(
            user=bought.user,
            category=bought.item % config.categories,
            time_ms=bought.event_time,
            visible=bought.ingest_time // SECOND_MS,
        )
        if before is not None:
            purchases = Purchases.concat([before.purchases, purchases])
        return cls(_views(by_type[EventType.POST_VIEW], shown), impressions, purchases)


def _views(viewed: Events, shown: Events) -> Views:
    """Views, cut off where the dwell ends at the user's next view or impression."""
    user = np.concatenate((viewed.user, shown.user))
    time_ms = np.concatenate((viewed.event_time, shown.event_time))
    steps = np.unique(user * 2**42 + time_ms)  # ms since 1970 are below 2**42
    end = viewed.user * 2**42 + viewed.event_time + viewed.dwell_ms
    position = np.minimum(np.searchsorted(steps, end), len(steps) - 1)
    return Views(
        user=viewed.user,
        item=viewed.item,
        surface=viewed.surface,
        time_ms=viewed.event_time,
        visible=viewed.ingest_time // SECOND_MS,
        dwell_ms=viewed.dwell_ms,
        is_cut=steps[position] == end,
    )


def purchases_before(day: ObservedDay, user: Int64, category: Int64, categories: int) -> Int64:
    """Time (n) of the latest known purchase of each impression's user in a category; -1: none."""
    purchases = day.purchases
    keys = (purchases.user * categories + purchases.category) * KEY_STEP + purchases.visible
    order = np.argsort(keys, kind="stable")
    group = user * categories + category
    as_of = day.impressions.time_ms // SECOND_MS
    position = np.searchsorted(keys[order], group * KEY_STEP + as_of, "left") - 1
    is_found = (position >= 0) & (keys[order][np.maximum(position, 0)] // KEY_STEP == group)
    return np.where(is_found, purchases.time_ms[order][np.maximum(position, 0)], -1)


@dataclass(frozen=True)
class Sessions:
    """The session of each view and of each impression: steps of a user on a surface without gap."""

    of_view: Int64
    of_impression: Int64

    @classmethod
    def of(cls, day: ObservedDay) -> "Sessions":
        """Sessions of a day, separated by surface and by gaps of SESSION_GAP_MS."""
        steps = (day.views, day.impressions)
        user, surface, time_ms = (
            np.concatenate([getattr(s, name) for s in steps])
            for name in ("user", "surface", "time_ms")
        )
        order = np.lexsort((time_ms, surface, user))
        is_first = (
            (np.diff(user[order], prepend=-1) != 0)
            | (np.diff(surface[order], prepend=-1) != 0)
            | (np.diff(time_ms[order], prepend=0) > SESSION_GAP_MS)
        )
        session = np.empty(len(order), np.int64)
        session[order] = np.cumsum(is_first)
        return cls(session[: len(day.views)], session[len(day.views) :])

    def views_before(self, day: ObservedDay, category_of_post: Int64) -> Float64:
        """Known views (n, C) of each category in the session of each impression."""
        categories = int(category_of_post.max()) + 1
        order = np.lexsort((day.views.visible, self.of_view))
        keys = (self.of_view * KEY_STEP + day.views.visible)[order]
        seen = np.zeros((len(order) + 1, categories))
        seen[np.arange(len(order)) + 1, category_of_post[day.views.item[order]]] = 1
        total = seen.cumsum(0)
        as_of = day.impressions.time_ms // SECOND_MS
        last = np.searchsorted(keys, self.of_impression * KEY_STEP + as_of, "left")
        first = np.searchsorted(keys, self.of_impression * KEY_STEP, "left")
        return np.asarray(total[last] - total[first])
