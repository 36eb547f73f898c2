"""Compute options do not change the results of GEM, except for rounding."""

from typing import Any

import pytest
import torch

from etl.tables.lake import Lake
from tests.conftest import LAST
from training.config import ComputeConfig
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.model.config import SCALES, GemConfig, SequenceOptions
from training.model.embeddings import (
    TorchEmbeddingTables,
    item_row_map_up_to,
    lookup_embeddings,
    table_sizes,
)
from training.model.gem import Gem, GemOutput
from training.model.trunk import aligned_linear
from training.precision.linear import linear_sites
from training.precision.precision_map import PrecisionMap, RecipeName
from training.trainer.compute import apply_compute_config

EAGER = ComputeConfig()
DEEP = {"flow": "int", "cls_tokens": 1, "rotary": True, "pooling": "hsp", "pyramid_stride": 2}
# Three stand for all kinds of blocks; `make proof` computes the others, too.
MODELS: dict[str, dict[str, Any]] = {
    "deep": {"event_layers": 2, "sequence": SequenceOptions.model_validate(DEEP)},
    "across": {"cross_layer_rows": 2, "layers": 3},
    "two streams": {"interaction": "finalmlp"},
}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "pffn": {"sequence": SequenceOptions(flow="n2s", personalization="pffn", layer="hstu")},
    "dhen": {"interaction": "dhen"},
    "dcnv2": {"interaction": "dcnv2"},
    "rankmixer": {"interaction": "rankmixer"},
    "hyformer": {"interaction": "hyformer", "experts": "ple"},
}
ALL_MODELS = [*MODELS, *(pytest.param(name, marks=pytest.mark.proof) for name in MORE_MODELS)]


@pytest.fixture(scope="module")
def batches(lake: Lake) -> list[Batch]:
    reader = ExampleReader.latest(lake, "behaviour", 64)
    window = LabelWindow(0, lake.spec.day_end(LAST))
    return [next(reader.batches([LAST], window, rows, Shuffle(0))) for rows in (64, 48)]


@pytest.fixture(params=ALL_MODELS)
def config(request: pytest.FixtureRequest) -> GemConfig:
    options = (MODELS | MORE_MODELS)[request.param]
    update = {"user_hash_buckets": 0, "item_dropout": 0.0} | options
    return SCALES["tiny"].model_copy(update=update)


class Model:
    """A GEM and tables of one seed, computed by some options."""

    def __init__(
        self,
        lake: Lake,
        config: GemConfig,
        options: ComputeConfig,
        recipe: RecipeName | None = None,
    ) -> None:
        reader = ExampleReader.latest(lake, "behaviour", 64)
        torch.manual_seed(0)
        self.gem = Gem(reader.features, config)
        self.tables = TorchEmbeddingTables(table_sizes(reader.features, 500), config.embedding_dim)
        precision_map = None
        if recipe:
            precision_map = PrecisionMap.uniform([n for n, _ in linear_sites(self.gem)], recipe)
        apply_compute_config(self.gem, options, precision_map, backend="aot_eager")

    def logits(self, batch: Batch) -> torch.Tensor:
        torch.manual_seed(1)
        history = self.gem.select_history(batch)
        vectors = lookup_embeddings(self.tables, batch, history.positions, item_row_map_up_to(500))
        output: GemOutput = self.gem(batch, history, vectors)
        return output.logits

    def logits_and_gradients(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits, and all gradients."""
        logits = self.logits(batch)
        torch.autograd.backward(logits.square().sum())
        named = self.gem.named_parameters()
        return logits, {name: p.grad for name, p in named if p.grad is not None}


def checkpointed(blocks: str) -> ComputeConfig:
    return ComputeConfig.model_validate({"activation_checkpointing": blocks})


@pytest.mark.parametrize("blocks", ["sequence", "blocks"])
def test_activation_checkpointing_is_bitwise_exact(
    lake: Lake, config: GemConfig, batches: list[Batch], blocks: str
) -> None:
    """Dropout draws the same numbers again; names of weights do not change."""
    logits, gradients = Model(lake, config, EAGER).logits_and_gradients(batches[0])
    model = Model(lake, config, checkpointed(blocks))
    again, gradients_again = model.logits_and_gradients(batches[0])
    assert torch.equal(logits, again) and gradients.keys() == gradients_again.keys()
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def saved_bytes(model: Model, batch: Batch) -> int:
    """Bytes that a forward pass saves for the backward pass."""
    sizes: list[int] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model.logits(batch)
    return sum(sizes)


def test_activation_checkpointing_saves_memory(lake: Lake, batches: list[Batch]) -> None:
    config = SCALES["tiny"].model_copy(update=MODELS["deep"] | {"user_hash_buckets": 0})
    none, sequence, blocks = (
        saved_bytes(Model(lake, config, checkpointed(kind)), batches[0])
        for kind in ("none", "sequence", "blocks")
    )
    assert none > sequence > blocks


def test_compiled_blocks_are_compiled_once_for_all_sizes_of_a_batch(
    lake: Lake, config: GemConfig, batches: list[Batch]
) -> None:
    torch.compiler.reset()
    eager, compiled = (
        Model(lake, config, o)
        for o in (EAGER, ComputeConfig(compiled=True, activation_checkpointing="blocks"))
    )
    for batch, stance in zip(batches, ("default", "fail_on_recompile"), strict=True):
        with torch.compiler.set_stance(stance):
            logits, gradients = eager.logits_and_gradients(batch)
            again, others = compiled.logits_and_gradients(batch)
        torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(others, gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.proof
@pytest.mark.parametrize("config", ["deep"], indirect=True)
def test_compiled_blocks_with_fp8_are_as_exact_as_they_were(
    lake: Lake, config: GemConfig, batches: list[Batch]
) -> None:
    """Its products are operators that compilers call: all layers are still whole graphs."""
    torch.compiler.reset()
    logits = []
    for compiled in (False, True):
        options = ComputeConfig(precision="fp8", compiled=compiled)
        model = Model(lake, config, options, "fp8_row")
        logits.append(model.logits_and_gradients(batches[0])[0])
    exact, _ = Model(lake, config, EAGER).logits_and_gradients(batches[0])
    error = (logits[0] - exact).abs().mean()
    assert 0 < (logits[1] - exact).abs().mean() < 1.5 * error
    torch.compiler.reset()


def test_bf16_is_close_to_fp32(lake: Lake, config: GemConfig, batches: list[Batch]) -> None:
    half = ComputeConfig(precision="bf16")
    logits, gradients = Model(lake, config, EAGER).logits_and_gradients(batches[0])
    logits_bf16, gradients_bf16 = Model(lake, config, half).logits_and_gradients(batches[0])
    assert logits_bf16.dtype == torch.float32 and not torch.equal(logits, logits_bf16)
    torch.testing.assert_close(logits_bf16, logits, atol=0.05, rtol=0.05)
    assert all(gradient.dtype == torch.float32 for gradient in gradients_bf16.values())
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    flat_bf16 = torch.cat([gradients_bf16[name].flatten() for name in gradients])
    assert torch.cosine_similarity(flat, flat_bf16, dim=0) > 0.98


def test_a_linear_layer_with_padded_inputs_equals_one_without() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(13, 3), torch.randn(5, 13, requires_grad=True)
    weight = torch.randn(5, 3)
    leaves = x, linear.weight, linear.bias
    padded = aligned_linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(padded, linear(x))
    torch.testing.assert_close(
        torch.autograd.grad((padded * weight).sum(), leaves),
        torch.autograd.grad((linear(x) * weight).sum(), leaves),
    )
