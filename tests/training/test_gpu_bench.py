"""The GPU benchmark works on any device, and says why it has no figures without a card."""

import pytest
import torch

from benchmarks.harness import BenchmarkResult
from benchmarks.system.gpu import dense_mfu, has_syncs, make_dense_step, measure_gpu
from benchmarks.system.model_blocks import count_flops
from training.config import ComputeConfig
from training.data.synthetic import BatchShape
from training.distributed.device import CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_each_figure_is_null_with_the_reason() -> None:
    result = BenchmarkResult("", ())
    measure_gpu(result)
    figures = {key for key in result.figures if not key.endswith("_reason")}
    assert {"gpu_mfu_base", "gpu_syncs_large", "gpu_attention_128_over_flex"} <= figures
    assert all(result.figures[key] is None for key in figures)
    assert {result.figures[f"{key}_reason"] for key in figures} == {"no CUDA device is available"}


def test_the_share_of_the_devices_rate_is_measured_on_the_cpu_too() -> None:
    step = make_dense_step("tiny", BatchShape(4, 2, 20, 100), CPU, ComputeConfig())
    assert 0 < dense_mfu(step, count_flops(step), CPU) < 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_the_host_does_not_wait_for_the_card_in_a_step() -> None:
    shape, device = BatchShape(4, 2, 20, 100), torch.device("cuda")
    step = make_dense_step("tiny", shape, device, ComputeConfig(precision="bf16"))
    step()  # compiles kernels
    assert not has_syncs(step)
