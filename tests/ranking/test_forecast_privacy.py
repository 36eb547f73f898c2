"""What forecasts hide: small segments, the noise of users, and what intervals reveal."""

import asyncio
import itertools
from dataclasses import replace
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from datasketches import update_theta_sketch

from benchmarks.studies.forecast_world import USER_ATTRIBUTES
from etl.errors import UserError
from ranking.forecast.conditions import Box
from ranking.forecast.expansion import NoiseSource, SampleExpansion, SegmentSize, SupplyGrowth
from ranking.forecast.in_target import in_target_rate
from ranking.forecast.reach import UserSketches
from ranking.forecast.schemas import ForecastRequest
from ranking.forecast.seasonality import days_after
from ranking.forecast.shard import IMPRESSIONS, USERS, Campaign, Query, Shard
from ranking.forecast.sums import (
    Estimate,
    gamma_estimate,
)
from ranking.forecast.targeting import parse_targeting
from tests.ranking.forecasts import World, text_of


def test_a_user_whose_weight_is_that_of_a_segment_is_not_answered() -> None:
    world = World(0, 400)
    user = world.sample["sampled_user"][0].as_py()
    row = world.sample.filter(pc.equal(world.sample["sampled_user"], user)).to_pylist()[0]
    one = " and ".join(f"{a} = {row[f'target_{a}']!r}" for a in USER_ATTRIBUTES)
    alone = f"{one} and signup_days between {row['target_signup_days']} and 99.5"
    sums = world.shard.sums(
        Query(*parse_targeting(alone, world.tables.domain).sql(), world.tables.window)
    )
    assert sums.users == 1 and sums.totals[USERS] > 20
    for targeting in (alone, f"({one}) or ({one})"):
        with pytest.raises(UserError, match="fewer than 20 users or too few in the sample"):
            world.forecast(targeting=targeting)


def test_refusals_do_not_follow_the_exact_number_of_users(complete_world: World) -> None:
    """Of two segments that differ by one user, one would be refused: the user is in the other."""
    window = complete_world.tables.window
    sums = complete_world.shard.sums(Query("true", (), window))
    growth, least, noise = SupplyGrowth(1.0, 0.0, True), 20, 5.0
    answered: dict[int, list[bool]] = {}
    for count, segment in itertools.product(range(10, 41), range(40)):
        users = Estimate(*[float(count)] * 3)
        expansion = SampleExpansion(
            SegmentSize(users, users), sums, sums, growth, NoiseSource(f"{segment}", noise)
        )
        answered.setdefault(count, []).append(expansion.is_reportable(sums, sums, least))
    assert not any(any(answered[count]) for count in range(10, least))
    assert all(all(answered[count]) for count in range(31, 41))
    shares = [np.mean(answered[count]) for count in range(22, 29)]
    assert all(0 < share < 1 for share in shares) and np.ptp(shares) > 0.5


def test_no_count_of_few_users_is_answered(complete_world: World) -> None:
    segment = "country = 'country03' and age = 'age00'"  # 33 users in the window, 12 on its Monday
    assert complete_world.forecast(targeting=segment).users.value > 20
    monday = {"first_day": date(2026, 3, 9), "last_day": date(2026, 3, 9)}
    with pytest.raises(UserError, match="fewer than 20 users on the days of the flight"):
        complete_world.forecast(targeting=segment, **monday)
    few, many = (complete_world.forecast(goal="traffic", bid=bid) for bid in (0.02, 0.05))
    assert few.campaign is None and any("wins too few users" in note for note in few.notes)
    assert many.campaign.reach.value > 100 and many.users_by_sketch is None  # of everyone
    assert complete_world.forecast(targeting=segment).users_by_sketch.value > 20
    nobody = UserSketches({("age", "age03"): update_theta_sketch().compact()}, frozenset({"age"}))
    unknown = replace(
        complete_world.forecaster, tables=replace(complete_world.tables, sketches=nobody)
    )
    request = ForecastRequest(targeting="age = 'age03'")
    assert asyncio.run(unknown.forecast(request)).users_by_sketch is None


def test_values_of_few_users_are_refused_and_listed_as_those_of_nobody(
    complete_world: World,
) -> None:
    users = {
        str(value): int(
            (complete_world.world.user_counts({"country": frozenset({value})}) > 0).sum()
        )
        for value in complete_world.tables.domain["country"] or ()
    }
    rare = [value for value, count in users.items() if count < 20]
    listed = complete_world.tables.listed_values
    assert rare and listed["country"] == [value for value in users if value not in rare]
    assert listed["hour"] == list(range(24)) and listed["signup_days"] is None
    answers = []
    for value in (rare[0], "country99"):
        for text in (f"country = '{value}'", f"not country in ('country00', '{value}')"):
            with pytest.raises(UserError, match="too few users have country") as error:
                complete_world.forecast(targeting=text)
            assert not any(name in str(error.value).replace(value, "") for name in rare)
            answers.append(str(error.value).split("; ")[0].replace(value, "?"))
    assert answers[:2] == answers[2:]


def test_equal_segments_have_equal_answers_and_single_users_are_hidden(
    complete_world: World,
) -> None:
    answers = {
        text: complete_world.forecast(targeting=text).users.value
        for text in (
            "age = 'age01' and gender = 'gender00'",
            "gender = 'gender00' and not age in ('age00', 'age02', 'age03', 'age04', 'age05')",
            "age = 'age01'",
        )
    }
    first, same, other = answers.values()
    assert first == same != other
    counts = complete_world.world.user_counts(
        {"age": frozenset({"age01"}), "gender": frozenset({"gender00"})}
    )
    truth = int((counts > 0).sum())
    assert first != truth and abs(first - truth) <= 5
    # The noise of a segment is drawn by its key, and each user changes that of all its segments.
    query = Query("true", (), complete_world.tables.window)
    users = complete_world.sample["sampled_user"].to_numpy()
    keys = [
        Shard(
            complete_world.spec,
            complete_world.sample.filter(users != user),
            complete_world.tables.domain,
        )
        .sums(query)
        .key
        for user in np.unique(users)[:9]
    ]
    assert len({complete_world.shard.sums(query).key, *keys}) == 10


def test_no_interval_reveals_the_count_of_a_segment(complete_world: World) -> None:
    """The ratio of a bound and the value has the variance; less that of the growth, the noise's."""
    from scipy.optimize import brentq

    window = complete_world.tables.window
    everyone = parse_targeting("", complete_world.tables.domain)
    growth = complete_world.forecaster._growth(
        everyone, days_after(window[-1], len(window)), window
    )
    recovered = []
    for age, gender in itertools.product(range(6), range(2)):
        box: Box = {
            "age": frozenset({f"age{age:02d}"}),
            "gender": frozenset({f"gender{gender:02d}"}),
        }
        truth = int((complete_world.world.user_counts(box) > 0).sum())
        brought = complete_world.forecast(targeting=text_of(box), goal="traffic", bid=99.0).campaign
        for interval in (brought.spend, *brought.events.values()):
            ratio = interval.high / interval.value
            variance = brentq(lambda v, r=ratio: gamma_estimate(1.0, v).high - r, 1e-9, 1.0)
            users = 5.0 / np.sqrt(3.0 * max(variance - growth.relative_error**2, 1e-12))
            recovered.append(abs(users - truth) < 0.5)
    assert len(recovered) == 48 and np.mean(recovered) < 0.25  # by chance


def test_an_in_target_rate_does_not_reveal_a_single_user(complete_world: World) -> None:
    precision = {
        name: {f"tier{k:02d}": Estimate(*[abs(less - 0.1 * k - 0.1)] * 3) for k in range(4)}
        for name, less in (("young", 0.0), ("old", 1.0))
    }
    tables = replace(complete_world.tables, precisions={"tier": precision})
    text = "tier in ('tier00', 'tier01', 'tier03')"
    targeting, users = parse_targeting(text, tables.domain), tables.model.users
    found = []
    for more in range(4):
        counts = users.counts.copy()
        counts[users.rows["tier"]["tier03"], users.rows["tier"]["tier03"]] += more
        model = replace(tables.model, users=replace(users, counts=counts))
        found.append(in_target_rate(replace(tables, model=model), targeting, ["young"]))
    assert all(rate == found[0] for rate in found)


def test_the_noise_of_a_segment_cannot_be_drawn_again_or_divided_out(complete_world: World) -> None:
    segment = "age = 'age01'"
    answer = complete_world.forecast(targeting=segment)
    for everyone in ("gender in ('gender00', 'gender01')", "(hour < 9 or hour >= 9)"):
        assert complete_world.forecast(targeting=f"{segment} and {everyone}") == answer
    bids = (0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 3.0, 4.0)
    *swept, all_won, same = (
        complete_world.forecast(targeting=segment, goal="traffic", bid=bid).campaign for bid in bids
    )
    assert all_won == same and all_won.reach == answer.users  # what is counted is the same
    factors = []
    for bid, campaign in zip(bids, swept, strict=False):
        targeting = parse_targeting(segment, complete_world.tables.domain)
        query = Query(*targeting.sql(), complete_world.tables.window, Campaign("click", bid))
        truth = complete_world.shard.sums(query).totals[USERS]
        assert abs(campaign.reach.value - truth) <= 5.5
        assert campaign.reach.value == round(campaign.reach.value)
        factors.append(campaign.reach.value / truth - 1)
    assert np.ptp(factors) > 2 / truth  # more than rounding explains


def test_equal_answers_do_not_reveal_that_a_condition_selects_nobody_else(
    complete_world: World,
) -> None:
    """Combinations of values of one user or none, in addition to a large segment."""
    rows, segment, equal = complete_world.sample, "age in ('age00', 'age01')", 0
    users = rows.filter(pc.equal(rows["target_age"], "age03")).slice(0, 400).to_pylist()
    answer = complete_world.forecast(targeting=segment)
    for row in users[::20]:
        known = " and ".join(
            f"{name} = {row[f'target_{name}']!r}" for name in ("gender", "country", "interest")
        )
        for tier in ("tier00", "tier01", "tier02", "tier03"):
            guess = f"{segment} or age = 'age03' and {known} and tier = '{tier}'"
            guessed = complete_world.forecast(targeting=guess)
            same_users = guessed.users.value == answer.users.value
            equal += same_users and guessed.impressions.value == answer.impressions.value
    assert equal <= 8  # of 80, by chance


def test_equivalent_targetings_have_one_answer(complete_world: World) -> None:
    """Also if they are not combinations of values."""
    answers = [
        complete_world.forecast(targeting=targeting)
        for targeting in (
            "age = 'age01' or tier = 'tier00' and signup_days < 50",
            "not (age != 'age01' and not (signup_days < 50 and tier = 'tier00'))",
            "age = 'age01' and hour < 9 or (tier = 'tier00' and signup_days < 30) or "
            "age = 'age01' and hour >= 9 or "
            "tier = 'tier00' and signup_days between 20 and 49.99 or "
            "tier = 'tier00' and signup_days >= 49.99 and signup_days < 50",
        )
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("rest", ["", " and device = 'device00'"])  # with and without sketches
def test_a_number_has_one_answer_however_it_is_written(complete_world: World, rest: str) -> None:
    answer = complete_world.forecast(targeting=f"hour in (8, 9){rest}")
    for hours in ("in (8.0, 9)", "in (8, 9.0)", "in (8.0, 9.00, 8)", "between 8.0 and 9"):
        assert complete_world.forecast(targeting=f"hour {hours}{rest}") == answer


def test_a_segment_has_one_draw_of_noise_for_its_users(complete_world: World) -> None:
    for age in range(6):  # as few users as sketches count exactly
        answer = complete_world.forecast(targeting=f"age = 'age{age:02d}' and gender = 'gender00'")
        assert answer.users_by_sketch.value == answer.users.value


def test_the_noise_of_impressions_is_as_large_as_the_heaviest_user(complete_world: World) -> None:
    heaviest = 400
    row = complete_world.sample.filter(
        pc.equal(complete_world.sample["target_age"], "age01")
    ).slice(0, 1)
    more = pa.concat_tables([complete_world.sample, *[row] * heaviest])
    query = Query("true", (), complete_world.tables.window)
    sums = Shard(complete_world.spec, more, complete_world.tables.domain).sums(query)
    assert sums.largest[IMPRESSIONS] > heaviest
    total = Estimate(*[float(sums.totals[IMPRESSIONS])] * 3)
    size = SegmentSize(Estimate(*[float(sums.users)] * 3), total)
    growth = SupplyGrowth(1.0, 0.02, True)
    answers = [
        SampleExpansion(size, sums, sums, growth, NoiseSource(f"{k}", 5.0)).impressions(sums, sums)
        for k in range(50)
    ]
    assert np.ptp([answer.value for answer in answers]) > 1.5 * heaviest
    assert all(answer.high - answer.low < 0.1 * total.value for answer in answers)
