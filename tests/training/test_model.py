"""GEM and its output heads, on batches of the small lake."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from etl.errors import UserError
from tests.conftest import LAST
from tests.training.conftest import all_labels
from training.data.batch import Batch, Shuffle
from training.data.reader import ExampleReader
from training.model.config import SCALES, SequenceOptions
from training.model.embeddings import (
    TorchEmbeddingTables,
    item_row_map_up_to,
    lookup_embeddings,
    table_sizes,
)
from training.model.gem import Gem, GemOutput
from training.model.heads import ObjectiveTowers
from training.model.history.events import PRIOR_EVENTS, TypeMeanSimilarity
from training.trainer.average import EmaModel

USERS = 64
TINY = SCALES["tiny"].model_copy(update={"user_hash_buckets": USERS})
Score = Callable[[Batch], torch.Tensor]

MODELS: dict[str, dict[str, object]] = {
    "default": {},
    "interformer": {"flow": "int", "cls_tokens": 1, "rotary": True, "pooling": "hsp"},
    "candidate": {
        "flow": "int",
        "context": "candidate",
        "max_events": 8,
        "cls_tokens": 1,
        "masknet": True,
        "target_attention": "activation_unit",
    },
    "event_groups": {
        "flow": "n2s",
        "layer": "hstu",
        "event_groups": {
            "ads": {"events": ["ad_click", "ad_view"], "width": 16, "layers": 2},
            "posts": {"events": ["post_view", "post_like"], "max_events": 5},
        },
    },
    "hyformer": {"num_layers": 2},
    "hyformer of candidates": {"flow": "int", "context": "candidate", "max_events": 8},
}


EXPERTS = dict.fromkeys(MODELS, "none") | {"hyformer": "ple"}


@pytest.fixture(scope="module", params=MODELS)
def score(reader: ExampleReader, request: pytest.FixtureRequest) -> Score:
    """Computes logits (B, O) with an untrained GEM whose heads differ by surface."""
    torch.manual_seed(0)
    sequence = SequenceOptions.model_validate(MODELS[request.param])
    interaction = "hyformer" if "hyformer" in request.param else TINY.interaction
    options = {"sequence": sequence, "interaction": interaction, "experts": EXPERTS[request.param]}
    gem = Gem(reader.features, TINY.model_copy(update=options)).eval()
    torch.nn.init.normal_(gem.heads.surface_weight)
    tables = TorchEmbeddingTables(
        table_sizes(reader.features, len(reader.items), USERS), TINY.embedding_dim
    )

    @torch.no_grad()
    def logits(batch: Batch) -> torch.Tensor:
        return output_of(gem, tables, reader, batch).logits

    return logits


def output_of(
    gem: Gem, tables: TorchEmbeddingTables, reader: ExampleReader, batch: Batch
) -> GemOutput:
    selection = gem.select_history(batch)
    items = item_row_map_up_to(len(reader.items))
    vectors = lookup_embeddings(tables, batch, selection.positions, items, user_buckets=USERS)
    output: GemOutput = gem(batch, selection, vectors)
    return output


def rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    """The same requests with fewer or reordered candidates."""
    per_row = (
        "request_index",
        "surface",
        "item_index",
        "row_numeric",
        "labels",
        "label_mask",
        "outcome_values",
    )
    return replace(
        batch,
        **{name: getattr(batch, name)[rows] for name in per_row},
        row_categorical={k: v[rows] for k, v in batch.row_categorical.items()},
        row_vectors={k: v[rows] for k, v in batch.row_vectors.items()},
        context_vectors={k: v[rows] for k, v in batch.context_vectors.items()},
        impression_ids=batch.impression_ids[rows.numpy()],
    )


def test_the_score_of_a_candidate_does_not_depend_on_other_candidates(
    batch: Batch, score: Score
) -> None:
    logits = score(batch)
    rows = torch.arange(0, len(batch), 3)
    torch.testing.assert_close(score(rows_of(batch, rows)), logits[rows], atol=2e-5, rtol=1e-4)


def test_scores_depend_on_the_surface_and_the_history(batch: Batch, score: Score) -> None:
    other = replace(batch, surface=batch.surface % 3 + 1)
    assert (score(batch) - score(other)).abs().max() > 1e-3
    history = replace(batch.history, types=batch.history.types % 8 + 1)
    assert (score(batch) - score(replace(batch, history=history))).abs().max() > 1e-5


def test_scores_without_history_and_of_unknown_items_are_finite(
    reader: ExampleReader, batch: Batch, score: Score
) -> None:
    no_history = ExampleReader(reader.lake, reader.table_versions, "behaviour", 0)
    window = all_labels(reader)
    empty = next(no_history.batches([LAST], window, 64, Shuffle(0)))
    assert len(empty.history.item_index) == 0
    assert score(empty).isfinite().all()
    assert score(replace(batch, item_index=batch.item_index + 10**6)).isfinite().all()


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_infinite_numbers_are_scored_like_missing_ones(
    batch: Batch, score: Score, infinity: float
) -> None:
    def filled(value: float) -> Batch:
        return replace(
            batch,
            row_numeric=torch.full_like(batch.row_numeric, value),
            user_numeric=torch.full_like(batch.user_numeric, value),
        )

    missing = score(filled(torch.nan))
    assert missing.isfinite().all() and torch.equal(score(filled(infinity)), missing)


def test_scores_with_one_event_and_of_one_row_are_finite(
    reader: ExampleReader, score: Score
) -> None:
    one_event = ExampleReader(reader.lake, reader.table_versions, "behaviour", 1)
    window = all_labels(reader)
    several = next(one_event.batches([LAST], window, 64, Shuffle(0)))
    single = next(one_event.batches([LAST], window, 1, Shuffle(0)))
    assert set(several.history.offsets.diff().tolist()) <= {0, 1}
    assert score(several).isfinite().all() and score(single).isfinite().all()


def test_a_surface_without_training_uses_the_shared_weights() -> None:
    heads = ObjectiveTowers(3, 2, 8, 4)
    h = torch.randn(1, 8).expand(4, -1)
    surface = torch.tensor([0, 1, 2, 3])
    before = heads(h, surface)
    assert (before == before[0]).all()
    torch.nn.init.normal_(heads.surface_weight.data[1:3])
    after = heads(h, surface)
    assert torch.equal(after[[0, 3]], before[[0, 3]])
    assert (after[1:3] - before[1:3]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5)], ids=["shared", "of each objective"])
def test_a_tower_is_a_network_of_one_objective_with_a_correction_by_surface(
    shape: tuple[int, ...],
) -> None:
    heads = ObjectiveTowers(surfaces=2, objectives=3, hidden=5, width=4)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    h, surface = torch.randn(shape), torch.arange(6) % 3
    logits = heads(h, surface)
    for row, objective in itertools.product(range(6), range(3)):
        hidden = h[row] if h.dim() == 2 else h[row, objective]
        tower = (hidden @ heads.weight[objective] + heads.bias[objective]).clamp(min=0)
        corrected = heads.out_weight[objective] + heads.surface_weight[surface[row], objective]
        constant = heads.out_bias[objective] + heads.surface_bias[surface[row], objective]
        torch.testing.assert_close(logits[row, objective], tower @ corrected + constant)


def test_numbers_reach_the_trunk_without_the_interaction(
    reader: ExampleReader, batch: Batch
) -> None:
    torch.manual_seed(0)
    gem = Gem(reader.features, TINY).eval()
    sizes = table_sizes(reader.features, len(reader.items), USERS)
    tables = TorchEmbeddingTables(sizes, TINY.embedding_dim)
    gem.interaction.register_forward_hook(lambda _module, _inputs, rows: torch.zeros_like(rows))
    logits = output_of(gem, tables, reader, batch).logits
    for name in ("row_numeric", "user_numeric"):
        changed = replace(batch, **{name: getattr(batch, name) + 1})
        others = output_of(gem, tables, reader, changed).logits
        assert (others - logits).abs().max() > 1e-4, name


def test_towers_start_at_the_base_rates_of_the_objectives() -> None:
    torch.manual_seed(0)
    heads, rates = ObjectiveTowers(3, 2, 8, 4), torch.tensor([0.3, 0.001])
    heads.start_from(torch.logit(rates))
    predicted = heads(0.01 * torch.randn(64, 8), torch.ones(64, dtype=torch.int64)).sigmoid()
    torch.testing.assert_close(predicted.mean(0), rates, rtol=0.3, atol=0)


@pytest.mark.parametrize("without", ["vectors", "similarity", "categorical", "numeric"])
def test_no_kind_of_feature_is_required(reader: ExampleReader, batch: Batch, without: str) -> None:
    """A spec may lack vectors, similarity attributes, categorical or numeric user features."""
    features, history = reader.features, batch.history
    if without == "vectors":
        features = replace(features, item=replace(features.item, vectors={}))
        batch = replace(batch, row_vectors={}, history=replace(history, item_vectors={}))
    elif without == "similarity":
        features = replace(features, similarity_columns=())
    elif without == "categorical":
        features = replace(features, user=replace(features.user, categorical={}))
        batch = replace(batch, user_categorical={})
    else:
        features = replace(features, user=replace(features.user, numeric=()))
        batch = replace(batch, user_numeric=batch.user_numeric[:, :0])
    gem = Gem(features, TINY)
    tables = TorchEmbeddingTables(
        table_sizes(features, len(reader.items), USERS), TINY.embedding_dim
    )
    output = output_of(gem, tables, reader, batch)
    assert output.logits.shape == batch.labels.shape and output.logits.isfinite().all()


def test_type_means_are_the_mean_items_of_each_event_type(batch: Batch) -> None:
    """With zero vectors as a prior; dwell and age count only once trained."""
    name, vectors = next(iter(batch.row_vectors.items()))
    similarity = TypeMeanSimilarity(name, vectors.shape[1], 9, vectors.shape[1])
    means = similarity.type_means(batch.history)
    history, offsets = batch.history, batch.history.offsets.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(offsets)):
        for event_type in range(1, 10):
            events = [i for i in range(start, stop) if history.types[i] == event_type]
            total = history.item_vectors[name][events].sum(0)
            mean = total / (len(events) + PRIOR_EVENTS)
            torch.testing.assert_close(means[request, event_type - 1], mean)


def test_a_candidate_along_the_mean_item_of_a_type_scores_above_zero_for_it(batch: Batch) -> None:
    name, vectors = next(iter(batch.row_vectors.items()))
    similarity = TypeMeanSimilarity(name, vectors.shape[1], 9, vectors.shape[1])
    torch.nn.init.eye_(similarity.project.weight)
    means = similarity.type_means(batch.history)[batch.request_index, 5]
    rows, scores = similarity(batch)
    assert rows.shape[:2] == scores.shape == (len(batch), 9)
    along = similarity(replace(batch, row_vectors={name: means})).scores
    opposed = similarity(replace(batch, row_vectors={name: -means})).scores
    has_events = means.abs().sum(1) > 0
    assert has_events.any() and (along[has_events, 5] > 0).all()
    torch.testing.assert_close(along, -opposed)


def test_the_moving_average_is_a_weighted_mean_of_past_weights() -> None:
    """It starts at the first weights and stays between its last value and the latest weights."""
    model = torch.nn.Linear(3, 2, bias=False)
    ema = EmaModel(model)
    averages = []
    for step in range(50):
        with torch.no_grad():
            model.weight.fill_(float(step))
        ema.update_parameters(model)
        weight: torch.Tensor = ema.module.state_dict()["weight"]
        averages.append(weight.mean().item())
    assert averages[0] == 0.0
    assert all(a < b < step for step, (a, b) in enumerate(itertools.pairwise(averages), 1))
    constant = EmaModel(torch.nn.Linear(3, 2))
    before = constant.module.state_dict()["weight"].clone()
    for _ in range(5):
        constant.update_parameters(constant.module)
    torch.testing.assert_close(constant.module.state_dict()["weight"], before)


def test_an_event_group_of_unknown_events_is_refused(reader: ExampleReader) -> None:
    sequence = SequenceOptions.model_validate(
        {"event_groups": {"ads": {"events": ["ad_click", "zap"]}}}
    )
    with pytest.raises(UserError, match="event-groups names zap; events of the spec are"):
        Gem(reader.features, TINY.model_copy(update={"sequence": sequence}))
