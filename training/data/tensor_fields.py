"""Dataclasses of tensors that move to another device as a whole."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def map_tensors(value: T, transform: Callable[[Tensor], Tensor]) -> T:
    """The same structure of dataclasses, dicts and tuples with each tensor transformed.

    Whatever is no tensor, such as a NumPy array of ids, stays as it is.
    """
    mapped: Any = value
    if isinstance(value, Tensor):
        mapped = transform(value)
    elif isinstance(value, dict):
        mapped = {name: map_tensors(inner, transform) for name, inner in value.items()}
    elif isinstance(value, tuple):
        inner_values = [map_tensors(inner, transform) for inner in value]
        is_named = hasattr(value, "_fields")
        mapped = type(value)(*inner_values) if is_named else tuple(inner_values)
    elif is_dataclass(value) and not isinstance(value, type):
        inner_fields = {
            f.name: map_tensors(getattr(value, f.name), transform) for f in fields(value)
        }
        mapped = replace(value, **inner_fields)
    result: T = mapped
    return result


class TensorFields:
    """Base of dataclasses whose tensors are on one device."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same values on a device; from pinned memory the copy can overlap with computation."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same values in page-locked memory; DataLoader calls this, too."""
        return map_tensors(self, lambda tensor: tensor.pin_memory())
