"""Attributes with several values, texts and vectors: in batches as in logs, and in a service."""

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from etl.array_types import Float64
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.attributes import TextAttribute
from etl.tables.lake import Lake
from features.encoding.scalar import ngrams
from ranking.feature_store.attributes import AttributeVersion, validate_version
from ranking.feature_store.consistency import check_consistency
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.feature_store.request import RankRequest, encode_context
from ranking.feature_store.storage import RecordLayout
from ranking.inputs.arrays import CandidateFeatures, RequestFeatures
from ranking.registry.export import export_ranker
from ranking.registry.ranker import load_ranker
from ranking.scoring.offsets import RankerCalibration
from ranking.student.config import InputLimits
from tests.oracle.bags import (
    build_bag_lake,
    generate_bag_records,
    hashed,
    impressions_by_id,
    version_before,
    write_bag_spec,
)
from tests.oracle.disorder import FIRST
from tests.oracle.later import change_future, model_inputs
from tests.oracle.log import Record, visible_ts
from tests.pipeline import TABLES, rows
from tests.ranking.conftest import FITTED, untrained_student
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

pytestmark = pytest.mark.spark

DAYS, LENGTH, DELAY = 2, 20, 30
LAST = FIRST + timedelta(days=DAYS - 1)
LIMITS = InputLimits(
    max_length=LENGTH, encoded_events=8, teacher_history_length=0, user_hash_buckets=0
)


@dataclass(frozen=True)
class Logs:
    """Raw logs, their records, and the tables."""

    records: list[Record]
    raw: Path
    lake: Lake


@pytest.fixture(scope="module")
def logs(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Logs:
    folder = tmp_path_factory.mktemp("bags")
    records = generate_bag_records(4, 60, DAYS)
    lake = build_bag_lake(folder, records, [(0, DAYS - 1)])
    return Logs(records, folder / "raw", lake)


def test_earlier_requests_read_nothing_of_later_records(logs: Logs, tmp_path: Path) -> None:
    """Also no values that attributes of users and items have later."""
    since = sorted(record["ingest"] for record in logs.records)[len(logs.records) // 2]
    changed = change_future(random.Random(4), logs.records, since, DELAY)
    lake = build_bag_lake(tmp_path, changed, [(0, DAYS - 1)], since)
    inputs, other_inputs = model_inputs(logs.lake), model_inputs(lake)
    impressions = impressions_by_id(logs.records).values()
    earlier = {r["imp"] for r in impressions if visible_ts(r, DELAY) < since} & inputs.keys()
    assert len(earlier) > 20
    assert {id_: inputs[id_] for id_ in earlier} == {id_: other_inputs[id_] for id_ in earlier}


@pytest.mark.proof
def test_any_split_of_days_and_order_of_records_gives_the_same_tables(
    logs: Logs, tmp_path: Path
) -> None:
    shuffled = random.Random(4).sample(logs.records, len(logs.records))
    by_day = build_bag_lake(tmp_path, shuffled, [(day, day) for day in range(DAYS)])
    for table in TABLES:
        assert rows(by_day, table) == rows(logs.lake, table), table


def test_a_service_reads_the_vectors_of_the_tables(logs: Logs, tmp_path: Path) -> None:
    lake, lengths = logs.lake, HistoryLengths("behaviour", LENGTH)
    store = build_feature_store(lake, tmp_path / "store", lake.spec.day_start(LAST), lengths)
    report = check_consistency(store, lake, LAST, LIMITS)
    store.close()
    assert report.num_requests > 20
    assert not report.mismatches


def test_models_read_what_the_logs_say(logs: Logs) -> None:
    """Vectors of requests and rows against the logs; those of users and items change over time."""
    lake, raw, declared = logs.lake, logs.raw, logs.lake.spec.attributes
    contexts = impressions_by_id(logs.records)
    reader = ExampleReader.latest(lake, max_length=5)
    item_ids = reader.items.item_ids.to_pylist()
    window = LabelWindow(0, 0, include_unlabelled=True)
    days = [FIRST, LAST]
    vectors: dict[str, list[list[float]]] = defaultdict(list)
    expected: dict[str, list[list[float]]] = defaultdict(list)
    for batch in reader.batches(days, window, 16, Shuffle(None), (0, 1)):
        for request, as_of in enumerate(batch.as_of.tolist()):
            user = version_before(raw, "user", batch.user_ids[request], as_of)
            expected["user_interests"].append(known_interests(user.get("interests", ())))
            expected["user_taste"].append(user.get("taste", [0, 0]))
        for row, request in enumerate(batch.request_index.tolist()):
            item_id = item_ids[batch.item_index[row]]
            item = version_before(raw, "item", item_id, int(batch.as_of[request]))
            tags = {*item.get("tags", "").split("|")} - {""}
            expected["item_tags"].append(hashed(tags, 4))
            title = ngrams(text_of(declared.item["title"]), item.get("title", ""))
            expected["item_title"].append(hashed(title, 16))
            context = contexts[batch.impression_ids[row]]
            words = ngrams(text_of(declared.context["query"]), context["query"] or "")
            expected["ctx_query"].append(hashed(words, 8))
            expected["ctx_filters"].append(hashed({*(context["filters"] or ())} - {""}, 16))
            expected["ctx_view"].append(context["view"] or [0, 0])
        for part in (batch.user_vectors, batch.row_vectors, batch.context_vectors):
            for name, matrix in part.items():
                vectors[name] += matrix.tolist()
    assert set(vectors) == set(expected)
    for name, values in expected.items():
        assert np.allclose(vectors[name], values, atol=1e-6), name
        assert len({tuple(v) for v in values}) > 2, f"{name} is nearly constant: proves nothing"


def known_interests(values: Iterable[str]) -> list[float]:
    """Counts of unknown values and of those in the vocabulary, as a vector of length 1."""
    vocabulary = ("red", "wool", "sale")
    counts = [float(sum(v not in vocabulary for v in {*values}))]
    counts += [float(word in {*values}) for word in vocabulary]
    return [n / (sum(m * m for m in counts) ** 0.5 or 1) for n in counts]


def text_of(attribute: object) -> TextAttribute:
    assert isinstance(attribute, TextAttribute)
    return attribute


def test_an_exported_ranker_reads_vectors_of_users_and_contexts(logs: Logs, tmp_path: Path) -> None:
    """Its programs equal the model, and other vectors give other scores."""
    reader = ExampleReader.latest(logs.lake, max_length=LENGTH, surfaces=("home",))
    window = LabelWindow(0, 0, include_unlabelled=True)
    batch = next(reader.batches([LAST], window, 30, Shuffle(None)))
    student = untrained_student(reader, 0)
    inputs = student.input_builder(batch)
    calibration = RankerCalibration(dict.fromkeys(logs.lake.spec.objectives, FITTED))
    ranker = load_ranker(export_ranker(tmp_path / "v1", student, calibration, inputs))

    def scores(requests: RequestFeatures, candidates: CandidateFeatures) -> Float64:
        probabilities = ranker.score(ranker.user_state(requests), candidates).probabilities
        return probabilities[inputs.candidate_index.mask]

    requests, candidates = inputs.requests, inputs.candidates
    expected = scores(requests, candidates)
    of_users = replace(requests, user_vectors=requests.user_vectors + 1)
    of_contexts = replace(candidates, context_vectors=candidates.context_vectors + 1)
    assert (scores(of_users, candidates) != expected).all()
    assert (scores(requests, of_contexts) != expected).all()
    with torch.no_grad():
        changed = replace(batch, user_vectors={n: v + 1 for n, v in batch.user_vectors.items()})
        difference = student.logits(changed) - student.logits(batch)
    assert (difference != 0).all()


@pytest.fixture
def layout(tmp_path: Path) -> RecordLayout:
    return RecordLayout.from_spec(load_spec(write_bag_spec(tmp_path)))


def test_contexts_are_encoded_by_candidate(layout: RecordLayout) -> None:
    contexts: list[dict[str, object]] = [
        {"query": "Hat, hat"},
        {"filters": ["new", "new"], "view": [1.0, 2.0]},
        {},
    ]
    request = RankRequest("u", "home", ["a", "b", "c"], contexts)
    encoded = encode_context(layout.spec, layout.features.context, request, 0)
    query, filters = hashed(["hat", "hat", "hat hat"], 8), hashed(["new"], 16)
    assert list(layout.features.context.vectors) == ["ctx_filters", "ctx_query", "ctx_view"]
    assert np.allclose(encoded.vectors[0], [*[0] * 16, *query, 0, 0])
    assert np.allclose(encoded.vectors[1], [*filters, *[0] * 8, 1, 2])
    assert not encoded.vectors[2].any()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"interests": "red"}, "interests of the user is 'red'; it is a list of strings"),
        ({"interests": [1]}, "interests of the user is \\[1\\]; it is a list of strings"),
        ({"taste": ["red", "wool"]}, "taste of the user is .*; it is a list of 2 numbers"),
        ({"taste": [1.0]}, "taste of the user is .*; it is a list of 2 numbers"),
    ],
)
def test_values_of_another_type_are_refused(
    layout: RecordLayout, attributes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate_version(layout, "user", AttributeVersion("u", 1, attributes))


def test_a_query_that_is_not_a_text_is_refused(layout: RecordLayout) -> None:
    request = RankRequest("u", "home", ["a"], {"query": ["red"]})
    with pytest.raises(UserError, match=r"query of the context is .*; it is a string"):
        encode_context(layout.spec, layout.features.context, request, 0)
