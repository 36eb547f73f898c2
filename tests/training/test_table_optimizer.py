"""Row-wise AdaGrad of the tables: its initial sums, their decay by day, and resets of rows."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.distributed import DistributedModelParallel

from features.schema import ITEM_TABLE
from training.config import TrainConfig
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import (
    TorchrecTables,
    decay_accumulators,
    fill_accumulators,
    local_optimizer_states,
    local_weights,
    reset_rows,
    rowwise_adagrad_params,
    shard_tables,
)

ROWS, WIDTH = 6, 4


def new_tables(
    learning_rate: float, initial: float, scale: float = 1.0
) -> DistributedModelParallel:
    torch.manual_seed(0)
    tables = shard_tables(
        TorchrecTables({ITEM_TABLE: ROWS}, WIDTH),
        build_mesh(1),
        rowwise_adagrad_params(learning_rate, scale),
    )
    fill_accumulators(tables, scale * initial)
    return tables


def weights(tables: DistributedModelParallel) -> torch.Tensor:
    (rows,) = local_weights(tables)
    return rows


def accumulators(tables: DistributedModelParallel) -> torch.Tensor:
    (rows,) = local_optimizer_states(tables)
    return rows


def step(tables: DistributedModelParallel, ids: list[int], gradients: torch.Tensor) -> None:
    """A step in which the look-up of each id (n) has a gradient (n, d)."""
    vectors = tables({ITEM_TABLE: torch.tensor(ids)})[ITEM_TABLE]
    torch.autograd.backward((vectors * gradients).sum())


Steps = list[list[int]]


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from([0.0, 1e-3, 1.0]),
    st.sampled_from([1.0, 4.0]),
)
def test_steps_are_those_of_rowwise_adagrad_from_the_initial_sums(
    steps: Steps, initial: float, scale: float
) -> None:
    """G += mean_j g_j^2 and w -= lr g / (sqrt(G) + eps), with G = G_0 at first.

    A scale of the state changes the learning rate by its root only.
    """
    with process_group():
        tables = new_tables(0.1, initial, scale)
        expected, sums = weights(tables).clone().double(), torch.full((ROWS,), scale * initial)
        for number, ids in enumerate(steps):
            generator = torch.Generator().manual_seed(number)
            gradients = torch.randn(len(ids), WIDTH, generator=generator)
            step(tables, ids, gradients)
            summed = torch.zeros(ROWS, WIDTH).index_add(0, torch.tensor(ids), gradients)
            sums += summed.square().mean(1)
            rate = 0.1 / ((sums / scale).sqrt() + 1e-8)
            expected -= torch.where(summed != 0, rate[:, None] * summed, 0.0)
        torch.testing.assert_close(weights(tables).double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(accumulators(tables), sums)


def test_the_first_step_depends_on_the_gradient_only_with_initial_sums() -> None:
    """From zero it is lr * sqrt(d) long however small the gradient is; with large sums it SGD."""
    with process_group():
        for size in (1e-3, 1.0):
            gradients = torch.full((1, WIDTH), size)
            from_zero, sgd = new_tables(0.1, 0.0), new_tables(0.1 * 1e3, 1e6)
            before = weights(from_zero).clone()
            step(from_zero, [2], gradients)
            step(sgd, [2], gradients)
            length = (before - weights(from_zero))[2].norm()
            assert math.isclose(length, 0.1 * WIDTH**0.5, rel_tol=1e-3)
            torch.testing.assert_close(
                (before - weights(sgd))[2], 0.1 * gradients[0], rtol=1e-3, atol=1e-6
            )


def test_sums_decay_to_their_initial_value_and_a_reset_row_has_it() -> None:
    with process_group():
        tables = new_tables(0.1, 0.25)
        step(tables, [1, 1, 3], torch.ones(3, WIDTH))
        torch.testing.assert_close(
            accumulators(tables), torch.tensor([0.25, 4.25, 0.25, 1.25, 0.25, 0.25])
        )
        decay_accumulators(tables, 0.5, 0.25)
        torch.testing.assert_close(
            accumulators(tables), torch.tensor([0.25, 2.125, 0.25, 0.625, 0.25, 0.25])
        )
        vector = torch.arange(float(WIDTH))
        before = weights(tables).clone()
        reset_rows(tables, {ITEM_TABLE: torch.tensor([1])}, 0.25, {ITEM_TABLE: vector})
        assert torch.equal(weights(tables)[1], vector) and accumulators(tables)[1] == 0.25
        reset_rows(tables, {ITEM_TABLE: torch.tensor([3])}, 0.25, {})
        assert not weights(tables)[3].any() and accumulators(tables)[3] == 0.25
        assert torch.equal(weights(tables)[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
        for _ in range(40):
            decay_accumulators(tables, 0.5, 0.25)
        assert (accumulators(tables) == 0.25).all()


def test_initial_sums_are_those_of_the_summed_loss() -> None:
    """Gradients of the mean loss of twice as many rows are half as large."""
    small, large = (TrainConfig(batch_rows=rows).initial_accumulator for rows in (64, 128))
    assert small == 4 * large > 0
