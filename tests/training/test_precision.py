"""FP8: casts and products obey their laws, probes measure what layers read, bounds are kept."""

import json
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

from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from gemline import main
from ranking.report.build import build_report
from tests.conftest import FIRST, GEM_FLAGS, LAST
from tests.training.many import Parallelism, some_batches, train_on_processes
from tests.training.many import train as train_gem
from tests.world import copy_of
from training.config import TrainConfig
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.evaluation.predictions import evaluation_path
from training.model.config import GemOptions
from training.model.gem import Gem
from training.model.low_precision import BlockNorm
from training.precision.dispatch import MAX_MERE, choose_recipes, precision_map
from training.precision.errors import CANDIDATES, RecipeError, measure_errors
from training.precision.linear import (
    apply_precision_map,
    linear_product,
    linear_sites,
    precise_linear,
    recipe_product,
)
from training.precision.precision_map import (
    Direction,
    PrecisionMap,
    RecipeName,
    SiteRecipes,
    precision_map_path,
)
from training.precision.probe import BLOCK_WIDTH, GaussianStatistics, MatrixNormal, Probe
from training.precision.recipes import BLOCK, E4M3, E5M2, RECIPES, Scaling, product, quantize
from training.precision.valve import CHECK_EVERY, SafetyValve
from training.trainer.probing import load_probe
from training.trainer.trainer import predict_test

FP8: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_row", "fp8_block")  # e4m3 in forward products
SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "block")
NO_GRADIENTS = False, False
SPLIT = DaySplit(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
    data_until=LAST,
)  # fmt: skip


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


class Model(nn.Module):
    """A model with a trunk of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8))
        self.heads = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the head."""
        return torch.as_tensor(self.heads(self.trunk(x)))


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


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.integers(1, 5), width=st.sampled_from([3, 8]))
def test_statistics_of_batches_are_those_of_all_rows(seed: int, parts: int, width: int) -> None:
    rows = normals(60, width, seed=seed) @ normals(width, width, seed=seed + 1) + 5
    statistics = GaussianStatistics(width)
    for part in rows.chunk(parts):
        statistics.update(part)
    torch.testing.assert_close(statistics.mean, rows.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics.covariance[0], rows.t().cov(), rtol=1e-3, atol=1e-3)


def test_samples_have_the_mean_and_covariance_that_were_seen() -> None:
    width = BLOCK_WIDTH + 8  # two blocks
    rows = normals(900, width) * torch.linspace(0.1, 3, width) + torch.arange(width) / 100
    statistics = GaussianStatistics(width)
    statistics.update(rows)
    drawn = statistics.sample(4000, torch.Generator().manual_seed(1))
    assert drawn.shape == (4000, width)
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), rtol=0, atol=0.25)
    torch.testing.assert_close(drawn.std(0), rows.std(0), rtol=0.1, atol=0.02)


def test_few_rows_of_wide_inputs_can_be_sampled() -> None:
    statistics = GaussianStatistics(BLOCK_WIDTH)
    statistics.update(normals(5, 4) @ normals(4, BLOCK_WIDTH, seed=1) * 1e-3)
    assert statistics.sample(10, torch.Generator()).isfinite().all()


def test_the_distribution_of_weights_finds_rows_and_columns_that_vary_more() -> None:
    rows, columns = torch.tensor([1.0, 1, 4, 9]), torch.tensor([1.0, 4, 1, 16, 1])
    spread = (rows[:, None] * columns).sqrt()
    weights = MatrixNormal(4, 5)
    for step in range(300):
        weights.update(3 + 0.1 * spread * normals(4, 5, seed=step))
    torch.testing.assert_close(weights.mean, torch.full((4, 5), 3.0), rtol=0.2, atol=0)
    drawn = torch.stack([weights.sample(torch.Generator().manual_seed(s)) for s in range(400)])
    ratio = drawn.std(0) / (0.1 * spread)
    assert ratio.min() > 0.4 and ratio.max() < 2.5
    assert torch.corrcoef(torch.stack([drawn.std(0).flatten(), spread.flatten()]))[0, 1] > 0.9


def trained_probe(offset: float) -> Probe:
    """A probe of a model whose inputs have a common offset, which its weights cancel."""
    model = Model()
    first = next(model.trunk.children())
    assert isinstance(first, nn.Linear)
    first.weight.data -= first.weight.data.mean(1, keepdim=True)
    probe = Probe(model, every=2)
    for step in range(40):
        x = normals(32, 24, seed=step) + offset
        with probe.watch(step):
            model(x).square().mean().backward()
    return probe


def test_a_probe_watches_each_kth_step_and_changes_nothing() -> None:
    probe = trained_probe(0.0)
    assert int(probe.probed_steps) == 20
    assert all(float(site.inputs.count) == 20 * 32 for _, site in probe.by_name())
    assert all(float(site.gradients.count) == 20 * 32 for _, site in probe.by_name())
    watched, plain = Model(), Model()
    with Probe(watched, every=1).watch(0):
        watched(normals(8, 24)).sum().backward()
    plain(normals(8, 24)).sum().backward()
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def errors_of(probe: Probe, site: str, direction: str) -> dict[str, RecipeError]:
    errors = measure_errors(probe)
    return {e.recipe: e for e in errors if (e.site, e.direction) == (site, direction)}


def test_probed_inputs_show_errors_that_random_ones_hide() -> None:
    """A common offset of the inputs costs the precision of what remains when it cancels."""
    plain = errors_of(trained_probe(0.0), "trunk.0", "forward")
    offset = errors_of(trained_probe(30.0), "trunk.0", "forward")
    for recipe in FP8:
        assert offset[recipe].mere > 3 * plain[recipe].mere
        assert offset[recipe].random_mere == pytest.approx(plain[recipe].random_mere, rel=0.2)
    assert plain["bf16"].mere < plain["fp8_row"].mere / 5


def recipe_errors(**meres: float) -> list[RecipeError]:
    return [
        RecipeError("trunk.0", "forward", name, mere, mere, 1.0, mere)  # type: ignore[arg-type]
        for name, mere in {"bf16": 0.001, **meres}.items()
    ]


def test_dispatch_takes_the_fastest_recipe_within_the_bounds_or_none() -> None:
    errors = recipe_errors(fp8_tensor=0.15, fp8_row=0.1)
    (by_error,) = choose_recipes(errors)
    assert (by_error.recipe, by_error.speedup, by_error.reason) == ("fp8_row", None, "")
    speeds = {("trunk.0", "forward", "fp8_tensor"): 1.4, ("trunk.0", "forward", "fp8_row"): 1.2}
    (fastest,) = choose_recipes(errors, speeds)  # type: ignore[arg-type]
    assert (fastest.recipe, fastest.speedup) == ("fp8_tensor", 1.4)
    (slow,) = choose_recipes(errors, dict.fromkeys(speeds, 0.7))  # type: ignore[arg-type]
    assert (slow.recipe, slow.reason) == ("bf16", "FP8 has 0.70 times its speed")
    (wrong,) = choose_recipes(recipe_errors(fp8_tensor=0.3, fp8_row=2 * MAX_MERE), speeds)  # type: ignore[arg-type]
    assert wrong.recipe == "bf16" and "the error of FP8 is 0.30" in wrong.reason
    assert precision_map([slow]).fp8_share == 0
    assert precision_map([by_error]).fp8_share == pytest.approx(1 / 3)  # of three directions


def test_recipes_without_a_kernel_are_probed_and_never_chosen_on_a_gpu() -> None:
    probed = errors_of(trained_probe(0.0), "trunk.0", "input_grad")
    emulated = [e.recipe for e in probed.values() if RECIPES[e.recipe].is_emulated]
    assert set(probed) == set(CANDIDATES) == {"bf16", *(n for n in RECIPES if n.startswith("fp8"))}
    assert set(emulated) == {"fp8_tensor_e5m2", "fp8_row_e5m2", "fp8_block", "fp8_block_e5m2"}
    errors = [error for name, error in probed.items() if name in ("bf16", *emulated)]
    (by_error,) = choose_recipes(errors)
    assert by_error.recipe in emulated
    fast = {("trunk.0", "input_grad", name): 3.0 for name in RECIPES}
    (by_speed,) = choose_recipes(errors, fast)  # type: ignore[arg-type]
    assert by_speed.recipe == "bf16" and "no kernel for" in by_speed.reason


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
        single = train_gem(features, steps, plain, 0, 1)
        exact = train_gem(features, steps, Parallelism(), 0, 1)
    assert single.losses[0] != pytest.approx(exact.losses[0], rel=1e-5), "products are cast"
    for of_processes in train_on_processes(features, steps, variants, tmp_path / "two", 2):
        for result in of_processes:
            assert result.losses == pytest.approx(single.losses, rel=1e-4)
            assert result.fallbacks == single.fallbacks == []
            for name, rows in single.tables.items():
                torch.testing.assert_close(result.tables[name], rows, rtol=0, atol=1e-3, msg=name)


def test_probes_of_bf16_layers_are_in_fp32() -> None:
    model = Model()
    probe = Probe(model, every=1)
    with torch.autocast("cpu", torch.bfloat16), probe.watch(0):
        model(normals(64, 24) + 100).sum().backward()
    (_, first), _ = probe.by_name()
    inputs = normals(64, 24) + 100
    torch.testing.assert_close(first.inputs.covariance[0], inputs.t().cov(), rtol=1e-2, atol=1e-2)


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


def train(lake: Lake, spec_path: Path, *flags: str) -> int:
    command = ["train", "gem", "--spec", str(spec_path), "--lake", lake.root]
    return main([*command, "--days", f"{FIRST}:{FIRST}", *GEM_FLAGS, *flags])


def test_a_gem_is_trained_with_the_map_of_its_probe(
    lake: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = copy_of(lake, tmp_path / "lake")
    flags = ["--spec", str(spec_path), "--lake", own.root, "--day", str(FIRST)]
    assert train(own, spec_path, "--compute.precision", "fp8") == 2
    assert "train a GEM with --compute.probe-every 100" in capsys.readouterr().err
    assert main(["train", "probe", *flags]) == 2
    assert "no GEM was trained until" in capsys.readouterr().err
    assert train(own, spec_path, "--compute.probe-every", "2", "--compute.compiled") == 2
    assert "watches layers that are not compiled" in capsys.readouterr().err

    assert train(own, spec_path, "--compute.probe-every", "2") == 0
    with process_group():
        probe = load_probe(own, FIRST)
    assert int(probe.probed_steps) > 5
    assert main(["train", "probe", *flags]) == 0
    assert "of the products in FP8, chosen by error: no GPU" in capsys.readouterr().out
    chosen = json.loads(precision_map_path(own.root).read_text())
    errors = (Path(own.root) / "models/gem/precision_errors.csv").read_text()
    assert "random_mere" in errors and "fp8_block" in errors
    assert set(chosen["sites"]) <= set(probe.names) and "trunk.0" in chosen["sites"]

    assert train(own, spec_path, "--compute.precision", "fp8") == 0
    manifest = json.loads((Path(own.root) / "models/gem" / str(FIRST) / "gem.json").read_text())
    assert manifest["precision_map"] == chosen
    with process_group():
        predict_test(own, SPLIT).write(evaluation_path(own.root, "gem"), SPLIT)
    page = build_report(own, str(tmp_path / "raw"), SPLIT).read_text()
    section, _, _ = page.partition("<h2>FP8")[2].partition("<h2>")
    assert f"GEM of {FIRST}" in section and "None fell back" in section and "<svg" in section
    products = [name for site in chosen["sites"].values() for name in site.values()]
    in_fp8 = sum(name.startswith("fp8") for name in products)
    assert f"{in_fp8} of {len(products)} products of linear layers are in FP8" in section
    assert all(f"<td>{name}</td>" in section for name in chosen["sites"])
    assert main(["train", "probe", *flags]) == 2
    assert "was trained without probes" in capsys.readouterr().err
