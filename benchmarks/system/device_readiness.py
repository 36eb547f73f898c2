"""What would keep a GPU waiting in a training step, counted without one.

A host waits for a device where it reads a value (`.item()`), or a size that depends on values
(`nonzero`, boolean masks, `repeat_interleave` without `output_size`). Counted is a step after the
look-up of embeddings: forward, loss, backward, dense optimizer, averaged weights and metrics. Of
every CHECK_EVERY and READ_EVERY steps one reads losses and metrics; it is not counted. Kernels for
CPUs plan their tiles from offsets in memory, which is no wait.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from benchmarks.system.gem_training import FixedSizes
from benchmarks.system.warm_start import SHAPE, manifest_of, trained_gem
from etl.spec import load_spec
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.synthetic import random_batch
from training.distributed.process_group import process_group
from training.evaluation.metrics import PrequentialMetrics
from training.model.embeddings import EmbeddingTables, lookup_embeddings
from training.trainer.state import TrainState
from training.trainer.step import Loss, LossCheck, train_step
from training.trainer.trainer import CHECK_EVERY

VALUE_READS = {
    "_local_scalar_dense",
    "bincount",
    "masked_select",
    "nonzero",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
}


class HostSyncCounter(TorchDispatchMode):
    """Context manager that counts operations that make the host wait for a device, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operation, then run it."""
        name = func._schema.name.partition("::")[2]
        reads_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in VALUE_READS or reads_size or _has_mask(name, args):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation indexes with a boolean mask."""
    if not name.strip("_").removeprefix("unsafe_").startswith(("index", "index_put")):
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


@dataclass
class UncountedTables:
    """Embedding tables whose look-up no context manager sees: the kernels count steps on hosts."""

    tables: EmbeddingTables

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        with _disable_current_modes():
            return self.tables(ids)


def count_host_syncs(state: TrainState, batch: Batch) -> Counter[str]:
    """Operations of one training step on a batch, in which a host would wait for a GPU."""
    features, config = state.manifest.features, state.manifest.training
    loss = Loss.from_config(config, features)
    check, metrics = LossCheck(CHECK_EVERY), PrequentialMetrics(features, loss)
    model = replace(state.model, tables=UncountedTables(state.model.tables))
    selected = model.core.history.select_history.attach(batch)
    counter = HostSyncCounter()
    with counter:
        output = train_step(model, selected, len(batch), state.optimizer, loss, check)
        state.ema.update_parameters(state.model.core)
        metrics.update(output, selected)
    return counter.counts


def count_graph_breaks(state: TrainState, batch: Batch) -> int:
    """Places at which compilation of the dense model would return to Python."""
    model = state.model
    selection = model.core.select_history(batch)
    vectors = lookup_embeddings(
        model.tables, batch, selection.positions, model.item_rows, model.user_rows
    )
    torch.compiler.reset()
    explain = torch._dynamo.explain(model.core)
    breaks = int(explain(batch, selection, vectors).graph_break_count)
    torch.compiler.reset()
    return breaks


def measure_device_readiness(result: BenchmarkResult) -> None:
    """`host_syncs_per_step` and `graph_breaks`, each summed over the default and fixed sizes."""
    spec, syncs, breaks = load_spec(SIMULATOR_SPEC), Counter[str](), 0
    with process_group():
        for config in (TrainConfig(), FixedSizes()):
            state = trained_gem(manifest_of(spec, config))
            batch = random_batch(state.manifest.features, SHAPE)
            syncs += count_host_syncs(state, batch)
            breaks += count_graph_breaks(state, batch)
    result.record("host_syncs_per_step", syncs.total(), "")
    result.record("graph_breaks", breaks, "")
    names = ", ".join(syncs) or "none"
    result.rows.append(("waits for a device in a step", f"{syncs.total()}", names, "", "0"))
    result.rows.append(("graph breaks of the dense model", f"{breaks}", "", "", "0"))
