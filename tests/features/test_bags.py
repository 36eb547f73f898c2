"""Attributes with several values, and texts: equal encodings in Spark, by value and in matrices."""

import itertools
import string
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.spec.attributes import BagAttribute, MultiCategoricalAttribute, TextAttribute
from features.encoding.scalar import encode_bag, ngrams
from features.encoding.spark import encode_attribute
from features.encoding.vectors import VectorColumn, bag_vector, vector_matrix
from tests.oracle.bags import (
    QUERIES,
    hashed,
)

pytestmark = pytest.mark.spark

WORDS = TextAttribute(type="text", size=50, ngram_range=(1, 3))
CHARACTERS = TextAttribute(type="text", size=50, analyzer="char", ngram_range=(2, 4))
HASHED = MultiCategoricalAttribute(type="multi_categorical", size=5)
KNOWN = MultiCategoricalAttribute(type="multi_categorical", vocabulary=("a", "b"))
ASSIGNED = st.characters(exclude_categories=("Cs", "Cn", "Co"))
TEXTS = st.lists(st.none() | st.text(ASSIGNED | st.sampled_from(" -,a\u03a3\u2014"), max_size=20))
VALUES = st.lists(st.none() | st.lists(st.sampled_from(["a", "b", "c", "\u00e9", "long value"])))


@pytest.mark.parametrize("attribute", [WORDS, CHARACTERS])
@settings(max_examples=5)
@given(TEXTS)
def test_spark_encodes_texts_as_a_service_does(
    spark: SparkSession, attribute: TextAttribute, texts: list[str | None]
) -> None:
    check_encoding(spark, attribute, [*texts, *QUERIES], "string")


@pytest.mark.parametrize("attribute", [HASHED, KNOWN])
@settings(max_examples=5)
@given(VALUES)
def test_spark_encodes_several_values_as_a_service_does(
    spark: SparkSession, attribute: MultiCategoricalAttribute, values: list[list[str] | None]
) -> None:
    sets = [None if value is None else sorted(set(value)) for value in values]
    check_encoding(spark, attribute, sets, "array<string>")


def check_encoding(
    spark: SparkSession, attribute: BagAttribute, raw: Sequence[object], sql_type: str
) -> None:
    frame = spark.createDataFrame([(n, v) for n, v in enumerate(raw)], f"n int, raw {sql_type}")
    encoded = frame.withColumn("encoded", encode_attribute(attribute, F.col("raw"))).orderBy("n")
    for row in encoded.collect():
        assert (row["encoded"] is None) == (row["raw"] is None)
        assert (row["encoded"] or []) == sorted(encode_bag(attribute, row["raw"]))


def test_ngrams_are_of_words_in_lower_case_between_spaces_and_punctuation() -> None:
    text = "Red-SHOES,  red\u2014\u00c9T\u00c9!"
    words = ["red", "shoes", "red", "\u00e9t\u00e9"]
    pairs = [f"{a} {b}" for a, b in itertools.pairwise(words)]
    assert ngrams(TextAttribute(type="text", ngram_range=(1, 2)), text) == words + pairs
    of_two = TextAttribute(type="text", analyzer="char", ngram_range=(2, 2))
    assert ngrams(of_two, " a  bc\n") == ["a ", " b", "bc"]
    assert ngrams(of_two, string.punctuation) == []


@given(VALUES)
def test_a_matrix_has_the_vector_of_each_bag(values: list[list[str] | None]) -> None:
    """Vectors have length 1, or 0 without values; stored and live ones are equal."""
    bags = [None if value is None else encode_bag(HASHED, value) for value in values]
    lists = pa.array([[4], *bags], pa.list_(pa.int32())).slice(1)
    matrix = vector_matrix(lists, 5)
    backwards = np.arange(len(bags))[::-1]
    assert np.array_equal(VectorColumn(lists, 5)[backwards], matrix[::-1])
    for row, bag, value in zip(matrix, bags, values, strict=True):
        assert np.array_equal(row, bag_vector(bag or [], 5))
        assert np.isclose(np.linalg.norm(row), 1 if value else 0)
        assert np.allclose(row, hashed(set(value or ()), 5))
