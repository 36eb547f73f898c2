"""Interaction modules: each against its equation, and properties that all of them share."""

import math
from itertools import product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from etl.errors import UserError
from training.model.config import GemConfig, InteractionKind
from training.model.interaction import build_interaction, wukong_shapes
from training.model.interaction.dcn_dhen import DCNv2, DhenLayer
from training.model.interaction.parallel import FinalMlp
from training.model.interaction.token_mixing import (
    MixerBlock,
    RankMixer,
    RowTokens,
    mix_heads,
    token_width,
    tokens_to_rows,
)
from training.model.interaction.wukong import (
    CrossLayerAttention,
    InputDependentProjection,
    StaticProjection,
    Wukong,
    WukongLayer,
    WukongShape,
)

ROWS, BATCH, WIDTH = 6, 7, 4
SHAPE = WukongShape(WIDTH, fm_rows=3, linear_rows=2, rank=2, hidden=8)
STATIC = WukongShape(
    WIDTH, fm_rows=3, linear_rows=2, rank=2, hidden=8, input_dependent_projection=False
)
SIZES = GemConfig(
    embedding_dim=WIDTH, fm_rows=3, linear_rows=3, rank=2, mlp_width=16, layers=3, mixer_tokens=4,
    parallel_interaction=None,
)  # fmt: skip
WUKONG_VARIANTS = [
    {"input_dependent_projection": dynamic, "cross_layer_rows": cross_rows}
    for dynamic, cross_rows in product((False, True), (0, 2))
]
CONFIGS = [
    *(
        SIZES.model_copy(update={"interaction": kind})
        for kind in get_args(InteractionKind)
        if kind != "wukong"
    ),
    *(SIZES.model_copy(update=variant) for variant in WUKONG_VARIANTS),
    SIZES.model_copy(update={"wukong_rows": (5, 3), "cross_layer_rows": 2}),
    SIZES.model_copy(update={"parallel_interaction": "dcnv2"}),
]
each_config = pytest.mark.parametrize(
    "config",
    CONFIGS,
    ids=lambda c: (
        f"{c.interaction}-{c.parallel_interaction}-{c.input_dependent_projection}"
        f"-{c.cross_layer_rows}-{c.wukong_rows}"
    ),
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rows_of_features() -> torch.Tensor:
    return torch.randn(ROWS, BATCH, WIDTH)


@each_config
def test_examples_are_independent_and_all_parameters_have_gradients(config: GemConfig) -> None:
    model, x = build_interaction(ROWS, config), rows_of_features().requires_grad_()
    for wukong in (m for m in model.modules() if isinstance(m, Wukong)):
        if wukong.cross_layer_attention:
            torch.nn.init.normal_(wukong.cross_layer_attention.gate)
    out = model(x)
    assert out.shape == (model.out_rows, BATCH, WIDTH)
    for subset in ([3], [5, 0, 2]):
        torch.testing.assert_close(model(x[:, subset]), out[:, subset], rtol=1e-4, atol=1e-5)
    (out * torch.randn_like(out)).sum().backward()
    for tensor in [*model.parameters(), x]:
        assert tensor.grad is not None and tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("shape", [SHAPE, STATIC], ids=["dynamic", "static"])
def test_a_wukong_layer_computes_the_equation_of_the_paper(shape: WukongShape) -> None:
    """X' = LN([FMB(X) ; W_L X] + W_R X), example by example (section 3)."""
    layer, x = WukongLayer(ROWS, shape), rows_of_features()
    block = layer.fm_block
    compress, residual, linear = torch.split(layer.row_linear.weight, list(layer.split_sizes))
    for example in range(BATCH):
        rows = x[:, example]
        y = compress
        if isinstance(block.projection, InputDependentProjection):
            y = block.projection.mlp((compress @ rows).flatten()).view(shape.rank, ROWS)
        fm = (rows @ rows.T @ y.T).T.flatten()
        fmb = block.mlp(F.layer_norm(fm, fm.shape)).view(shape.fm_rows, WIDTH)
        expected = F.layer_norm(torch.cat((fmb + residual @ rows, linear @ rows)), (WIDTH,))
        torch.testing.assert_close(layer(x)[:, example], expected, rtol=1e-4, atol=1e-5)


def test_the_residual_is_the_input_if_the_number_of_rows_stays() -> None:
    layer, x = WukongLayer(SHAPE.out_rows, SHAPE), torch.randn(SHAPE.out_rows, BATCH, WIDTH)
    for name in ("fm_block.mlp.2.weight", "fm_block.mlp.2.bias", "row_linear.weight"):
        torch.nn.init.zeros_(layer.get_parameter(name))
    torch.testing.assert_close(layer(x), F.layer_norm(x, (WIDTH,)))


def test_an_input_dependent_projection_that_ignores_its_input_is_a_static_one() -> None:
    x, y = torch.randn(BATCH, ROWS, WIDTH), torch.randn(2, ROWS)
    dynamic = InputDependentProjection(ROWS, WIDTH, 2, 8)
    torch.nn.init.zeros_(dynamic.get_parameter("mlp.2.weight"))
    dynamic.get_parameter("mlp.2.bias").data = y.flatten()
    static = StaticProjection(2)(x, y @ x)
    torch.testing.assert_close(dynamic(x, torch.randn(BATCH, 4, WIDTH)), static)


def test_the_factorization_block_depends_on_dot_products_of_rows_alone() -> None:
    """A rotation of all rows leaves X X^T, and so the output, unchanged."""
    layer, x = WukongLayer(ROWS, STATIC), rows_of_features()

    def fm(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer.fm_block(x, layer.row_linear(x)[: STATIC.rank])
        return out

    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    torch.testing.assert_close(fm(x @ rotation), fm(x), rtol=1e-4, atol=1e-5)
    stretched = x * torch.tensor([1.0, 2.0, 1.0, 1.0])
    assert (fm(stretched) - fm(x)).abs().max() > 1e-3


def test_cross_layer_attention_starts_as_plain_wukong_and_reaches_the_first_layer() -> None:
    x, plain = rows_of_features(), Wukong(ROWS, [SHAPE] * 3)
    wide = Wukong(ROWS, [SHAPE] * 3, cross_layer_rows=2, heads=2)
    wide.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(wide(x), plain(x))
    torch.nn.init.normal_(wide.get_parameter("cross_layer_attention.gate"))
    assert (wide(x) - plain(x)).abs().max() > 1e-2
    # The second layer passes nothing on, so the last one knows x through attention alone.
    torch.nn.init.zeros_(wide.get_parameter("layers.1.norm.weight"))
    torch.nn.init.zeros_(plain.get_parameter("layers.1.norm.weight"))
    other = rows_of_features()
    torch.testing.assert_close(plain(x), plain(other))
    assert (wide(x) - wide(other)).abs().max() > 1e-3


def test_cross_layer_attention_has_heads_over_the_inputs_of_all_earlier_layers() -> None:
    """X_i + g * [softmax(Q_h K_h^T / sqrt(D)) V_h]_h, with K and V of the compressed rows."""
    sizes, heads = (ROWS, 5, 4), 2
    module, head = CrossLayerAttention(sizes, WIDTH, 2, heads), WIDTH // heads
    torch.nn.init.normal_(module.gate)
    *earlier, x = (torch.randn(n, BATCH, WIDTH) for n in sizes)
    pairs = zip(module.compress, earlier, strict=True)
    compressed = torch.cat([compress(y) for compress, y in pairs])
    keys, values = module.kv[1](compressed).chunk(2, -1)
    queries, attended = module.q[1](x), torch.zeros_like(x)
    for example in range(BATCH):
        for first in range(0, WIDTH, head):
            part = slice(first, first + head)
            scores = queries[:, example, part] @ keys[:, example, part].T
            weights = (scores / head**0.5).softmax(1)
            attended[:, example, part] = weights @ values[:, example, part]
    torch.testing.assert_close(module(2, x, earlier), x + module.gate[1] * attended)
    assert module(0, x, []) is x


def test_the_rows_of_wukong_may_shrink_by_layer() -> None:
    config = SIZES.model_copy(update={"wukong_rows": (5, 4, 2), "fm_rows": 2, "linear_rows": 1})
    model, x = build_interaction(ROWS, config), rows_of_features()
    assert isinstance(model, Wukong) and model.out_rows == 2
    rows = []
    for layer in model.layers:
        x = layer(x)
        rows.append(len(x))
    assert rows == [5, 4, 2]
    shapes = wukong_shapes(config)
    assert [(s.fm_rows, s.linear_rows) for s in shapes] == [(3, 2), (3, 1), (1, 1)]
    constant = wukong_shapes(SIZES)
    assert [s.out_rows for s in constant] == [SIZES.fm_rows + SIZES.linear_rows] * SIZES.layers


@pytest.mark.parametrize("rows", [SHAPE.out_rows, ROWS], ids=["same rows", "fewer rows"])
def test_residual_sums_stay_in_fp32_under_autocast(rows: int) -> None:
    """Terms may be products in bf16; their sum is not rounded before the norm enlarges it."""
    layer = WukongLayer(rows, SHAPE)
    x = 1 + 1e-4 * torch.randn(rows, BATCH, WIDTH)
    sums: list[torch.Tensor] = []
    layer.norm.register_forward_pre_hook(lambda _module, inputs: sums.append(inputs[0]))
    terms: list[torch.Tensor] = []
    for block in (layer.row_linear, layer.fm_block):
        block.register_forward_hook(lambda _module, _inputs, out: terms.append(out.float()))
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    linear_maps, fm = terms
    _, residual, linear = linear_maps.split(layer.split_sizes)
    if layer.keeps_row_count:
        expected = torch.cat((fm, linear)) + x
    else:
        expected = torch.cat((fm + residual, linear))
    assert sums[0].dtype == torch.float32 and torch.equal(sums[0], expected)


def test_dcn_is_a_polynomial_of_one_degree_more_than_its_layers() -> None:
    """Along a line through the origin (2008.13535, theorem 1): higher differences vanish."""
    layers = 2
    model, x = DCNv2(ROWS, WIDTH, layers, 8).double(), rows_of_features().double()
    for index in range(layers):
        torch.nn.init.normal_(model.get_parameter(f"layers.{index}.up.bias"))

    def difference(order: int) -> torch.Tensor:
        signs = [(-1) ** i * math.comb(order, i) for i in range(order + 1)]
        terms = [sign * model(i * x) for i, sign in enumerate(signs)]
        return torch.stack(terms).sum(0)

    assert difference(layers + 1).abs().max() > 1e-3
    assert difference(layers + 2).abs().max() < 1e-9


def test_a_dhen_layer_is_the_sum_of_its_interactions() -> None:
    """Without crosses and shortcut, dot products of pairs remain: rotation invariant."""
    layer, x = DhenLayer(ROWS, 3, WIDTH, 8), rows_of_features()
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    assert (layer(x @ rotation) - layer(x)).abs().max() > 1e-2
    for row_linear in (layer.cross_projection, layer.residual):
        torch.nn.init.zeros_(row_linear.weight)
    torch.testing.assert_close(layer(x @ rotation), layer(x), rtol=1e-4, atol=1e-5)
    pairs = torch.triu_indices(ROWS, ROWS, 1)
    products = (x[pairs[0]] * x[pairs[1]]).sum(2)
    dot = layer.dot(products.T).view(BATCH, 3, WIDTH).transpose(0, 1)
    torch.testing.assert_close(layer(x), layer.norm(dot), rtol=1e-4, atol=1e-5)


def test_finalmlp_multiplies_its_streams_row_by_row() -> None:
    model, x = FinalMlp(ROWS, WIDTH, 8, 2), rows_of_features()
    u, v, products = model(x).chunk(3)
    for row in range(2):
        torch.testing.assert_close(products[row], u[row] * (v[row] @ model.bilinear_weight[row]))
    for name in ("gate.2.weight", "gate.2.bias", "mlp.3.weight", "mlp.3.bias"):
        torch.nn.init.zeros_(model.get_parameter(f"streams.0.{name}"))
    zero_stream, other_stream, zero_products = model(x).chunk(3)
    assert not zero_stream.any() and not zero_products.any()
    torch.testing.assert_close(other_stream, v)


TOKENS, TOKEN_WIDTH = 4, 8


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, BATCH, TOKEN_WIDTH)


def test_mixing_heads_twice_is_the_identity() -> None:
    """M[h, t (D/H) + j] = X[t, h (D/H) + j] with as many heads as tokens (2507.15551)."""
    x, head = tokens(), TOKEN_WIDTH // TOKENS
    mixed = mix_heads(x)
    for h, t, j in product(range(TOKENS), range(TOKENS), range(head)):
        assert torch.equal(mixed[h, :, t * head + j], x[t, :, h * head + j])
    assert torch.equal(mix_heads(mixed), x) and not torch.equal(mixed, x)


def test_permuted_heads_of_all_tokens_are_permuted_mixed_tokens() -> None:
    x, order = tokens(), torch.randperm(TOKENS)
    by_head = x.unflatten(2, (TOKENS, -1))[:, :, order].flatten(2)
    assert torch.equal(mix_heads(by_head), mix_heads(x)[order])


def test_a_mixer_block_with_equal_nets_has_one_shared_net() -> None:
    """LN(FFN(S) + S) with S = LN(Mix(X) + X)."""
    block, x = MixerBlock(TOKENS, TOKEN_WIDTH), tokens()
    for weight in block.ffn.parameters():
        weight.data.copy_(weight.data[:1].expand_as(weight) + 0.1)
    up, down = block.ffn.up, block.ffn.down
    mixed = F.layer_norm(mix_heads(x) + x, (TOKEN_WIDTH,))
    shared = F.gelu(mixed @ up.weight[0] + up.bias[0]) @ down.weight[0] + down.bias[0]
    torch.testing.assert_close(
        block(x), F.layer_norm(shared + mixed, (TOKEN_WIDTH,)), rtol=1e-4, atol=1e-5
    )


def test_the_nets_of_a_mixer_block_have_2ktd2_weights() -> None:
    block = MixerBlock(TOKENS, TOKEN_WIDTH)
    weights = sum(w.numel() for name, w in block.ffn.named_parameters() if "weight" in name)
    assert weights == 2 * 4 * TOKENS * TOKEN_WIDTH**2


@pytest.mark.parametrize("rows", [4, 6, 9])
def test_each_row_reaches_one_token(rows: int) -> None:
    module = RowTokens(rows, WIDTH, TOKENS, TOKEN_WIDTH)
    x = torch.randn(rows, BATCH, WIDTH)
    for row in range(rows):
        other = x.clone()
        other[row] += 1
        assert int((module(other) - module(x)).ne(0).any(2).any(1).sum()) == 1
    with pytest.raises(UserError, match="4 tokens cannot be made of 3 rows"):
        RowTokens(3, WIDTH, TOKENS, TOKEN_WIDTH)


@pytest.mark.parametrize(("width", "count"), [(4, 4), (16, 16), (32, 16), (36, 16), (32, 12)])
def test_tokens_are_cut_into_rows_and_heads(width: int, count: int) -> None:
    inner = token_width(width, count)
    assert inner % width == inner % count == 0 and inner >= 2 * width
    model = RankMixer(20, width, count, 1)
    assert model(torch.randn(20, 3, width)).shape == (model.out_rows, 3, width)
    x = torch.randn(count, 3, inner)
    rows = tokens_to_rows(x, width)
    assert torch.equal(rows[: inner // width].transpose(0, 1).flatten(1), x[0])


def test_hyformer_needs_events() -> None:
    with pytest.raises(UserError, match="hyformer reads sequences"):
        build_interaction(ROWS, SIZES.model_copy(update={"interaction": "hyformer"}))
