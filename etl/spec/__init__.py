"""The data spec: the one file that describes a user's data, and what is derived from it."""

from etl.spec.load import load_spec
from etl.spec.model import DataSpec

__all__ = ["DataSpec", "load_spec"]
