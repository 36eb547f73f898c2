"""Vectors of attributes as matrices: numbers as they are, bags as counts scaled to length 1.

n rows, V values of all rows, W the width of an attribute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from etl.array_types import Float32, Int64


@dataclass(frozen=True)
class VectorColumn:
    """A stored attribute, of which a matrix is made for some rows at a time."""

    lists: pa.ListArray
    width: int

    def __getitem__(self, rows: Int64) -> Float32:
        """The vectors (n, W) of some rows (n)."""
        return vector_matrix(self.lists.take(pa.array(rows)), self.width)


def vector_matrix(lists: pa.ListArray, width: int) -> Float32:
    """A stored attribute as a matrix (n, W); null lists become zeros.

    Lists of integers are the buckets of the values of a bag. Other lists have `width` numbers, of
    which those that are not finite become zeros.
    """
    if pa.types.is_integer(lists.type.value_type):
        rows, buckets = lists.value_parent_indices(), lists.flatten()
        return bag_matrix(rows.to_numpy(), buckets.to_numpy(), (len(lists), width))
    matrix = np.zeros((len(lists), width), np.float32)
    matrix[lists.is_valid().to_numpy(zero_copy_only=False)] = (
        lists.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    )
    return np.nan_to_num(matrix, nan=0.0, posinf=0.0, neginf=0.0)


def bag_vector(buckets: Sequence[int], width: int) -> Float32:
    """The counts of a bag's values by bucket, scaled to length 1 (W); zeros if it is empty."""
    rows = np.zeros(len(buckets), np.int64)
    return bag_matrix(rows, np.array(buckets, np.int64), (1, width)).reshape(width)


def bag_matrix(rows: Int64, buckets: Int64, shape: tuple[int, int]) -> Float32:
    """Rows (n, W) of counts, scaled to length 1, from the row and the bucket of each value (V)."""
    matrix = np.zeros(shape, np.float32)
    np.add.at(matrix, (rows, buckets), 1)
    lengths = np.sqrt(np.einsum("nw,nw->n", matrix, matrix))
    matrix /= np.maximum(lengths, 1)[:, None]
    return matrix


def concat_vectors(vectors: Sequence[Float32], num_rows: int) -> Float32:
    """Matrices side by side (num_rows, sum of W), also if there are none."""
    return np.concatenate([np.zeros((num_rows, 0), np.float32), *vectors], 1)
