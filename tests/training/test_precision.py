"""Training with FP8: casts and products obey their laws, and layers fall back within bounds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from etl.errors import UserError
from etl.tables.lake import Lake
from tests.training.fp8 import FP8, Model, normals
from tests.training.many import Parallelism, some_batches, train, train_on_processes
from training.config import TrainConfig
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.model.config import GemOptions
from training.model.gem import Gem
from training.model.low_precision import BlockNorm, SwishRMSNorm, harden_gates
from training.model.sequence.layers import HstuLayer
from training.precision.linear import (
    apply_precision_map,
    linear_product,
    linear_sites,
    precise_linear,
    recipe_product,
)
from training.precision.precision_map import Direction, PrecisionMap, RecipeName, SiteRecipes
from training.precision.recipes import BLOCK, E4M3, E5M2, Scaling, product, quantize
from training.precision.valve import CHECK_EVERY, CHECKED_ROWS, SafetyValve

SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "block")
NO_GRADIENTS = False, False


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), inputs=st.integers(1, 300))
def test_casts_are_idempotent_and_ignore_powers_of_two(seed: int, rows: int, inputs: int) -> None:
    x = normals(rows, inputs, seed=seed) * normals(rows, 1, seed=seed + 1).exp()
    for scaling in SCALINGS:
        for dtype in (E4M3, E5M2):
            cast = quantize(x, dtype, scaling)
            again = quantize(cast.dequantized(), dtype, scaling)
            torch.testing.assert_close(again.dequantized(), cast.dequantized(), rtol=1e-6, atol=0)
            doubled = quantize(x * 2**7, dtype, scaling)
            assert torch.equal(doubled.values.float(), cast.values.float())
            largest = x.abs().amax()
            step = 2**-4 if dtype == E4M3 else 2**-3
            error = (cast.dequantized() - x).abs()
            assert (error <= step * x.abs() + 2**-9 / 448 * largest * 448).all()


def test_scales_are_local() -> None:
    """An outlier costs the precision of its tensor, row or block only."""
    x = normals(4, 2 * BLOCK)
    x[0, 0] = 1e6

    def is_exact(scaling: Scaling) -> Tensor:
        error = (quantize(x, E4M3, scaling).dequantized() - x).abs()
        return error < 0.07 * x.abs() + 1e-3

    assert is_exact("tensor").float().mean() < 0.1
    assert is_exact("row")[1:].all() and not is_exact("row")[0].all()
    assert is_exact("block")[1:].all() and is_exact("block")[0, BLOCK:].all()


def test_products_equal_those_of_the_library() -> None:
    a, b = normals(32, 64), normals(48, 64, seed=1)
    for name, scaling in (("fp8_tensor", "tensor"), ("fp8_row", "row")):
        left, right = (quantize(x, E4M3, scaling) for x in (a, b))  # type: ignore[arg-type]
        expected = torch._scaled_mm(
            left.values, right.values.t(), scale_a=left.decode, scale_b=right.decode.t(),
            out_dtype=torch.float32,
        )  # fmt: skip
        found = product(a, b, name, NO_GRADIENTS)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FP8)
def test_zeros_along_the_sum_change_nothing_and_errors_are_those_of_the_format(
    name: RecipeName,
) -> None:
    a, b = normals(64, 3 * BLOCK), normals(32, 3 * BLOCK, seed=1)
    found = product(a, b, name, NO_GRADIENTS)
    padded = product(F.pad(a, (0, BLOCK)), F.pad(b, (0, BLOCK)), name, NO_GRADIENTS)
    torch.testing.assert_close(padded, found, rtol=1e-5, atol=1e-4)
    exact = a @ b.t()
    error = float((found - exact).norm() / exact.norm())
    assert 0.02 < error < 0.05
    assert not product(a[:0], b, name, NO_GRADIENTS).numel()


def test_e5m2_loses_a_bit_of_precision_and_keeps_small_values() -> None:
    """The steps of e5m2 are twice those of e4m3; its range spares values beside an outlier."""
    a, b = normals(64, 256), normals(32, 256, seed=1)

    def error(name: str, x: Tensor) -> float:
        exact = x @ b.t()
        found = product(x, b, name, NO_GRADIENTS)  # type: ignore[arg-type]
        return float((found - exact)[1:].norm() / exact[1:].norm())

    for scaling, e4m3 in (
        ("tensor", "fp8_tensor_e4m3"),
        ("row", "fp8_row"),
        ("block", "fp8_block"),
    ):
        assert 1.7 < error(f"fp8_{scaling}_e5m2", a) / error(e4m3, a) < 2.3
    a[0] *= 1e6
    assert error("fp8_tensor_e5m2", a) < 0.1 < error("fp8_tensor_e4m3", a)


def gradients_of(recipes: SiteRecipes | None) -> list[Tensor]:
    """Output, and gradients of input, weight and bias of a layer."""
    x, weight, bias = normals(5, 7, 96), normals(40, 96, seed=1), normals(40, seed=2)
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    plain = F.linear(x, weight, bias)
    output = precise_linear(x, weight, bias, recipes) if recipes else plain
    (output * normals(5, 7, 40, seed=3)).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in (x, weight, bias) if leaf.grad is not None)]


def test_a_linear_layer_has_a_recipe_for_each_direction() -> None:
    exact = gradients_of(None)
    for found, expected in zip(gradients_of(SiteRecipes()), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    empty = precise_linear(normals(0, 7, 96), normals(40, 96), None, SiteRecipes(forward="fp8_row"))
    assert empty.shape == (0, 7, 40)
    for position, direction in enumerate(("forward", "input_grad", "weight_grad")):
        values = gradients_of(SiteRecipes.model_validate({direction: "fp8_row"}))
        for k, (value, expected) in enumerate(zip(values, exact, strict=True)):
            error = float((value - expected).norm() / expected.norm())
            assert (0.01 < error < 0.06) if k == position else error < 1e-5


def test_a_map_changes_the_layers_that_it_names_and_no_parameter_names() -> None:
    exact, model, x = Model(), Model(), normals(64, 24)
    names = [name for name, _ in linear_sites(model)]
    assert names == ["trunk.0", "trunk.2"]
    before = list(model.state_dict())
    apply_precision_map(model, PrecisionMap.uniform(["trunk.2"], "fp8_tensor"))
    assert list(model.state_dict()) == before
    assert torch.equal(model.trunk[:2](x), exact.trunk[:2](x))
    hidden = exact.trunk[:2](x)
    difference = (model.trunk[2](hidden) - exact.trunk[2](hidden)).norm()
    assert 0.01 < difference / exact.trunk[2](hidden).norm() < 0.06


def test_a_map_of_another_model_is_refused_and_layers_that_are_gone_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(UserError, match="has 1 of 1 layers that the model lacks, such as gone"):
        apply_precision_map(Model(), PrecisionMap.uniform(["gone"], "bf16"))
    apply_precision_map(Model(), PrecisionMap.uniform(["gone", "trunk.2"], "bf16"))
    assert "has 1 of 2 layers that the model lacks, such as gone" in caplog.text
    caplog.clear()
    apply_precision_map(Model(), PrecisionMap.uniform(["trunk.2"], "bf16"))
    assert not caplog.text


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_tensor", "fp8_row"])
def test_operators_do_what_they_declare_to_compilers(recipe: str) -> None:
    x, weight = normals(6, 5).requires_grad_(), normals(3, 5).requires_grad_()
    torch.library.opcheck(recipe_product, (x.detach(), weight.detach(), recipe, True))
    torch.library.opcheck(linear_product, (x, weight, recipe, recipe, recipe))


def test_layers_train_equally_when_they_are_compiled_or_sharded() -> None:
    x = normals(32, 24)

    def gradients(shard: bool, compiled: bool) -> list[Tensor]:
        model = Model()
        apply_precision_map(model, PrecisionMap.uniform(["trunk.0", "trunk.2"], "fp8_row"))
        if shard:
            mesh = init_device_mesh("cpu", (1,))
            fully_shard(model.trunk, mesh=mesh)
        trunk = model.trunk
        forward = torch.compile(trunk, fullgraph=True, backend="aot_eager") if compiled else trunk
        forward(x).square().sum().backward()
        grads = [p.grad for p in model.trunk.parameters()]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]

    expected = gradients(shard=False, compiled=False)
    assert len(expected) == 4
    with process_group():
        for other in (gradients(shard=True, compiled=False), gradients(shard=False, compiled=True)):
            for found, grad in zip(other, expected, strict=True):
                torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_whose_error_grows_falls_back(
    caplog: pytest.LogCaptureFixture, compiled: bool
) -> None:
    model, exact = Model(), Model()
    uniform = PrecisionMap.uniform(["trunk.0", "trunk.2"], "fp8_tensor")
    apply_precision_map(model, uniform)
    if compiled:
        torch.compiler.reset()
        forward = torch.compile(model.trunk.forward, fullgraph=True, backend="aot_eager")
        model.trunk.forward = forward  # type: ignore[method-assign]
    valve = SafetyValve(model, uniform)
    x = normals(64, 24)
    with valve.watch(CHECK_EVERY):
        model(x)
    assert set(valve.layers) == {"trunk.0", "trunk.2"}
    x[0] *= 1e7  # the scale of the tensor leaves no precision to the other rows
    with valve.watch(1):
        model(x)
    assert set(valve.layers) == {"trunk.0", "trunk.2"}  # not due
    with valve.watch(2 * CHECK_EVERY):
        model(x)
    assert "trunk.0, forward: fp8_tensor has error" in caplog.text
    fallen_back = uniform.with_fallback("trunk.0", "forward")
    assert valve.precision_map == fallen_back.with_fallback("trunk.2", "forward")
    assert uniform.with_fallbacks_of(valve.precision_map) == valve.precision_map
    chosen_since = PrecisionMap.uniform(["trunk.0", "trunk.2"], "fp8_row")
    assert chosen_since.with_fallbacks_of(valve.precision_map) == chosen_since
    apply_precision_map(exact, valve.precision_map)
    torch.testing.assert_close(model(x), exact(x), rtol=1e-6, atol=0)
    torch.compiler.reset()


def test_an_outlier_in_any_row_of_a_large_batch_is_noticed() -> None:
    model, uniform = Model(), PrecisionMap.uniform(["trunk.0", "trunk.2"], "fp8_tensor")
    apply_precision_map(model, uniform)
    valve = SafetyValve(model, uniform)
    x = normals(5 * CHECKED_ROWS, 24)
    x[4 * CHECKED_ROWS + 3] *= 1e7
    with valve.watch(CHECK_EVERY):
        model(x)
    assert set(valve.precision_map.fallbacks) == {"trunk.0", "trunk.2"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("direction", ["input_grad", "weight_grad"])
def test_a_product_of_gradients_falls_back_alone(
    caplog: pytest.LogCaptureFixture, direction: Direction, compiled: bool
) -> None:
    """One gradient that is 1e12 times the others hides those of other rows or other outputs."""
    site = SiteRecipes(forward="bf16", input_grad="fp8_tensor", weight_grad="fp8_tensor")
    chosen = PrecisionMap(sites={"trunk.2": site}, chosen_by="speed")
    model, x, gradient = Model(), normals(64, 24), normals(64, 8, seed=1)
    apply_precision_map(model, chosen)
    if compiled:
        torch.compiler.reset()
        forward = torch.compile(model.trunk.forward, fullgraph=True, backend="aot_eager")
        model.trunk.forward = forward  # type: ignore[method-assign]
    valve = SafetyValve(model, chosen)
    assert set(valve.layers) == {"trunk.2"}
    with valve.watch(0):
        model.trunk(x).backward(gradient)
    assert valve.precision_map == chosen
    outliers = gradient[0] if direction == "input_grad" else gradient[:, 0]
    outliers *= 1e12
    with valve.watch(CHECK_EVERY):
        model.trunk(x).backward(gradient)
    assert f"trunk.2, {direction}: fp8_tensor has error" in caplog.text
    assert valve.precision_map.sites == {"trunk.2": site.model_copy(update={direction: "bf16"})}
    assert valve.precision_map.fallbacks == chosen.sites
    assert chosen.with_fallbacks_of(valve.precision_map) == valve.precision_map

    def gradients(of: nn.Sequential) -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        of.zero_grad()
        of(inputs).backward(gradient)
        grads = [inputs.grad, *(p.grad for p in of.parameters())]
        return [grad for grad in grads if grad is not None]

    expected = Model()
    apply_precision_map(expected, valve.precision_map)
    for found, grad in zip(gradients(model.trunk), gradients(expected.trunk), strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=0)
    torch.compiler.reset()


def test_several_processes_train_with_a_map_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    model = Model()
    valve = SafetyValve(model, PrecisionMap.uniform(["trunk.0"], "bf16"))
    with valve.watch(0):
        model(normals(8, 24))
    assert not valve.layers and set(valve.precision_map.sites) == {"trunk.0"}


@pytest.mark.proof
def test_two_processes_train_in_fp8_what_one_does(lake: Lake, tmp_path: Path) -> None:
    """Scales are of a batch, so that a process that has one casts it as one process does."""
    features, batches = some_batches(lake, 6)
    steps = [batches[n : n + 2] for n in range(0, 6, 2)]
    plain = Parallelism(recipe="fp8_row")
    variants = [plain, replace(plain, sharded=True)]
    with process_group():
        single = train(features, steps, plain, 0, 1)
        exact = train(features, steps, Parallelism(), 0, 1)
    assert single.losses[0] != pytest.approx(exact.losses[0], rel=1e-5), "products are cast"
    for of_processes in train_on_processes(features, steps, variants, tmp_path / "two", 2):
        for result in of_processes:
            assert result.losses == pytest.approx(single.losses, rel=1e-4)
            assert result.fallbacks == single.fallbacks == []
            for name, rows in single.tables.items():
                torch.testing.assert_close(result.tables[name], rows, rtol=0, atol=1e-3, msg=name)


def test_block_norm_scales_each_block_by_itself() -> None:
    x = normals(8, 300)
    normed = BlockNorm()(x)
    for block in normed.split(256, -1):
        torch.testing.assert_close(block.square().mean(-1), torch.ones(8), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(BlockNorm()(x * 7), normed, rtol=1e-4, atol=1e-5)


def test_changes_for_low_precision_have_the_parameters_that_they_say(lake: Lake) -> None:
    features = ExampleReader.latest(lake, "behaviour", 8).features

    def parameters(**options: object) -> set[str]:
        config = TrainConfig.model_validate({"scale": "tiny", "model": options})
        return {name for name, _ in Gem(features, config.gem_config).named_parameters()}

    default = parameters()
    removed = default - parameters(linear_biases=False)
    assert "trunk.0.bias" in removed and all(name.endswith("bias") for name in removed)
    assert not any(name.startswith("heads") for name in removed)
    assert default - parameters(trunk_norm="block") == {"trunk.1.weight", "trunk.1.bias"}
    assert parameters(hard_gates=True) == default
    gem = Gem(features, TrainConfig(scale="tiny", model=GemOptions(hard_gates=True)).gem_config)
    kinds = {type(module) for module in gem.modules()}
    assert not kinds & {nn.SiLU, nn.Sigmoid} and {nn.Hardswish, nn.Hardsigmoid} <= kinds


def test_hard_gates_replace_those_of_hstu_layers_and_of_swish_norms(lake: Lake) -> None:
    layer, events = HstuLayer(8, 2, None, 4), normals(4, 8)
    layer.attention_kind = replace(layer.attention_kind, activation="identity")
    swish = SwishRMSNorm(8)
    harden_gates(nn.Sequential(layer, swish))
    u, v, q, k = F.hardswish(layer.uvqk(layer.norm(events))).chunk(4, 1)
    heads = [x.unflatten(1, (2, 4)).transpose(0, 1) for x in (q, k, v)]
    weights = (heads[0] @ heads[1].mT).tril() / 4
    attended = (weights @ heads[2]).transpose(0, 1).flatten(1)
    expected = events + layer.out(layer.attention_norm(attended) * u)
    torch.testing.assert_close(layer(events, torch.tensor([0, 4])), expected)
    torch.testing.assert_close(swish(events), events * F.hardsigmoid(swish.norm(events)))

    features = ExampleReader.latest(lake, "behaviour", 8).features
    options = {"hard_gates": True, "trunk_norm": "swish_rms", "sequence": {"layer": "hstu"}}
    config = TrainConfig.model_validate({"scale": "tiny", "model": options})
    hard = {nn.Hardswish, nn.Hardsigmoid}
    for module in Gem(features, config.gem_config).modules():
        if isinstance(module, HstuLayer | SwishRMSNorm):
            assert type(module.activation) in hard
