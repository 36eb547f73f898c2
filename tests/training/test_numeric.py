"""Numbers as rows: standardization and piecewise-linear encoding."""

import copy

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from training.distributed.process_group import process_group
from training.model.numeric import (
    MAX_OUTER,
    InputScale,
    NumericEmbedding,
    PiecewiseLinearEncoding,
    RunningStandardizer,
    quantile_edges,
)
from training.model.weights import full_values

SEGMENTS = 4
FINITE = st.floats(-1e3, 1e3, width=32)


def test_edges_are_quantiles_of_any_number_of_values() -> None:
    """torch.quantile refuses more than 2**24."""
    torch.manual_seed(0)
    few = torch.randn(1000, 2).double()
    levels = torch.linspace(0, 1, SEGMENTS + 1, dtype=torch.float64)
    assert torch.equal(quantile_edges(few, SEGMENTS), torch.quantile(few, levels, 0).t().float())
    many = torch.arange(2**24 + 1)[:, None] % 1001
    edges = quantile_edges(many, SEGMENTS)
    torch.testing.assert_close(edges, 1000 * levels[None].float(), rtol=0, atol=1)


def test_running_statistics_are_the_mean_and_variance_of_all_values() -> None:
    torch.manual_seed(0)
    values = torch.randn(3000, 2) * torch.tensor([0.1, 50.0]) + torch.tensor([5.0, -3.0])
    values[::5, 1] = float("nan")
    standardizer = RunningStandardizer(2).train()
    for part in values.split(61):
        standardizer(part)
    torch.testing.assert_close(standardizer.mean, values.nanmean(0), rtol=1e-4, atol=1e-4)
    variance = ((values - values.nanmean(0)) ** 2).nanmean(0)
    torch.testing.assert_close(standardizer.variance, variance, rtol=1e-3, atol=1e-4)
    standardizer.eval()
    before = standardizer.mean.clone()
    assert standardizer(torch.full((1, 2), torch.nan)).eq(0).all()
    assert standardizer.mean.equal(before)


def fitted_encoding(values: torch.Tensor) -> PiecewiseLinearEncoding:
    encoding = PiecewiseLinearEncoding(values.shape[1], SEGMENTS)
    encoding.fit(values)
    return encoding


@given(arrays(np.float32, (20, 2), elements=FINITE), st.floats(0, 1))
def test_a_value_is_the_first_edge_plus_the_lengths_below_it(
    sample: np.ndarray, share: float
) -> None:
    """sum_t (b_t - b_(t-1)) z_t = x - b_0, also beyond the outer edges (2203.05556)."""
    values = torch.from_numpy(sample)
    encoding = fitted_encoding(values)
    lengths = encoding.edges.diff()
    first, last = encoding.edges[:, 0], encoding.edges[:, -1]
    shortest = torch.where(lengths > 0, lengths, torch.inf).amin(1).nan_to_num(0, 0, 0)
    outer = MAX_OUTER * shortest  # every outer segment reaches at least this far
    x = first - outer + share * (last - first + 2 * outer)
    reconstructed = first + (encoding(x[None])[0] * lengths).sum(1)
    torch.testing.assert_close(reconstructed, x, rtol=1e-4, atol=2e-3)


@given(arrays(np.float32, (30, 1), elements=FINITE), FINITE, FINITE)
def test_components_do_not_decrease_in_the_value(sample: np.ndarray, a: float, b: float) -> None:
    encoding = fitted_encoding(torch.from_numpy(sample))
    low, high = encoding(torch.tensor([[min(a, b)], [max(a, b)]]))
    assert (low <= high).all()


def test_edges_are_quantiles_and_equal_ones_count_once() -> None:
    values = torch.tensor([[0.0, 1.0, torch.nan]] * 7 + [[8.0, 1.0, torch.inf]] * 2)
    encoding = fitted_encoding(values)
    assert encoding.edges[0].tolist() == [0.0, 8.0, 8.0, 8.0, 8.0]
    assert encoding.edges[1].tolist() == [1.0] * 5
    assert encoding.edges[2].tolist() == [0.0] * 5
    assert encoding.is_constant.tolist() == [False, True, True]
    assert encoding(torch.tensor([[4.0, 7.0, 7.0]]))[0].tolist() == [
        [0.5, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4
    ]  # fmt: skip


def test_a_numeric_embedding_is_linear_at_the_start_and_by_group() -> None:
    torch.manual_seed(0)
    embedding = NumericEmbedding(("a", "b", "a"), 2, SEGMENTS).eval()
    low, middle, high = (embedding(torch.full((1, 3), x)).rows[0] for x in (-1.0, 0.5, 2.0))
    torch.testing.assert_close(middle, (low + high) / 2)
    one_changed = embedding(torch.tensor([[-1.0, 5.0, -1.0]])).rows[0]
    assert torch.equal(one_changed[0], low[0]) and not torch.equal(one_changed[1], low[1])


def test_a_missing_value_is_not_the_lowest_one_once_it_was_trained() -> None:
    embedding = NumericEmbedding(("a",), 2, SEGMENTS).eval()
    embedding.encoding.fit(torch.arange(10.0)[:, None])
    missing = torch.tensor([[torch.nan]])
    before = embedding(missing).rows
    torch.testing.assert_close(before, embedding.bias[None])
    with torch.no_grad():
        embedding.missing.add_(1)
    torch.testing.assert_close(embedding(missing).rows, before + 1)
    assert embedding(torch.tensor([[0.0]])).standardized.eq(0).all()


def test_scales_change_nothing_at_the_start() -> None:
    values = torch.tensor([[0.5, -2.0, torch.nan], [3.0, 1.0, 0.0]])
    with_scales, without = (seeded_embedding(lr_factor) for lr_factor in (20.0, 0.0))
    assert torch.equal(with_scales(values).rows, without(values).rows)
    assert torch.equal(with_scales(values).standardized, without(values).standardized)


def seeded_embedding(scale_lr_factor: float) -> NumericEmbedding:
    torch.manual_seed(0)
    return NumericEmbedding(("a", "b", "a"), 2, SEGMENTS, scale_lr_factor).eval()


def test_a_scale_multiplies_all_that_is_known_of_its_feature() -> None:
    """Value, piecewise-linear components and the flag of a missing value, of this feature alone."""
    embedding = seeded_embedding(20.0)
    values = torch.tensor([[0.5, -2.0, torch.nan], [3.0, 1.0, 0.0]])
    with torch.no_grad():
        for weight in (embedding.piecewise, embedding.missing):
            weight.normal_()
        before = embedding(values)
        assert embedding.scale is not None
        embedding.scale.weight[1] = -1 / 20  # a factor of 0
        after = embedding(values)
    assert torch.equal(after.rows[:, 0], before.rows[:, 0])
    torch.testing.assert_close(after.rows[:, 1], embedding.bias[1].expand(2, -1))
    assert after.standardized[:, 1].eq(0).all()
    assert torch.equal(after.standardized[:, ::2], before.standardized[:, ::2])


def test_a_step_of_adamw_changes_a_factor_by_a_multiple_of_the_rate() -> None:
    scale = InputScale(2, lr_factor=20.0)
    optimizer = torch.optim.AdamW(scale.parameters(), lr=1e-3)
    scale(torch.tensor([[3.0, -0.1]])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(scale.factors, torch.tensor([1 - 0.02, 1 + 0.02]))


def test_edges_keep_the_device_and_the_type_of_the_model() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoding, values = PiecewiseLinearEncoding(3, 4).to(device, torch.float64), torch.randn(20, 3)
    encoding.fit(values, [0, 2])
    assert encoding.edges.device.type == device and encoding.edges.dtype == torch.float64
    expected = quantile_edges(values, 4).double()
    assert torch.equal(encoding.edges.cpu()[[0, 2]], expected[[0, 2]])


def trained_embedding(values: torch.Tensor, segments: int) -> NumericEmbedding:
    """An embedding of two features in one group, with weights that are not zero."""
    embedding = NumericEmbedding(["group", "group"], 3, segments, scale_lr_factor=20)
    embedding.encoding.fit(values)
    for weight in embedding.parameters():
        torch.nn.init.normal_(weight)
    return embedding.eval()


def test_functions_keep_their_values_at_new_edges_and_where_values_are_missing() -> None:
    torch.manual_seed(0)
    embedding = trained_embedding(torch.randn(500, 2), SEGMENTS)
    values = 1 + 2 * torch.randn(500, 2)
    edges = quantile_edges(values, SEGMENTS).T
    missing = torch.full((1, 2), torch.nan)
    inputs = torch.cat((edges, missing, edges))
    inputs[-len(edges) :, 0] = torch.nan
    before = embedding(inputs).rows
    embedding.move_edges(values, torch.tensor([0, 1]))
    torch.testing.assert_close(embedding.encoding.edges, edges.T)
    torch.testing.assert_close(embedding(inputs).rows, before, rtol=1e-5, atol=1e-4)


def test_edges_of_sharded_weights_are_moved_like_those_of_others() -> None:
    torch.manual_seed(0)
    embedding = trained_embedding(torch.randn(500, 2), SEGMENTS)
    sharded = copy.deepcopy(embedding)
    values, features = 1 + torch.randn(500, 2), torch.tensor([1])
    embedding.move_edges(values, features)
    with process_group():
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        sharded.move_edges(values, features)
        for name, weight in sharded.named_parameters():
            assert torch.equal(full_values(weight), embedding.get_parameter(name).detach()), name


def test_edges_that_contain_the_old_ones_change_no_value_between_them() -> None:
    torch.manual_seed(0)
    zero_or_one = torch.arange(201)[:, None] // 100 > 0  # quantiles of two values
    embedding = trained_embedding(zero_or_one * torch.tensor([1.0, 3.0]), 4)
    inputs = torch.rand(50, 2) * torch.tensor([1.0, 3.0])
    before = embedding(inputs).rows
    values = torch.tensor([[0.0, 0.0], [0.2, 9.0], [0.5, 9.0], [0.7, 9.0], [1.0, 9.0]])
    embedding.move_edges(values, torch.tensor([0]))
    assert embedding.encoding.edges[0].tolist() == values[:, 0].tolist()
    assert embedding.encoding.edges[1].tolist() == [0, 3, 3, 3, 3], "it was not to be moved"
    torch.testing.assert_close(embedding(inputs).rows, before, rtol=1e-5, atol=1e-5)


def test_edges_are_outdated_where_values_have_left_them() -> None:
    """Columns: unchanged, shifted, small counts that equal edges, and one that was constant."""
    torch.manual_seed(0)
    values = torch.randn(4_000, 4)
    values[:, 2] = torch.randint(3, (4_000,))
    values[:, 3] = 5.0
    encoding = PiecewiseLinearEncoding(4, 16)
    encoding.fit(values)
    assert not encoding.is_outdated(values).any()
    later = values[torch.randperm(4_000)] + torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert encoding.is_outdated(later).tolist() == [False, True, False, False]
    encoding.fit(later)
    assert not encoding.is_outdated(later).any()
    assert not encoding.is_outdated(values[:900]).any(), "too few values to judge by"
