"""Laws of the non-sequence side: each kind against its equation, and what all kinds must be."""

import math
from itertools import product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from training.model.config import GemConfig, Kind
from training.model.interaction import interaction
from training.model.interaction.dcn import DCNv2
from training.model.interaction.dhen import DhenLayer
from training.model.interaction.projection import AttentiveProjection, StaticProjection
from training.model.interaction.streams import TwoStreams
from training.model.interaction.wukong import Shape, Wukong, WukongLayer

ROWS, BATCH, WIDTH = 6, 7, 4
SHAPE = Shape(WIDTH, fm_rows=3, linear_rows=2, rank=2, hidden=8)
STATIC = Shape(WIDTH, fm_rows=3, linear_rows=2, rank=2, hidden=8, attentive=False)
SIZES = {"row_width": WIDTH, "fm_rows": 3, "linear_rows": 3, "rank": 2, "mlp": 16, "layers": 3}
KINDS = [
    GemConfig(interaction=kind, attentive=attentive, across_rows=across, **SIZES)
    for kind, attentive, across in product(get_args(Kind), (False, True), (0, 2))
    if kind == "wukong" or (attentive and not across)
] + [GemConfig(beside="dcnv2", **SIZES)]
named = pytest.mark.parametrize(
    "config", KINDS, ids=lambda c: f"{c.interaction}-{c.beside}-{c.attentive}-{c.across_rows}"
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rows_of_features() -> torch.Tensor:
    return torch.randn(ROWS, BATCH, WIDTH)


@named
def test_examples_are_apart_and_all_of_a_kind_learns(config: GemConfig) -> None:
    model, x = interaction(ROWS, config), rows_of_features().requires_grad_()
    if config.across_rows:
        torch.nn.init.normal_(model.across.gate)
    out = model(x)
    assert out.shape == (model.out_rows, BATCH, WIDTH)
    for some in ([3], [5, 0, 2]):
        torch.testing.assert_close(model(x[:, some]), out[:, some], rtol=1e-4, atol=1e-5)
    (out * torch.randn_like(out)).sum().backward()
    learns = [*model.parameters(), x]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learns)


@pytest.mark.parametrize("shape", [SHAPE, STATIC], ids=["attentive", "static"])
def test_a_wukong_layer_is_the_papers_equation(shape: Shape) -> None:
    """X' = LN([FMB(X) ; W_L X] + W_R X), one example after the other (section 3)."""
    layer, x = WukongLayer(ROWS, shape), rows_of_features()
    block = layer.fm
    reads, beside, linear = layer.mix.weight.split(layer.parts)
    for example in range(BATCH):
        one = x[:, example]
        y = reads
        if shape.attentive:
            y = block.projection.mlp((reads @ one).flatten()).view(shape.rank, ROWS)
        fm = (one @ one.T @ y.T).T.flatten()
        fmb = block.mlp(F.layer_norm(fm, fm.shape)).view(shape.fm_rows, WIDTH)
        told = torch.cat((fmb + beside @ one, linear @ one))
        expected = F.layer_norm(told, (WIDTH,))
        torch.testing.assert_close(layer(x)[:, example], expected, rtol=1e-4, atol=1e-5)


def test_where_the_rows_stay_the_residual_is_the_input() -> None:
    layer, x = WukongLayer(SHAPE.rows, SHAPE), torch.randn(SHAPE.rows, BATCH, WIDTH)
    for weight in (layer.fm.mlp[2].weight, layer.fm.mlp[2].bias, layer.mix.weight):
        torch.nn.init.zeros_(weight)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (WIDTH,)))


def test_the_attentive_projection_without_its_input_is_a_static_one() -> None:
    x, y = torch.randn(BATCH, ROWS, WIDTH), torch.randn(2, ROWS)
    attentive = AttentiveProjection(ROWS, WIDTH, 2, 8)
    torch.nn.init.zeros_(attentive.mlp[2].weight)
    attentive.mlp[2].bias.data = y.flatten()
    static = StaticProjection(2)(x, y @ x)
    torch.testing.assert_close(attentive(x, torch.randn(BATCH, 4, WIDTH)), static)


def test_the_factorisation_block_mixes_rows_only_through_their_products() -> None:
    """Turning all rows by one rotation leaves X X^T, and so FM's pairs of rows, as they are."""
    layer, x = WukongLayer(ROWS, STATIC), rows_of_features()

    def fm(x: torch.Tensor) -> torch.Tensor:
        return layer.fm(x, layer.mix(x)[: STATIC.rank])

    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    torch.testing.assert_close(fm(x @ rotation), fm(x), rtol=1e-4, atol=1e-5)
    stretched = x * torch.tensor([1.0, 2.0, 1.0, 1.0])
    assert (fm(stretched) - fm(x)).abs().max() > 1e-3


def test_attention_across_layers_starts_as_plain_wukong_and_reaches_the_first() -> None:
    x, plain = rows_of_features(), Wukong(ROWS, 3, SHAPE)
    wide = Wukong(ROWS, 3, SHAPE, across=2)
    wide.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(wide(x), plain(x))
    torch.nn.init.normal_(wide.across.gate)
    assert (wide(x) - plain(x)).abs().max() > 1e-2
    # a second layer that passes nothing on: what the last one knows of x came across
    torch.nn.init.zeros_(wide.layers[1].norm.weight)
    torch.nn.init.zeros_(plain.layers[1].norm.weight)
    other = rows_of_features()
    torch.testing.assert_close(plain(x), plain(other))
    assert (wide(x) - wide(other)).abs().max() > 1e-3


def test_crosses_are_polynomials_of_one_degree_more_than_layers() -> None:
    """Along any line through the origin (2008.13535, theorem 1): high differences vanish."""
    layers = 2
    model, x = DCNv2(ROWS, WIDTH, layers, 8).double(), rows_of_features().double()
    for layer in model.layers:
        torch.nn.init.normal_(layer.up.bias)

    def difference(order: int) -> torch.Tensor:
        signs = [(-1) ** i * math.comb(order, i) for i in range(order + 1)]
        return sum(sign * model(i * x) for i, sign in enumerate(signs))

    assert difference(layers + 1).abs().max() > 1e-3
    assert difference(layers + 2).abs().max() < 1e-9


def test_dhen_is_the_sum_of_its_interactions() -> None:
    """Without crosses and shortcut the products of pairs are left, which know no rotation."""
    layer, x = DhenLayer(ROWS, 3, WIDTH, 8), rows_of_features()
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    assert (layer(x @ rotation) - layer(x)).abs().max() > 1e-2
    for mix in (layer.mix, layer.residual):
        torch.nn.init.zeros_(mix.weight)
    torch.testing.assert_close(layer(x @ rotation), layer(x), rtol=1e-4, atol=1e-5)
    flat = x.transpose(0, 1)
    pairs = torch.stack([(flat[:, i] * flat[:, j]).sum(1) for i in range(ROWS) for j in range(i)])
    order = sorted(
        range(pairs.shape[0]), key=[(j, i) for i in range(ROWS) for j in range(i)].__getitem__
    )
    dot = layer.dot(pairs[order].T).view(BATCH, 3, WIDTH).transpose(0, 1)
    torch.testing.assert_close(layer(x), layer.norm(dot), rtol=1e-4, atol=1e-5)


def test_two_streams_meet_in_their_products() -> None:
    model, x = TwoStreams(ROWS, WIDTH, 8, 2), rows_of_features()
    u, v, products = model(x).chunk(3)
    for row in range(2):
        torch.testing.assert_close(products[row], u[row] * (v[row] @ model.fuse[row]))
    first = model.streams[0]
    for layer in (first.gate[2], first.mlp[3]):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    silent, same, nothing = model(x).chunk(3)
    assert not silent.any() and not nothing.any()
    torch.testing.assert_close(same, v)
