"""Probes of what linear layers read, and the map of recipes that is chosen by them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from gemline import main
from ranking.report.build import build_report
from tests.conftest import FIRST, GEM_FLAGS, LAST
from tests.training.fp8 import FP8, Model, normals
from tests.world import copy_of
from training.distributed.process_group import process_group
from training.evaluation.predictions import evaluation_path
from training.precision import dispatch
from training.precision.dispatch import (
    MAX_MERE,
    choose_recipes,
    measure_speedups,
    precision_map,
    speed_warning,
)
from training.precision.errors import (
    CANDIDATES,
    RecipeError,
    cosine,
    measure_errors,
    relative_frobenius_error,
)
from training.precision.precision_map import precision_map_path
from training.precision.probe import BLOCK_WIDTH, GaussianStatistics, MatrixNormal, Probe
from training.precision.recipes import RECIPES
from training.trainer.probing import load_probe
from training.trainer.trainer import predict_test

SPLIT = DaySplit(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
    data_until=LAST,
)  # fmt: skip


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


def test_probes_of_bf16_layers_are_in_fp32() -> None:
    model = Model()
    probe = Probe(model, every=1)
    with torch.autocast("cpu", torch.bfloat16), probe.watch(0):
        model(normals(64, 24) + 100).sum().backward()
    (_, first), _ = probe.by_name()
    inputs = normals(64, 24) + 100
    torch.testing.assert_close(first.inputs.covariance[0], inputs.t().cov(), rtol=1e-2, atol=1e-2)


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


def test_each_layer_is_timed_with_the_rows_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    model, timed = nn.Module(), []
    model.trunk = nn.Sequential(nn.Linear(4, 4))
    model.interaction = nn.Linear(4, 4)
    probe = Probe(model, every=1)
    for size in (8, 16):
        with probe.watch(0):
            model.trunk(torch.zeros(size, 4))
            model.interaction(torch.zeros(size, 5, 4))

    def record(outputs: int, inputs: int, rows: int, *_: object) -> dict[object, float]:
        timed.append((outputs, inputs, rows))
        return {}

    monkeypatch.setattr(dispatch, "_speedups_of_shape", record)
    rows = {name: site.rows_per_call for name, site in probe.by_name()}
    measure_speedups(probe.layers, rows, (), torch.device("cpu"))
    assert sorted(timed) == [(4, 4, 12), (4, 4, 60)]


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


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.floats(0.01, 10), scale=st.floats(0.1, 10))
def test_errors_of_outputs_obey_the_laws_of_norms(seed: int, size: float, scale: float) -> None:
    """Equal outputs, scaled ones, and outputs with noise that is orthogonal to the reference."""
    reference, noise = (normals(16, 24, seed=seed + n).double() for n in range(2))
    noise -= (noise * reference).sum() / reference.square().sum() * reference
    noise *= size * reference.norm() / noise.norm()
    for output, error, similarity in (
        (reference, 0.0, 1.0),
        (scale * reference, abs(scale - 1), 1.0),
        (-scale * reference, scale + 1, -1.0),
        (reference + noise, size, (1 + size**2) ** -0.5),
        (noise, (1 + size**2) ** 0.5, 0.0),
    ):
        for factor in (1.0, scale):  # of both
            a, b = factor * output, factor * reference
            assert relative_frobenius_error(a, b).item() == pytest.approx(error, abs=1e-9)
            assert cosine(a, b).item() == pytest.approx(similarity, abs=1e-9)


def test_measured_errors_are_of_the_product_in_fp32() -> None:
    """Without an error, the cosine is 1; with a relative error f, it is at least sqrt(1 - f^2)."""
    largest = {"fp32": 0.0, "bf16": 0.01, "fp8_row": 0.1}
    for error in measure_errors(trained_probe(0.0), tuple(RECIPES)):
        if error.recipe == "fp32":
            assert (error.mere, error.frobenius, error.random_mere) == (0.0, 0.0, 0.0)
        else:
            assert error.frobenius > 1e-4
        assert error.frobenius <= largest.get(error.recipe, 0.2)
        assert 1 - error.frobenius**2 - 1e-6 <= error.cosine <= 1 + 1e-6


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


def test_a_map_without_speeds_of_the_card_is_warned_of() -> None:
    (choice,) = choose_recipes(recipe_errors(fp8_tensor=0.15, fp8_block=0.1))
    warning = speed_warning(precision_map([choice]), "H200") or ""
    assert "chosen on a CPU" in warning and "fp8_block have no kernel" in warning
    timed = precision_map([choice], "A100")
    assert "chosen on A100" in (speed_warning(timed, "H200") or "")
    assert speed_warning(timed, "A100") is None


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
