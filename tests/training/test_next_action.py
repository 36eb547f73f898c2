"""The next-action loss: items that are read as the unknown one are no targets."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import SHAPE, manifest_of
from etl.spec import load_spec
from features.schema import ITEM_TABLE
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.synthetic import random_batch
from training.distributed.process_group import process_group
from training.distributed.sharding import local_shards
from training.model.config import GemOptions, SequenceOptions
from training.model.embeddings import EmbeddingVectors, table_ids
from training.model.heads import FollowedEvents, NextActionLoss
from training.model.history.events import concat_item_vectors
from training.model.sequence.pyramid import EncodedEvents
from training.trainer.state import TrainState, build_train_state

CONFIG = TrainConfig(
    scale="tiny",
    item_table_rows=1024,
    model=GemOptions(sequence=SequenceOptions(next_action_weight=0.1)),
)
SHARPNESS = 1000.0


def state_of_item_vectors() -> TrainState:
    """A GEM in which the vector of an item's events depends on its row alone, with length 1."""
    state = build_train_state(manifest_of(load_spec(SIMULATOR_SPEC), CONFIG))
    nothing = torch.zeros(0, dtype=torch.int64)
    state.item_rows.update(torch.arange(1024), state.last_access.last_days[ITEM_TABLE], nothing, 0)
    for key, weight in state.tables.state_dict().items():
        if key.split(".")[-2] != ITEM_TABLE:
            for shard in local_shards(weight):
                shard.rows.zero_()
    projection = state.model.core.history.candidate_projection
    nn.init.zeros_(projection.bias)
    projection.register_forward_hook(lambda _module, _inputs, vectors: F.normalize(vectors, dim=1))
    return state


def item_batch(state: TrainState, known_share: float) -> Batch:
    """A random batch without content vectors, in which a share of the items has a row."""
    batch = random_batch(state.manifest.features, SHAPE)
    history = batch.history
    content = {name: torch.zeros_like(v) for name, v in history.item_vectors.items()}
    has_row = torch.rand(len(history.item_index)) < known_share
    items = history.item_index + torch.where(has_row, 16, CONFIG.item_table_rows)
    return replace(batch, history=replace(history, item_index=items, item_vectors=content))


def own_vectors(state: TrainState, batch: Batch) -> Tensor:
    """The vectors (P, W) of the events that are read, without dropout."""
    core = state.model.core
    positions = core.select_history(batch).positions
    ids = table_ids(batch, positions, state.item_rows, state.model.user_rows)
    vectors = EmbeddingVectors.of_batch(batch, state.tables(ids)).events
    content = {name: v[positions] for name, v in batch.history.item_vectors.items()}
    items = {name: vectors[name] for name in core.history.item_tables}
    projected: Tensor = core.history.candidate_projection(concat_item_vectors(items, content))
    return projected


@pytest.mark.parametrize("known_share", [1.0, 0.5])
@pytest.mark.parametrize("starts_early", [False, True], ids=["in the step", "started before"])
def test_perfect_queries_have_no_loss(starts_early: bool, known_share: float) -> None:
    """Some items are dropped at random, and some have no row."""
    with process_group():
        state = state_of_item_vectors()
        core, batch = state.model.core, item_batch(state, known_share)
        (module,) = core.history.next_action_losses
        own, targets = own_vectors(state, batch), []

        def perfect_queries(
            module: NextActionLoss,
            inputs: tuple[EncodedEvents, FollowedEvents, Tensor, Tensor, Tensor],
        ) -> tuple[EncodedEvents, FollowedEvents, Tensor, Tensor, Tensor]:
            _, sample, offsets, ids, vectors = inputs
            targets.append(int(sample.exist.sum()))
            next_vectors = own.roll(-1, 0)[: int(offsets[-1])]
            encoded = EncodedEvents(SHARPNESS * next_vectors, offsets, offsets)
            return encoded, sample, offsets, ids, vectors

        nn.init.eye_(module.get_parameter("query_projection.weight"))
        module.register_forward_pre_hook(perfect_queries)
        core.train()
        torch.manual_seed(0)
        lookup = state.start_lookup(batch) if starts_early else None
        loss = state.model(batch, lookup).next_action_loss
    assert loss is not None and loss.item() < 0.01
    followed = SHAPE.requests * (SHAPE.events_per_request - 1)
    assert 0 < targets[0] < min(0.9 * known_share * followed, 512)
