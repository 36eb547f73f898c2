"""The device of a run: resolved once, refused where it is missing, followed by everything."""

import pytest
import torch

from etl.errors import UserError
from features.schema import USER_TABLE
from training.distributed.device import process_device, resolve_device
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import (
    TorchrecTables,
    build_topology,
    local_shards,
    rowwise_adagrad_params,
    shard_tables,
)

ROWS = {"item": 3000, USER_TABLE: 50}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda: no CUDA device is available"):
        resolve_device("cuda")


def test_mesh_planner_and_tables_follow_the_device_of_the_group() -> None:
    with process_group():
        device = process_device()
        mesh = build_mesh(1, device)
        assert mesh.device_type == device.type == "cpu"
        assert build_topology(mesh).compute_device == device.type
        described = TorchrecTables(ROWS, 8, (USER_TABLE,))
        assert {weight.device.type for weight in described.parameters()} == {"meta"}
        first, same, other = (
            shard_tables(
                TorchrecTables(ROWS, 8, (USER_TABLE,)), mesh, rowwise_adagrad_params(0.1), seed=seed
            ).state_dict()
            for seed in (1, 1, 2)
        )
    for key, weight in first.items():
        (shard,), (equal,), (different,) = map(local_shards, (weight, same[key], other[key]))
        assert shard.rows.device == device and torch.equal(shard.rows, equal.rows)
        if USER_TABLE in key.split("."):
            assert not shard.rows.any()
        else:
            assert not torch.equal(shard.rows, different.rows)
            assert len(shard.rows.unique(dim=0)) == len(shard.rows)
            assert shard.rows.abs().max() <= 0.05 and abs(float(shard.rows.mean())) < 1e-3
