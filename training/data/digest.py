"""The bytes of a batch as one number, to tell whether a batch was rebuilt as it was."""

import hashlib
from dataclasses import fields

import numpy as np
import torch

from training.data.batch import Batch, History


def digest(batch: Batch) -> str:
    """SHA-256 of all arrays of a batch, in the order of its fields."""
    sha = hashlib.sha256()
    _add(sha, batch)
    return sha.hexdigest()


def _add(sha: "hashlib._Hash", value: object) -> None:
    if isinstance(value, torch.Tensor):
        array = value.contiguous().numpy()
        sha.update(f"{array.dtype}{array.shape}".encode())
        sha.update(array.tobytes())
    elif isinstance(value, np.ndarray):
        sha.update("\x1f".join(value).encode())
    elif isinstance(value, dict):
        for name, inner in value.items():
            sha.update(name.encode())
            _add(sha, inner)
    else:
        assert isinstance(value, Batch | History)
        for field in fields(value):
            _add(sha, getattr(value, field.name))
