"""What is trained on what: the numbers that a plan starts from, of a YAML file."""

from pathlib import Path

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from etl.errors import UserError
from etl.spec.base import Strict


class Hardware(Strict):
    """A GPU and what joins it to others. Rates are those reached, not those sold.

    `inside` and `outside` are GB/s from one GPU to its node and beyond; a transfer to each peer
    begins after `message_us`. `overlap` is the share of communication that hides behind compute.
    """

    memory_gb: PositiveFloat
    tflops: PositiveFloat
    node: PositiveInt = 8
    inside: PositiveFloat
    outside: PositiveFloat
    message_us: float = Field(default=0.0, ge=0)
    overlap: float = Field(default=0.0, ge=0, le=1)


class Workload(Strict):
    """A model in training.

    `table_gb` of weights and optimizer state; `dense_m` million parameters beside them; `batch`
    examples a GPU and step, each of `mflop` forward and backward, which read `ids_kb` of ids and
    `rows_kb` of rows. `largest_shard` is the share of all look-ups that one shard gets, which no
    planner can split. In 2D, `group` GPUs hold the tables once, and replicas are averaged every
    `sync_every` steps.
    """

    table_gb: PositiveFloat
    dense_m: PositiveFloat
    batch: PositiveInt
    mflop: PositiveFloat
    ids_kb: PositiveFloat
    rows_kb: PositiveFloat
    largest_shard: float = Field(default=0.0, ge=0, le=1)
    group: PositiveInt = 256
    sync_every: PositiveInt = 1


class Scenario(Strict):
    """Both."""

    name: str
    hardware: Hardware
    workload: Workload


def load_scenario(path: Path) -> Scenario:
    """The scenario of a file; raises UserError with what is wrong in it."""
    if not path.is_file():
        raise UserError(f"{path}: no such scenario; shipped ones lie in conf/plans")
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    except ValidationError as error:
        told = (f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError("\n".join(told)) from None
