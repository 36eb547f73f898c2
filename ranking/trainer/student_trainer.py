"""Trains a student on labels and on GEM's predictions, in one or several sessions.

O objectives, V versions of GEM.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.model import DataSpec
from features.schema import ITEM_TABLE
from ranking.distillation.losses import DistillationLoss
from ranking.registry.export import TrainingSnapshot
from ranking.registry.manifest import RankerTraining
from ranking.student.config import StudentTrainConfig
from ranking.student.model import Student
from ranking.student.trained import TrainedStudent
from ranking.trainer.nan_guard import non_finite_loss_error
from training.data.batch import Batch, NegativeSampling, Shuffle
from training.data.label_window import LabelWindow
from training.evaluation.predictions import Predictions, predict
from training.teacher.predictions import TeacherPredictions
from training.trainer.average import EmaModel
from training.trainer.step import per_objective

ITEM_WEIGHT = f"tables.tables.{ITEM_TABLE}.weight"
FIRST_PRETRAINING_EPOCH = 500  # numbers of epochs determine the order of their rows
OPTIMIZER, ADAPTER = "optimizer", "adapter"  # prefixes of names in the state


class StudentTrainer:
    """A student in training, with its loss, its optimizers and the EMA of its weights.

    `teacher_versions` are the GEMs whose predictions are learned, or were by the weights that the
    student started with. `newest_labels` (O) are the times, in epoch seconds, of the latest
    impressions whose labels were learned; 0 for none.
    """

    def __init__(
        self,
        student: TrainedStudent,
        config: StudentTrainConfig,
        teacher: TeacherPredictions | None,
    ) -> None:
        self.student, self.config = student, config
        reader = student.input_builder.reader
        self._rates = per_objective(
            config.negative_sampling_rate, reader.features.objectives, "--negative-sampling-rate"
        )
        self.loss = DistillationLoss.from_config(
            config.distillation,
            config.model.hidden[1],
            torch.tensor(self._rates).log(),
            teacher,
            require_extra_windows(reader.lake.spec) if config.mix_windows else (),
        )
        self.optimizers = self._build_optimizers()
        self.ema = EmaModel(student.student)
        self.teacher_versions = {*student.teacher_versions, *(teacher.versions if teacher else ())}
        self.newest_labels = torch.zeros(len(reader.features.objectives), dtype=torch.int64)
        self.num_trained_items = student.num_items

    def _build_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of dense weights, and that of tables unless they are frozen."""
        config, student = self.config, self.student
        heads = self.loss.heads.values()
        parameters = [*student.student.parameters(), *(p for h in heads for p in h.parameters())]
        dense = torch.optim.AdamW(
            [parameter for parameter in parameters if parameter.requires_grad],
            lr=config.dense_lr,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if not any(parameter.requires_grad for parameter in student.tables.parameters()):
            return [dense]
        return [dense, student.tables.optimizer(config.embedding_lr)]

    @property
    def averaged(self) -> TrainedStudent:
        """The student with averaged weights, in eval mode: what predicts and is served.

        Items that it has not learned yet are unknown to it.
        """
        module = cast(Student, self.ema.module)
        module.eval()
        averaged = TrainedStudent(
            module, self.student.tables, self.num_trained_items, self.student.input_builder
        )
        averaged.shared_gem = self.student.shared_gem
        averaged.teacher_versions = frozenset(self.teacher_versions)
        return averaged

    def pretrain(self, days: Sequence[date], window: LabelWindow) -> None:
        """Learn GEM's predictions alone, for the rows of a window; nothing without a teacher."""
        if self.loss.teacher is None:
            return
        self.student.student.train()
        for epoch in range(self.config.distillation.pretraining_epochs):
            for batch in self._epoch(days, window, FIRST_PRETRAINING_EPOCH + epoch):
                self._pretraining_step(batch)
        self.num_trained_items = self.student.num_items

    def train(self, days: Sequence[date], window: LabelWindow) -> None:
        """Train on the labels of a window, as many passes as configured."""
        self._train_epochs(days, window, range(self.config.epochs))
        self.num_trained_items = self.student.num_items

    def train_prequentially(self, days: Sequence[date], window: LabelWindow) -> Predictions:
        """Train like `train`; returns predictions of each example from before it was learned."""
        self.num_trained_items = self.student.num_items
        averaged, epochs = self.averaged, range(self.config.epochs)

        def predict_then_train(batch: Batch) -> Tensor:
            logits = averaged.logits(batch)
            with torch.enable_grad():
                self._step(batch)
            return logits

        first_epoch = self._epoch_with_progress(days, window, 0) if epochs else ()
        objectives = self.student.input_builder.reader.features.objectives
        predictions = predict(predict_then_train, first_epoch, objectives)
        self._train_epochs(days, window, epochs[1:])
        return predictions

    def _train_epochs(
        self, days: Sequence[date], window: LabelWindow, numbers: Iterable[int]
    ) -> None:
        for number in numbers:
            for batch in self._epoch_with_progress(days, window, number):
                self._step(batch)

    def _epoch_with_progress(
        self, days: Sequence[date], window: LabelWindow, number: int
    ) -> Iterator[Batch]:
        self.student.student.train()
        surfaces = ", ".join(self.student.input_builder.reader.surfaces)
        teacher_note = "labels only" if self.loss.teacher is None else "with a teacher"
        progress = tqdm(
            self._epoch(days, window, number),
            desc=f"{surfaces} student, {teacher_note}",
            unit="batch",
            disable=None,
        )
        for batch in progress:
            yield batch
            if self.loss.teacher_heads:
                scale = self.loss.gradient_balancer.scales.mean()
                progress.set_postfix(gem=f"x{scale:.2f}", refresh=False)

    def _epoch(self, days: Sequence[date], window: LabelWindow, number: int) -> Iterator[Batch]:
        position = self.student.input_builder.reader.features.position
        window = replace(
            window,
            mixes_windows=self.config.mix_windows,
            includes_swaps=position is not None and position.has_propensity,
        )
        if self.config.negative_sampling_rate:
            sampling = NegativeSampling(tuple(self._rates), self.config.seed)
            window = replace(window, negative_sampling=sampling)
        shuffle = Shuffle(self.config.seed * 1000 + number)
        reader = self.student.input_builder.reader
        yield from reader.batches(days, window, self.config.batch_rows, shuffle)

    def _pretraining_step(self, batch: Batch) -> None:
        self._zero_gradients()
        hidden, effects = self.student.hidden(batch), self.student.position_effects(batch)
        loss = self.loss.backward_on_teacher(hidden, self.student.student.head, batch, effects)
        self._update_weights(loss)

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _update_weights(self, loss: Tensor) -> None:
        """Update the weights and their EMA. Raises UserError if the loss is not finite."""
        if not loss.isfinite():
            raise non_finite_loss_error(self.student)
        for optimizer in self.optimizers:
            optimizer.step()
        self.ema.update_parameters(self.student.student)

    def _step(self, batch: Batch) -> None:
        self._zero_gradients()
        hidden, effects = self.student.hidden(batch), self.student.position_effects(batch)
        head = self.student.student.head
        loss = self.loss.backward(hidden, head, batch, effects)
        value_head = self.student.student.value_head
        if value_head is not None:
            value_loss = value_head.loss(hidden, batch)
            torch.autograd.backward(value_loss)
            loss = loss + value_loss.detach()
        served = head(hidden.detach()).detach() - self.loss.log_sampling_rate
        self.student.learn_position_effects(batch, served, self.config.epochs)
        self._update_weights(loss)
        times = batch.as_of[batch.request_index][:, None] * self._is_learned(batch)
        self.newest_labels = torch.maximum(self.newest_labels, times.amax(0))

    def _is_learned(self, batch: Batch) -> Tensor:
        """Whether each objective (B, O) is learned by the label of one of its windows."""
        is_learned = batch.label_mask
        if self.config.mix_windows:
            is_learned = is_learned.clone()
            spec = self.student.input_builder.reader.lake.spec
            for column, objective in enumerate(spec.extra_window_objectives):
                is_learned[:, objective] |= batch.extra_mask[:, column]
        return is_learned

    def snapshot(self, first_day: date, labels_until: int) -> TrainingSnapshot:
        """The record and the state of a training on all labels final by an epoch second."""
        reader = self.student.input_builder.reader
        names = reader.features.objectives
        record = RankerTraining(
            config=self.config,
            first_day=first_day,
            labels_until=labels_until,
            newest_labels=dict(zip(names, self.newest_labels.tolist(), strict=True)),
            table_versions=dict(reader.table_versions),
            teacher_versions=tuple(sorted(self.teacher_versions)),
            shared_gem=self.student.shared_gem,
            compressor_version=self.student.input_builder.teacher_embeddings.compressor_version,
        )
        return TrainingSnapshot(record, self.state_dict())

    def _modules(self) -> dict[str, nn.Module]:
        return {"student": self.student.student, "tables": self.student.tables, **self.loss.heads}

    def _optimizer_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The state of each trained parameter, by name."""
        optimizer_of = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for prefix, module in self._modules().items():
            for name, parameter in module.named_parameters():
                if parameter in optimizer_of:
                    yield f"{prefix}.{name}", optimizer_of[parameter].state[parameter]

    def state_dict(self) -> dict[str, Tensor]:
        """All that a later session needs to continue, by name.

        The correction of GEM is kept by version of GEM; its optimizer begins anew.
        """
        modules = self._modules() | {"ema": self.ema}
        state = {
            f"{prefix}.{name}": tensor.detach().clone()
            for prefix, module in modules.items()
            for name, tensor in module.state_dict().items()
        }
        for parameter, values in self._optimizer_states():
            for key, tensor in values.items():
                state[f"{OPTIMIZER}.{parameter}.{key}"] = tensor.clone()
        adapter = self.loss.adapter
        state["gradient_norms"] = self.loss.gradient_balancer.norms
        state["newest_labels"] = self.newest_labels
        if adapter and self.loss.teacher:
            corrections = torch.stack((adapter.slope.detach(), adapter.intercept.detach()), 1)
            for position, version in enumerate(self.loss.teacher.versions):
                state[f"{ADAPTER}.{version}"] = corrections[position].clone()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of an earlier session, which may know fewer items.

        New items start from the row of the unknown item. A state from before rankers predicted
        values continues with a new value head. Raises UserError if the state is of a student of
        another configuration.
        """
        self.num_trained_items = len(state[ITEM_WEIGHT])
        modules = self._modules() | {"ema": self.ema}
        state = _with_new_items(state, self.student.num_items)
        state = _new_value_head(modules) | state
        try:
            for prefix, module in modules.items():
                module.load_state_dict(_below(state, prefix))
        except RuntimeError as error:
            raise UserError(f"the state of the training does not fit: {error}") from None
        for parameter, values in self._optimizer_states():
            values.update(_below(state, f"{OPTIMIZER}.{parameter}"))
        adapter = self.loss.adapter
        self.loss.gradient_balancer.norms = state["gradient_norms"].float().view(2, -1)
        self.newest_labels = state["newest_labels"]
        if adapter and self.loss.teacher:
            for position, version in enumerate(self.loss.teacher.versions):
                correction = state.get(f"{ADAPTER}.{version}")
                if correction is not None:
                    adapter.slope[position], adapter.intercept[position] = correction


def require_extra_windows(spec: DataSpec) -> tuple[int, ...]:
    """The position of the objective of each extra window. Raises UserError if there is none."""
    if not spec.extra_window_objectives:
        raise UserError(
            "--mix-windows needs an objective with extra_windows in the spec, such as "
            "`conversion: {window: 3d, extra_windows: [1d]}`"
        )
    return spec.extra_window_objectives


def trained_parameters(state: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of the parameters that an optimizer has trained, in the state of a training."""
    start = f"{OPTIMIZER}."
    return frozenset(
        name.removeprefix(start).rpartition(".")[0] for name in state if name.startswith(start)
    )


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix and a dot, without it."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)
    }


def _new_value_head(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The state of the value heads of modules as they are, by name."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
        if "value_head." in name
    }


def _with_new_items(state: Mapping[str, Tensor], num_items: int) -> dict[str, Tensor]:
    """A state whose item table has `num_items` rows; new ones are copies of the unknown item's."""
    grown = dict(state)
    table = state[ITEM_WEIGHT]
    missing = num_items - len(table)
    grown[ITEM_WEIGHT] = torch.cat((table, table[:1].expand(missing, -1)))
    for name, tensor in state.items():
        if name.startswith(f"{OPTIMIZER}.{ITEM_WEIGHT}.") and tensor.dim():
            grown[name] = torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
    return grown
