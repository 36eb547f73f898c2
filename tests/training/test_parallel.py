"""However a model lies on 1, 2 or 4 processes, it learns the same; and what that moves is known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from etl.tables.lake import Lake
from features.inputs import Features
from tests.training.many import ITEMS, SIZES, Learned, Way, learn, some_batches, together
from training.build import BY_ROWS
from training.data.batch import Batch
from training.model.lookup import table_rows
from training.parallel.moved import exchanged
from training.parallel.processes import process_group

STEPS, ROW_BYTES = 3, 4 * SIZES.row_width
ALONE = Way()
WAYS = {
    2: {
        "tables once": Way(),
        "tables by rows": Way(kinds=BY_ROWS),
        "two groups": Way(groups=2),
        "dense sharded": Way(sharded=True),
    },
    4: {
        "tables once": Way(),
        "two groups": Way(groups=2),
        "four groups": Way(groups=4),
        "two groups, every third step": Way(groups=2, every=3),
        "two groups, dense sharded": Way(groups=2, sharded=True),
    },
}
EXACT = [(world, way) for world, ways in WAYS.items() for way in ways if "every" not in way]


@pytest.fixture(scope="module")
def batches(lake: Lake) -> tuple[Features, list[Batch]]:
    return some_batches(lake, 4 * STEPS)


@pytest.fixture(scope="module")
def learned(
    batches: tuple[Features, list[Batch]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], list[Learned]]:
    """What all ways came to, and one process with the same batches: (processes, "alone")."""
    features, found = batches
    folder = tmp_path_factory.mktemp("many")
    made = {}
    for world, ways in WAYS.items():
        steps = [found[world * n : world * (n + 1)] for n in range(STEPS)]
        with process_group():
            made[world, "alone"] = [learn(features, steps, ALONE, 0, 1)]
        several = together(features, steps, list(ways.values()), folder / f"{world}", world)
        made |= {(world, name): of_way for name, of_way in zip(ways, several, strict=True)}
    return made


@pytest.mark.parametrize(("world", "way"), EXACT)
def test_several_processes_learn_what_one_does(
    learned: dict[tuple[int, str], list[Learned]], world: int, way: str
) -> None:
    (alone,) = learned[world, "alone"]
    assert alone.losses[0] != alone.losses[-1]
    for found in learned[world, way]:
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        for name, rows in alone.tables.items():
            torch.testing.assert_close(found.tables[name], rows, rtol=1e-4, atol=1e-6, msg=name)


def test_groups_that_meet_seldom_are_alike_when_they_have_met(
    learned: dict[tuple[int, str], list[Learned]],
) -> None:
    (alone,) = learned[4, "alone"]
    one, *others = learned[4, "two groups, every third step"]
    for other in others:
        for name, rows in one.tables.items():
            torch.testing.assert_close(other.tables[name], rows, msg=name)
    apart = [not torch.allclose(one.tables[name], rows) for name, rows in alone.tables.items()]
    assert any(apart), "local steps are not those of one process"


@pytest.mark.parametrize(
    ("world", "way", "groups", "met"),
    [
        (2, "tables once", 1, STEPS),
        (2, "two groups", 2, STEPS),
        (4, "tables once", 1, STEPS),
        (4, "two groups", 2, STEPS),
        (4, "four groups", 4, STEPS),
        (4, "two groups, every third step", 2, 1),
    ],
)
def test_bytes_moved_are_those_of_the_formula(
    learned: dict[tuple[int, str], list[Learned]],
    batches: tuple[Features, list[Batch]],
    world: int,
    way: str,
    groups: int,
    met: int,
) -> None:
    """To and fro within a group: ids with their counts, rows, gradients. Between groups: tables."""
    tables = table_rows(batches[0], ITEMS, SIZES.user_rows)
    group = world // groups
    found = learned[world, way]
    ids = sum(one.ids for one in found)
    swapped = sum(one.moved.get("alltoall_base", 0) for one in found)
    assert swapped == exchanged(world * STEPS, ids, len(tables), SIZES.row_width, group)
    dense = sum(one.moved["allreduce"] for one in learned[world, "tables once"])
    averaged = sum(one.moved["allreduce"] for one in found) - dense
    copies = met * groups * ROW_BYTES * sum(tables.values()) if groups > 1 else 0
    assert averaged == copies


def test_sharded_weights_move_what_copied_ones_do_not(
    learned: dict[tuple[int, str], list[Learned]],
) -> None:
    copied, sharded = (learned[2, way][0].moved for way in ("tables once", "dense sharded"))
    assert not any("gather" in name for name in copied)
    assert any("gather" in name for name in sharded)


CASES = {"rare": (1.0, 0.0), "hot": (1.0, 1.0), "mixed": (1.0, 0.5)}


def adagrad_in_groups(gradients: Sequence[float], steps: int, scale: float) -> tuple[float, float]:
    """Weight and state of a row after some steps, by the equations; a group's gradients each.

    The state is averaged at each step, one step late.
    """
    g = np.array(gradients) * 1.0
    w, v, sent = np.zeros(len(g)), np.zeros(len(g)), None
    for _ in range(steps):
        v += g**2
        w -= g / (np.sqrt(v / scale) + 1e-12)
        w[:] = w.mean()
        if sent is not None:
            v += sent.mean() - sent
        sent = v.copy()
    v += sent.mean() - sent
    return float(w[0]), float(v.mean())


@pytest.mark.parametrize("case", CASES)
def test_averaged_states_need_a_scale_between_one_and_the_number_of_groups(case: str) -> None:
    """The step of a rare row is sqrt(M) too small without, that of a hot row too large with."""
    gradients, steps, groups = CASES[case], 400, 2
    whole = sum(gradients) / groups
    expected = -sum(abs(whole) / math.sqrt(n * whole**2) for n in range(1, steps + 1))
    plain, scaled = (adagrad_in_groups(gradients, steps, c)[0] / expected for c in (1.0, groups))
    assert scaled == pytest.approx(plain * math.sqrt(groups), rel=1e-6)
    root = {"rare": 1 / math.sqrt(2), "hot": 1.0, "mixed": 0.75 / math.sqrt(0.625)}[case]
    assert plain == pytest.approx(root, rel=0.05)
