"""Laws of how GEM is computed: nothing of what is learned changes, but for rounding."""

import pytest
import torch

from etl.tables.lake import Lake
from tests.conftest import LAST
from training.config import ComputeOptions
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.loop.compute import prepare
from training.model.config import SCALES, GemConfig, SequenceOptions
from training.model.gem import Gem
from training.model.lookup import first_items, look_up, table_rows
from training.model.plain import PlainTables

EAGER = ComputeOptions()
DEEP = {"flow": "int", "cls_rows": 1, "rotary": True, "pooling": "hsp", "shorten": 2}
# Three stand for all kinds of blocks; `make proof` computes the others, too.
MODELS = {
    "deep": {"event_layers": 2, "sequence": SequenceOptions.model_validate(DEEP)},
    "across": {"across_rows": 2, "layers": 3},
    "two streams": {"interaction": "two_streams"},
}
MORE_MODELS = {
    "default": {},
    "pffn": {"sequence": SequenceOptions(flow="n2s", personal="pffn", layer="hstu")},
    "dhen": {"interaction": "dhen"},
    "dcnv2": {"interaction": "dcnv2"},
}
ALL_MODELS = [*MODELS, *(pytest.param(name, marks=pytest.mark.proof) for name in MORE_MODELS)]


@pytest.fixture(scope="module")
def batches(lake: Lake) -> list[Batch]:
    reader = Reader.newest(lake, "behaviour", 64)
    ripened = Ripened(0, lake.spec.day_end(LAST))
    return [next(reader.batches([LAST], ripened, n, Shuffle(0))) for n in (64, 48)]


@pytest.fixture(params=ALL_MODELS)
def config(request: pytest.FixtureRequest) -> GemConfig:
    told = {"user_rows": 0, "item_dropout": 0.0} | (MODELS | MORE_MODELS)[request.param]
    return SCALES["tiny"].model_copy(update=told)


class Model:
    """A GEM and tables of one seed, computed as told."""

    def __init__(self, lake: Lake, config: GemConfig, options: ComputeOptions) -> None:
        reader = Reader.newest(lake, "behaviour", 64)
        torch.manual_seed(0)
        self.gem = Gem(reader.features, config)
        self.tables = PlainTables(table_rows(reader.features, 500), config.row_width)
        prepare(self.gem, options, backend="aot_eager")

    def logits(self, batch: Batch) -> torch.Tensor:
        torch.manual_seed(1)
        found = self.gem.find(batch)
        vectors = look_up(self.tables, batch, found.positions, first_items(500))
        return self.gem(batch, found, vectors).logits

    def learned(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits, and all gradients."""
        logits = self.logits(batch)
        logits.square().sum().backward()
        named = self.gem.named_parameters()
        return logits, {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("recompute", ["sequence", "blocks"])
def test_what_is_computed_once_more_is_the_same_to_the_last_bit(
    lake: Lake, config: GemConfig, batches: list[Batch], recompute: str
) -> None:
    """Dropout draws the same again; names of weights stay."""
    told = ComputeOptions.model_validate({"recompute": recompute})
    (logits, gradients), (again, others) = (
        Model(lake, config, options).learned(batches[0]) for options in (EAGER, told)
    )
    assert torch.equal(logits, again) and gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def kept(model: Model, batch: Batch) -> int:
    """Bytes that a forward pass leaves for the backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        model.logits(batch)
    return sum(sizes)


def test_less_is_kept_for_the_backward_pass(lake: Lake, batches: list[Batch]) -> None:
    config = SCALES["tiny"].model_copy(update=MODELS["deep"] | {"user_rows": 0})
    sizes = [
        kept(Model(lake, config, ComputeOptions.model_validate({"recompute": r})), batches[0])
        for r in ("nothing", "sequence", "blocks")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_compiled_blocks_are_compiled_once_for_all_sizes_of_a_batch(
    lake: Lake, config: GemConfig, batches: list[Batch]
) -> None:
    torch.compiler.reset()
    eager, compiled = (
        Model(lake, config, o) for o in (EAGER, ComputeOptions(compiled=True, recompute="blocks"))
    )
    for batch, stance in zip(batches, ("default", "fail_on_recompile"), strict=True):
        with torch.compiler.set_stance(stance):
            (logits, gradients), (again, others) = (m.learned(batch) for m in (eager, compiled))
        torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(others, gradients, atol=1e-3, rtol=1e-3)


def test_products_in_bf16_are_near_those_in_fp32(
    lake: Lake, config: GemConfig, batches: list[Batch]
) -> None:
    half = ComputeOptions(precision="bf16")
    (logits, gradients), (near, others) = (
        Model(lake, config, options).learned(batches[0]) for options in (EAGER, half)
    )
    assert near.dtype == torch.float32 and not torch.equal(logits, near)
    torch.testing.assert_close(near, logits, atol=0.05, rtol=0.05)
    together = [torch.cat([g.flatten() for g in told.values()]) for told in (gradients, others)]
    assert all(g.dtype == torch.float32 for g in others.values())
    assert torch.cosine_similarity(*together, dim=0) > 0.98
