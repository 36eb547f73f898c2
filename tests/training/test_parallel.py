"""Training on 2 and 4 processes equals training on one, and sends the bytes of the formula."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import SIMULATOR_SPEC
from etl.array_types import Float64
from etl.spec import load_spec
from etl.tables.lake import Lake
from features.schema import USER_TABLE, FeatureSchema, feature_schema
from tests.training.many import (
    ITEMS,
    SIZES,
    Parallelism,
    TrainingResult,
    run,
    some_batches,
    train,
    train_on_processes,
)
from training.data.batch import Batch
from training.data.synthetic import BatchShape, random_batch
from training.distributed.communication import expected_all_to_all_bytes
from training.distributed.dense import layers_to_shard, parallelize
from training.distributed.process_group import build_mesh, process_group
from training.model.config import SequenceOptions
from training.model.embeddings import TorchEmbeddingTables, item_row_map_up_to, table_sizes
from training.model.gem import Gem
from training.model.hyformer import HyFormerLayer
from training.model.interaction.token_mixing import MixerBlock
from training.model.interaction.wukong import WukongLayer
from training.trainer.average import EmaModel
from training.trainer.state import TABLE_AND_ROW_WISE
from training.trainer.step import GemModel

STEPS, ROW_BYTES = 3, 4 * SIZES.embedding_dim
MAX_NORM = 0.02  # below the norms of all steps
VARIANTS = {
    2: {
        "table-wise": Parallelism(),
        "row-wise": Parallelism(sharding_types=TABLE_AND_ROW_WISE),
        "two groups": Parallelism(replica_groups=2),
        "dense sharded": Parallelism(sharded=True),
        "clipped": Parallelism(max_norm=MAX_NORM),
        "dense sharded, clipped": Parallelism(sharded=True, max_norm=MAX_NORM),
        "dense sharded, hyformer": Parallelism(sharded=True, interaction="hyformer"),
        "dense sharded, rankmixer": Parallelism(sharded=True, interaction="rankmixer"),
    },
    4: {
        "table-wise": Parallelism(),
        "two groups": Parallelism(replica_groups=2),
        "four groups": Parallelism(replica_groups=4),
        "two groups, synchronized every third step": Parallelism(replica_groups=2, sync_every=3),
        "two groups, dense sharded": Parallelism(replica_groups=2, sharded=True),
    },
}
ALONE = {
    "clipped": Parallelism(max_norm=MAX_NORM),
    "hyformer": Parallelism(interaction="hyformer"),
    "rankmixer": Parallelism(interaction="rankmixer"),
}
EXACT = [
    (world, name)
    for world, variants in VARIANTS.items()
    for name, variant in variants.items()
    if variant.sync_every == 1
]
Results = dict[tuple[int, str], list[TrainingResult]]


@pytest.fixture(scope="module")
def batches(lake: Lake) -> tuple[FeatureSchema, list[Batch]]:
    return some_batches(lake, 4 * STEPS)


@pytest.fixture(scope="module")
def results(
    batches: tuple[FeatureSchema, list[Batch]], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Results by number of processes and variant; "one process" trains on the same batches."""
    features, all_batches = batches
    folder = tmp_path_factory.mktemp("parallel")
    by_variant = {}
    for world, variants in VARIANTS.items():
        steps = [all_batches[world * n : world * (n + 1)] for n in range(STEPS)]
        with process_group():
            by_variant[world, "one process"] = [train(features, steps, Parallelism(), 0, 1)]
            for name, alone in ALONE.items() if world == 2 else ():
                single = train(features, steps, alone, 0, 1)
                by_variant[world, f"one process, {name}"] = [single]
        of_variants = train_on_processes(
            features, steps, list(variants.values()), folder / f"{world}", world
        )
        for name, of_processes in zip(variants, of_variants, strict=True):
            by_variant[world, name] = of_processes
    return by_variant


@pytest.mark.parametrize(("world", "variant"), EXACT)
def test_several_processes_train_the_same_model_as_one(
    results: Results, world: int, variant: str
) -> None:
    name = variant.rpartition(", ")[2]
    kind = f"one process, {name}" if name in ALONE else "one process"
    (single,) = results[world, kind]
    assert single.losses[0] != single.losses[-1]
    for result in results[world, variant]:
        assert result.losses == pytest.approx(single.losses, rel=1e-5)
        for name, rows in single.tables.items():
            torch.testing.assert_close(result.tables[name], rows, rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_changes_the_steps(results: Results) -> None:
    (plain,), (clipped,) = results[2, "one process"], results[2, "one process, clipped"]
    assert plain.losses[0] == clipped.losses[0]
    assert plain.losses[2] != pytest.approx(clipped.losses[2], rel=1e-4)


def test_initial_tables_depend_on_the_seed_alone(results: Results) -> None:
    """Each process creates its own rows only; together they are those of one process."""
    (single,) = results[2, "one process"]
    assert single.initial["item_advertiser_id"].std() > 0
    assert not torch.equal(single.initial["item"][:8], single.initial["ctx_connection"])
    for of_processes in results.values():
        for result in of_processes:
            for name, rows in single.initial.items():
                assert torch.equal(result.initial[name], rows), name
                assert torch.equal(result.reset[name], single.reset[name]), name
                is_zero = name == USER_TABLE
                assert torch.equal(single.reset[name], rows) is is_zero, "drawn with another seed"


def test_replicas_are_equal_after_a_synchronization(results: Results) -> None:
    (single,) = results[4, "one process"]
    first, *others = results[4, "two groups, synchronized every third step"]
    for other in others:
        for name, rows in first.tables.items():
            torch.testing.assert_close(other.tables[name], rows, msg=name)
    differs = [not torch.allclose(first.tables[name], rows) for name, rows in single.tables.items()]
    assert any(differs), "local steps are not those of one process"


@pytest.mark.parametrize(
    ("world", "variant", "groups", "syncs"),
    [
        (2, "table-wise", 1, STEPS),
        (2, "two groups", 2, STEPS),
        (4, "table-wise", 1, STEPS),
        (4, "two groups", 2, STEPS),
        (4, "four groups", 4, STEPS),
        (4, "two groups, synchronized every third step", 2, 1),
    ],
)
def test_bytes_sent_are_those_of_the_formula(
    results: Results,
    batches: tuple[FeatureSchema, list[Batch]],
    world: int,
    variant: str,
    groups: int,
    syncs: int,
) -> None:
    """All-to-alls within a group send ids, rows and gradients.

    Between groups, each synchronization sends a byte per row (1 if it was looked up), and the rows
    that were looked up.
    """
    tables = table_sizes(batches[0], ITEMS, SIZES.user_hash_buckets)
    of_processes = results[world, variant]
    ids = sum(result.ids for result in of_processes)
    all_to_all = sum(result.bytes_sent.get("alltoall_base", 0) for result in of_processes)
    assert all_to_all == expected_all_to_all_bytes(
        world * STEPS, ids, len(tables), SIZES.embedding_dim, world // groups
    )
    dense = sum(result.bytes_sent["allreduce"] for result in results[world, "table-wise"])
    all_reduce = sum(result.bytes_sent["allreduce"] for result in of_processes)
    interval = STEPS // syncs
    sent = [
        groups * (sum(tables.values()) + ROW_BYTES * touched_rows(of_processes, first, interval))
        for first in range(0, STEPS, interval)
    ]
    assert all_reduce - dense == (sum(sent) if groups > 1 else 0)


def touched_rows(of_processes: Sequence[TrainingResult], first: int, steps: int) -> int:
    """The number of rows of all tables that any process looked up in some steps."""
    rows = {
        (name, row)
        for result in of_processes
        for touched in result.touched[first : first + steps]
        for name, ids in touched.items()
        for row in ids.tolist()
    }
    return len(rows)


def test_only_sharded_dense_weights_are_gathered(results: Results) -> None:
    replicated = results[2, "table-wise"][0].bytes_sent
    sharded = results[2, "dense sharded"][0].bytes_sent
    assert not any("gather" in name for name in replicated)
    assert any("gather" in name for name in sharded)


@pytest.mark.parametrize(
    ("interaction", "layer"),
    [("wukong", WukongLayer), ("hyformer", HyFormerLayer), ("rankmixer", MixerBlock)],
)
def test_each_layer_of_an_interaction_module_is_gathered_alone(
    batches: tuple[FeatureSchema, list[Batch]], interaction: str, layer: type[nn.Module]
) -> None:
    gem = Gem(batches[0], SIZES.model_copy(update={"interaction": interaction}))
    layers = {module for module in gem.interaction.modules() if isinstance(module, layer)}
    assert layers and layers <= set(layers_to_shard(gem))


def batch_of_users(features: FeatureSchema, seed: int) -> Batch:
    """Requests of their own users, most of whose events match the candidate."""
    batch = random_batch(features, BatchShape(2, 1, 60, ITEMS), seed)

    def few(ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: values % 3 for name, values in ids.items()}

    history = replace(batch.history, item_categorical=few(batch.history.item_categorical))
    as_of = torch.full_like(batch.as_of, 10**7 + seed)
    categorical = few(batch.row_categorical)
    return replace(batch, as_of=as_of, history=history, row_categorical=categorical)


def counts_of(
    features: FeatureSchema, steps: Sequence[Sequence[Batch]], sharded: bool, rank: int, world: int
) -> dict[str, Tensor]:
    """The buffers of a model after some steps; a process without a batch repeats its last one."""
    torch.manual_seed(0)
    sequence = SequenceOptions(next_action_weight=0.1)
    core = Gem(features, SIZES.model_copy(update={"sequence": sequence})).train()
    rows = table_sizes(features, ITEMS, SIZES.user_hash_buckets)
    tables = TorchEmbeddingTables(rows, SIZES.embedding_dim)
    dense = parallelize(core, EmaModel(core), build_mesh(1), sharded)
    items = item_row_map_up_to(ITEMS)
    model = GemModel(core, dense, tables, items, SIZES.user_hash_buckets)
    for number, step in enumerate(steps):
        own = step[rank::world] or [steps[number - 1][rank].as_padding()]
        for batch in own:
            model(batch).logits.sum().backward()
    return {name: buffer.clone() for name, buffer in core.named_buffers()}


def count_and_save(
    rank: int, world: int, features: FeatureSchema, steps: Sequence[Sequence[Batch]], folder: str
) -> None:
    """Save the buffers of one of several processes, with DDP and with FSDP."""
    init_method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method, rank=rank, world_size=world)
    torch.set_num_threads(1)
    buffers = [counts_of(features, steps, sharded, rank, world) for sharded in (False, True)]
    torch.save(buffers, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_statistics_are_those_of_the_batches_of_all_processes(tmp_path: Path) -> None:
    """All processes have the buffers of one process that reads all batches, and padding adds none.

    Frequencies of items decay with each batch, in another order.
    """
    features, world = feature_schema(load_spec(SIMULATOR_SPEC)), 4
    steps = [[batch_of_users(features, world * n + m) for m in range(world)] for n in range(STEPS)]
    steps[-1].pop()
    with process_group():
        expected = counts_of(features, steps, False, 0, 1)
    run(count_and_save, (world, features, steps, str(tmp_path)), world)
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    gaps = sum(x.sum() for name, x in expected.items() if name.endswith("gap_count"))
    assert gaps > 40 * world
    for buffers in itertools.chain.from_iterable(saved):
        for name, values in expected.items():
            rtol, atol = (1e-2, 0.0) if name.endswith("item_frequency.counts") else (1e-5, 1e-6)
            torch.testing.assert_close(buffers[name], values, rtol=rtol, atol=atol, msg=name)
    for first, *others in zip(*saved, strict=True):
        assert all(torch.equal(other[name], x) for other in others for name, x in first.items())


GRADIENTS = {"rare": (1.0, 0.0), "hot": (1.0, 1.0), "mixed": (1.0, 0.5)}  # by group


def adagrad_in_groups(gradients: Sequence[float], steps: int, scale: float) -> float:
    """Weight of a row after some steps, by the equations; each group has a constant gradient.

    Weights are averaged at each step, states one step late.
    """
    g = np.array(gradients)
    w, v = np.zeros(len(g)), np.zeros(len(g))
    sent: Float64 | None = None
    for _ in range(steps):
        v += g**2
        w -= g / (np.sqrt(v / scale) + 1e-12)
        w[:] = w.mean()
        if sent is not None:
            v += sent.mean() - sent
        sent = v.copy()
    return float(w[0])


@pytest.mark.parametrize("case", GRADIENTS)
def test_averaged_states_need_a_scale_between_one_and_the_number_of_groups(case: str) -> None:
    """Unscaled, steps of a rare row are sqrt(M) too small; scaled, those of a hot row too large."""
    gradients, steps, groups = GRADIENTS[case], 400, 2
    mean = sum(gradients) / groups
    expected = -sum(abs(mean) / math.sqrt(n * mean**2) for n in range(1, steps + 1))
    plain, scaled = (adagrad_in_groups(gradients, steps, c) / expected for c in (1.0, groups))
    assert scaled == pytest.approx(plain * math.sqrt(groups), rel=1e-6)
    ratio = {"rare": 1 / math.sqrt(2), "hot": 1.0, "mixed": 0.75 / math.sqrt(0.625)}[case]
    assert plain == pytest.approx(ratio, rel=0.05)
