"""A batch moves to a device as a whole, and a step there has no value to wait for."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import _config as shape_config

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.device_readiness import HostSyncCounter, count_host_syncs
from benchmarks.system.gem_training import FixedSizes
from benchmarks.system.warm_start import manifest_of
from etl.spec import load_spec
from features.schema import FeatureSchema, feature_schema
from training.config import TrainConfig
from training.data.batch import Batch, batch_digest
from training.data.synthetic import BatchShape, random_batch
from training.distributed.process_group import process_group
from training.model.config import SCALES, GemOptions, SequenceOptions
from training.model.embeddings import (
    EmbeddingVectors,
    TorchEmbeddingTables,
    lookup_embeddings,
    table_sizes,
)
from training.model.gem import Gem
from training.model.history.encoder import history_selector
from training.ops.attention import AttentionKind, attention
from training.trainer.state import build_train_state

SHAPE, LARGER = BatchShape(6, 3, 40, 100), BatchShape(7, 2, 50, 100)
TINY = SCALES["tiny"].model_copy(update={"user_hash_buckets": 64})


@pytest.fixture(scope="module")
def features() -> FeatureSchema:
    return feature_schema(load_spec(SIMULATOR_SPEC))


def selected_batch(features: FeatureSchema) -> Batch:
    """A random batch with the events that a tiny model reads."""
    batch = random_batch(features, SHAPE)
    ids = batch.impression_ids.astype(str).astype(object)
    named = replace(batch, impression_ids=ids, request_ids=batch.user_ids)
    return history_selector(features, TINY).attach(named)


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors of nested dataclasses, dicts and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def test_all_of_a_batch_moves_to_a_device(features: FeatureSchema) -> None:
    batch = selected_batch(features)
    moved = batch.to("meta")
    before, after = list(tensors_in(batch)), list(tensors_in(moved))
    assert len(before) > 40 and {t.device.type for t in after} == {"meta"}
    assert [(t.shape, t.dtype) for t in before] == [(t.shape, t.dtype) for t in after]
    assert moved.impression_ids is batch.impression_ids and len(moved) == len(batch)


def test_a_batch_is_the_same_after_a_round_trip(features: FeatureSchema) -> None:
    batch = selected_batch(features)
    copies = [batch.to("cpu"), batch.to("cpu", non_blocking=True)]
    if torch.cuda.is_available():
        copies += [batch.pin_memory(), batch.to("cuda").to("cpu"), batch.pin_memory().to("cuda")]
    for copy in copies:
        pairs = zip(tensors_in(batch), tensors_in(copy.to("cpu")), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert batch_digest(copy.to("cpu")) == batch_digest(batch)
    assert batch_digest(replace(batch, selection=None)) == batch_digest(batch)


VALUE_READS: dict[str, Callable[[Tensor], object]] = {
    "_local_scalar_dense": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "index": lambda x: x[x > 1],
    "index_put_": lambda x: x.clone().__setitem__(x > 1, x.new_ones(())),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
}


@pytest.mark.parametrize("name", VALUE_READS)
def test_the_counter_sees_what_reads_a_value(name: str) -> None:
    with HostSyncCounter() as counter:
        VALUE_READS[name](torch.arange(4.0))
    assert counter.counts[name] == 1


def test_the_counter_does_not_see_what_reads_none() -> None:
    x, index = torch.arange(4.0), torch.tensor([0, 2])
    with HostSyncCounter() as counter:
        torch.where(x > 1, x[index].sum(), 0.0)
        torch.repeat_interleave(x, x.long(), output_size=6)
    assert not counter.counts


def activation_unit(**options: Any) -> GemOptions:
    sequence = SequenceOptions(target_attention="activation_unit", **options)
    return GemOptions(sequence=sequence)


NEXT_ACTION = GemOptions(sequence=SequenceOptions(next_action_weight=0.1, flow="int"))


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        FixedSizes(),
        TrainConfig(scale="tiny", model=NEXT_ACTION, item_table_rows=1024),
        TrainConfig(scale="tiny", model=activation_unit(cls_tokens=2), item_table_rows=1024),
        TrainConfig(scale="tiny", model=GemOptions(value_loss_weight=0.1), item_table_rows=1024),
    ],
    ids=["default", "fixed sizes", "next action, both directions", "activation unit", "values"],
)
def test_a_step_after_the_lookup_reads_no_value(
    features: FeatureSchema, config: TrainConfig
) -> None:
    with process_group():
        state = build_train_state(manifest_of(load_spec(SIMULATOR_SPEC), config))
        state.model.core.train()
        count_host_syncs(state, random_batch(features, SHAPE))  # builds the map of item rows
        assert not count_host_syncs(state, random_batch(features, LARGER, 1))


@pytest.mark.parametrize("context", ["request", "candidate"])
def test_candidates_are_paired_with_all_events_of_their_sequences(
    features: FeatureSchema, context: str
) -> None:
    """Those of the encoded sequences, with their CLS tokens."""
    model = activation_unit(cls_tokens=2, flow="n2s", context=context)
    config = TINY.model_copy(update=dict(model))
    gem, batch = Gem(features, config).eval(), random_batch(features, SHAPE)
    selection = gem.select_history(batch)
    (pairs,), (group,) = selection.target_pairs, selection.event_groups
    per_request = len(group) // len(batch.as_of) + 2
    own = context == "candidate"
    sequence = torch.arange(len(batch)) if own else batch.request_index
    expected = [
        (b, int(s) * per_request + k) for b, s in enumerate(sequence) for k in range(per_request)
    ]
    assert list(zip(pairs.query.tolist(), pairs.key.tolist(), strict=True)) == expected
    gem(*inputs_of(gem, features, SHAPE))


def inputs_of(
    gem: Gem, features: FeatureSchema, shape: BatchShape
) -> tuple[Batch, object, EmbeddingVectors]:
    torch.manual_seed(0)
    batch = random_batch(features, shape)
    selection = gem.select_history(batch)
    tables = TorchEmbeddingTables(table_sizes(features, 200, 64), gem.surface.embedding_dim)
    return batch, selection, lookup_embeddings(tables, batch, selection.positions, lambda i: i, 64)


def test_the_dense_model_is_one_graph_for_all_sizes(features: FeatureSchema) -> None:
    """With `fullgraph` a break of the graph is an error, and so is a second compilation.

    Sizes that are equal in one batch need not be in the next.
    """
    torch.compiler.reset()
    gem = Gem(features, TINY).eval()
    compiled = torch.compile(gem, dynamic=True, fullgraph=True, backend="eager")
    with (
        torch.no_grad(),
        shape_config.patch(  # type: ignore[attr-defined]
            use_duck_shape=False
        ),
    ):
        for shape, stance in ((SHAPE, "default"), (LARGER, "fail_on_recompile")):
            inputs = inputs_of(gem, features, shape)
            with torch.compiler.set_stance(stance):
                torch.testing.assert_close(compiled(*inputs).logits, gem(*inputs).logits)
    torch.compiler.reset()


KINDS = {
    "window": (AttentionKind(causal=True), 4, [5, 0, 19], [5, 0, 19]),
    "tiles": (AttentionKind("silu", causal=True), None, [5, 0, 19], [5, 0, 19]),
    "padded": (AttentionKind(), None, [2, 1, 2], [5, 3, 19]),
}


@pytest.mark.parametrize("name", KINDS)
def test_compiled_attention_equals_the_eager_one(name: str) -> None:
    kind, window, queries, keys = KINDS[name]
    q_offsets, kv_offsets = (torch.tensor([0, *x]).cumsum(0) for x in (queries, keys))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(n), 2, 8, generator=generator) for n in (queries, keys, keys))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, q_offsets, kv_offsets, kind, window).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients.append(torch.autograd.grad(function(*inputs), inputs))
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.compiler.reset()
