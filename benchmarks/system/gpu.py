"""GEM's dense part and its attention kernels on a GPU; without one, null with the reason.

MFU is the FLOP rate of forward, backward and update of the dense part, in bf16, over that of a
large matrix product on the same card. Attention is causal softmax over equal sequences, forward and
backward, beside PyTorch's SDPA and FlexAttention.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import RESULTS, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.system.model_blocks import count_flops
from etl.spec import load_spec
from features.schema import feature_schema
from training.config import ComputeConfig
from training.data.synthetic import BatchShape, random_batch
from training.data.tensor_fields import map_tensors
from training.distributed.device import CPU
from training.model.config import SCALES, Scale
from training.model.embeddings import (
    TorchEmbeddingTables,
    item_row_map_up_to,
    lookup_embeddings,
    table_sizes,
)
from training.model.gem import Gem
from training.model.history.encoder import history_selector
from training.ops.attention import CAUSAL
from training.precision.precision_map import PrecisionMap
from training.trainer.compute import apply_compute_config
from training.trainer.throughput import peak_flops, synchronize

SHAPES: Mapping[Scale, BatchShape] = {
    "base": BatchShape(2048, 8, 512, 10_000),
    "large": BatchShape(1024, 8, 512, 10_000),
}
SEQUENCES, LENGTH, HEADS = 32, 1024, 8
HEAD_WIDTHS = (64, 128)
WARM_UP, ROUNDS, STEPS = 3, 5, 4
CUDA = torch.device("cuda")
PEERS = ("sdpa", "flex")


def measure_gpu(result: BenchmarkResult) -> None:
    """`gpu_mfu_SCALE`, `gpu_syncs_SCALE` and `gpu_attention_WIDTH_over_PEER`, a ratio of seconds.

    `gpu_mfu_SCALE_compiled` is with `--compute.compiled`. `gpu_syncs_SCALE` is whether the host
    waits for the card in a step, as CUDA's debug mode sees.
    """
    has_card = torch.cuda.is_available()
    reason = "" if has_card else "no CUDA device is available"
    for scale in SHAPES:
        eager, compiled, syncs = measure_scale(scale) if has_card else (None, None, None)
        result.record(f"gpu_mfu_{scale}", eager, reason)
        result.record(f"gpu_mfu_{scale}_compiled", compiled, reason)
        result.record(f"gpu_syncs_{scale}", syncs, reason)
    for width in HEAD_WIDTHS:
        ratios = attention_ratios(width) if has_card else dict.fromkeys(PEERS)
        for peer, ratio in ratios.items():
            result.record(f"gpu_attention_{width}_over_{peer}", ratio, reason)
    if has_card:
        save_of_card(result)


def measure_scale(scale: Scale) -> tuple[float, float, bool]:
    """MFU of a scale, MFU with compiled layers, and whether the host waits in a step."""
    eager, compiled = (
        make_dense_step(
            scale, SHAPES[scale], CUDA, ComputeConfig(precision="bf16", compiled=is_compiled)
        )
        for is_compiled in (False, True)
    )
    flops = count_flops(eager)  # without those of attention
    return dense_mfu(eager, flops, CUDA), dense_mfu(compiled, flops, CUDA), has_syncs(eager)


def save_of_card(result: BenchmarkResult) -> None:
    """Save the figures, with the name of the card, where the documentation shows them."""
    card = torch.cuda.get_device_name()
    study = BenchmarkResult(f"GEM on one {card}", ("key", "value"))
    study.figures = {key: v for key, v in result.figures.items() if key.startswith("gpu_")}
    study.rows = [(key, f"{value:.3g}") for key, value in study.figures.items()]
    study.save_study(RESULTS / "gpu.json", "gemline bench model --only gpu")


def dense_mfu(step: Callable[[], object], flops: float, device: torch.device) -> float:
    """The share of the device's rate of matrix products that steps of some FLOPs reach."""
    dtype = torch.float32 if device == CPU else torch.bfloat16
    return float(flops / seconds_of(step, device) / peak_flops(device, dtype))


def has_syncs(step: Callable[[], object]) -> bool:
    """Whether the host waits for the card during a step."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False


def make_dense_step(
    scale: Scale,
    shape: BatchShape,
    device: torch.device,
    compute: ComputeConfig,
    precision_map: PrecisionMap | None = None,
) -> Callable[[], object]:
    """Forward, backward and update of the dense part, on vectors that were looked up before."""
    features, config = feature_schema(load_spec(SIMULATOR_SPEC)), SCALES[scale]
    batch = history_selector(features, config).attach(random_batch(features, shape))
    core = Gem(features, config)
    rows = table_sizes(features, shape.items, config.user_hash_buckets)
    vectors = lookup_embeddings(
        TorchEmbeddingTables(rows, config.embedding_dim),
        batch,
        core.select_history(batch).positions,
        item_row_map_up_to(shape.items),
        config.user_hash_buckets,
    )
    vectors = map_tensors(vectors, lambda x: x.detach().to(device).requires_grad_())
    batch, core = batch.to(device), core.to(device)
    apply_compute_config(core, compute, precision_map)
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    selection = core.select_history(batch)

    def step() -> None:
        logits = core(batch, selection, vectors).logits
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a step over ROUNDS rounds of STEPS steps, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / STEPS)
    return median(seconds)


def attention_ratios(width: int) -> dict[str, float]:
    """The seconds of the kernels here over those of each peer, forward and backward, in bf16."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from training.ops.attention.triton import attention

    rows = [
        torch.randn(SEQUENCES * LENGTH, HEADS, width, device=CUDA, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    padded = [x.unflatten(0, (SEQUENCES, LENGTH)).transpose(1, 2).contiguous() for x in rows]
    offsets = torch.arange(SEQUENCES + 1, device=CUDA) * LENGTH

    def is_causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(is_causal, None, None, LENGTH, LENGTH, device="cuda")
    compiled = torch.compile(flex_attention)
    own = _seconds_of_attention(lambda q, k, v: attention(q, k, v, offsets, offsets, CAUSAL), rows)
    sdpa = _seconds_of_attention(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), padded
    )
    flex = _seconds_of_attention(lambda q, k, v: compiled(q, k, v, block_mask=mask), padded)
    return {"sdpa": own / sdpa, "flex": own / flex}


def _seconds_of_attention(function: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn_like(function(*leaves).detach())
    return seconds_of(lambda: torch.autograd.grad(function(*leaves), leaves, grad), CUDA)
