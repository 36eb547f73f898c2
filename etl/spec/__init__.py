"""The data spec: models of the YAML file that describes a user's data, and its loader."""

from etl.spec.load import load_spec
from etl.spec.model import DataSpec

__all__ = ["DataSpec", "load_spec"]
