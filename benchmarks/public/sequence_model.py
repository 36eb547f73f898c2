"""A model of a user's earlier events and a candidate item, built from GEM's blocks.

B rows, E events of C chunks, n embeddings per row, d embedding width, W event width, M numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.fit import BinaryClassifier
from benchmarks.public.quantile_encoding import ROWS, SEGMENTS, QuantileEmbedding
from benchmarks.public.sequence_data import POSITIVE, UNKNOWN, Attribute, InteractionLog
from benchmarks.public.sequence_features import SequenceBatch
from benchmarks.public.tabular_models import InteractionStream
from training.model.config import GemConfig
from training.model.numeric import NumericEmbedding
from training.model.sequence.layers import TransformerLayer
from training.model.sequence.target_attention import LinearItemAttention, TargetAttention
from training.ops.ragged import concat_ranges

INIT_STD = 0.1  # products of smaller embeddings are too small to learn from
DEFAULT_CONFIG = GemConfig(
    layers=2, fm_rows=16, linear_rows=16, rank=8, dropout=0.2, heads=4, item_dropout=0.1
)
STREAMS = (DEFAULT_CONFIG, DEFAULT_CONFIG.model_copy(update={"interaction": "finalmlp"}))
NORM_EPS = 1e-2  # limits the scaling of embeddings with a small variance
MEAN_WINDOWS = (8, 64, 2**30)  # most recent events over which means are taken
PRIOR_EVENTS = 3.0  # zero events that shrink the means of short histories


class AttributeEmbedding(nn.Module):
    """The mean embedding of an entity's values of an attribute."""

    values: Tensor
    offsets: Tensor

    def __init__(self, attribute: Attribute, width: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.from_numpy(attribute.values), persistent=False)
        self.register_buffer("offsets", torch.from_numpy(attribute.offsets), persistent=False)
        self.table = nn.EmbeddingBag(attribute.num_values, width, mode="mean")
        nn.init.normal_(self.table.weight, std=INIT_STD)

    def forward(self, entities: Tensor) -> Tensor:
        """Entity codes (N) to embeddings (N, d)."""
        first = self.offsets[entities]
        positions, offsets = concat_ranges(first, self.offsets[entities + 1] - first)
        embeddings: Tensor = self.table(self.values[positions], offsets[:-1])
        return embeddings


class EntityEmbedding(nn.Module):
    """Embeddings of an entity's id and of each of its attributes."""

    def __init__(self, size: int, attributes: dict[str, Attribute], width: int) -> None:
        super().__init__()
        self.id_embedding = nn.Embedding(size, width)
        nn.init.normal_(self.id_embedding.weight, std=INIT_STD)
        self.attributes = nn.ModuleList(AttributeEmbedding(a, width) for a in attributes.values())
        self.rows = 1 + len(attributes)

    @property
    def tables(self) -> list[Tensor]:
        """The weights of all embeddings."""
        return list(self.parameters())

    def forward(self, index: Tensor, entity: Tensor) -> Tensor:
        """Vocabulary indexes and entity codes, both (N), to embeddings (N, rows, d)."""
        entities, position = torch.unique(entity, return_inverse=True)
        attributes = (embedding(entities)[position] for embedding in self.attributes)
        return torch.stack((self.id_embedding(index), *attributes), 1)


class LabeledEventTokenizer(nn.Module):
    """Event tokens (E, W): the item, its label, and the numbers of user and item at that time."""

    def __init__(self, item_width: int, num_features: int, width: int) -> None:
        super().__init__()
        self.item = nn.Linear(item_width, width)
        self.label = nn.Embedding(1 + POSITIVE, width)
        self.numeric = NumericEmbedding([0] * num_features, width, SEGMENTS)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:
        """Items (E, n d), labels (E) and numbers (E, M) to (E, W)."""
        token = self.item(items) + self.label(labels) + self.numeric(numbers).rows[:, 0]
        normalized: Tensor = self.norm(token + self.mlp(token))
        return normalized


class CandidateHistoryEncoder(nn.Module):
    """A user's earlier events relative to a candidate, as embeddings (B, n, d)."""

    def __init__(self, item_width: int, num_features: int, config: GemConfig) -> None:
        super().__init__()
        w, d = config.event_width, config.embedding_dim
        self.tokenizer = LabeledEventTokenizer(item_width, num_features, w)
        self.layers = nn.ModuleList(
            TransformerLayer(w, config.heads, config.window, w) for _ in range(config.event_layers)
        )
        self.target = TargetAttention(w, config.heads)
        self.affinity = LinearItemAttention(item_width, w, config.heads)
        self.mean = nn.Linear(w, d)
        self.out = nn.Linear(w, d)
        self.rows = 3 + len(MEAN_WINDOWS)

    def forward(self, batch: SequenceBatch, candidates: Tensor, items: Tensor) -> Tensor:
        """Items of candidates (B, n d) and of events (E, n d) to embeddings (B, rows, d)."""
        tokens = self.tokenizer(items, batch.labels, batch.events.numeric)
        events = tokens
        for layer in self.layers:
            events = layer(events, batch.offsets)
        visible = batch.chunk, batch.offsets, batch.visible_events
        summaries = (
            self.target(self.tokenizer.item(candidates), events, *visible),
            self.affinity(candidates, items, tokens, *visible),
            _last_visible_event(batch, events),
        )
        means = self._window_means(batch, events)
        return torch.cat((self.out(torch.stack(summaries, 1)), means), 1)

    def _window_means(self, batch: SequenceBatch, events: Tensor) -> Tensor:
        """Means over the latest events of each of MEAN_WINDOWS that a row sees (B, windows, d)."""
        sums = F.pad(self.mean(events).double().cumsum(0), (0, 0, 1, 0))
        first = batch.offsets[batch.chunk][:, None]
        stop = first + batch.visible_events[:, None]
        begin = torch.maximum(first, stop - torch.tensor(MEAN_WINDOWS))
        return ((sums[stop] - sums[begin]) / (stop - begin + PRIOR_EVENTS)[..., None]).float()


class SequentialRanker(BinaryClassifier):
    """A sum of logits: a linear logit, and one per interaction stream.

    `edges` (M, T + 1) are the quantiles of the numbers.
    """

    def __init__(
        self, log: InteractionLog, edges: Tensor, base_config: GemConfig = DEFAULT_CONFIG
    ) -> None:
        super().__init__()
        d = base_config.embedding_dim
        users, items = (log.num_users, log.user_attributes), (log.num_items, log.item_attributes)
        self.users, self.items = EntityEmbedding(*users, d), EntityEmbedding(*items, d)
        self.user_linear, self.item_linear = EntityEmbedding(*users, 1), EntityEmbedding(*items, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.numeric = QuantileEmbedding(edges, d, base_config.mlp_width)
        self.history = CandidateHistoryEncoder(self.items.rows * d, len(edges), base_config)
        rows = self.users.rows + self.items.rows + ROWS + self.history.rows
        self.norm = nn.LayerNorm(d, eps=NORM_EPS)
        self.streams = nn.ModuleList(InteractionStream(rows, config) for config in STREAMS)
        self.item_dropout = base_config.item_dropout

    @property
    def embeddings(self) -> list[Tensor]:
        """Weights of single feature values, which memorize."""
        modules = (self.users, self.items, self.user_linear, self.item_linear)
        return [table for module in modules for table in module.tables]

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Logits (B) of a batch."""
        rows, events = batch.rows, batch.events
        index = rows.item
        if self.training:
            index = torch.where(torch.rand(len(index)) < self.item_dropout, UNKNOWN, index)
        candidates = self.items(index, rows.item_code)
        event_items = self.items(events.item, events.item_code)
        embeddings = (
            self.users(rows.user, rows.user_code),
            candidates,
            self.numeric(rows.numeric),
            self.history(batch, candidates.flatten(1), event_items.flatten(1)),
        )
        x = self.norm(torch.cat(embeddings, 1)).transpose(0, 1).contiguous()
        user_logit = self.user_linear(rows.user, rows.user_code).sum((1, 2))
        item_logit = self.item_linear(index, rows.item_code).sum((1, 2))
        stream_logits = torch.stack([stream(x) for stream in self.streams]).sum(0)
        logits: Tensor = self.bias + user_logit + item_logit + stream_logits
        return logits


def _last_visible_event(batch: SequenceBatch, events: Tensor) -> Tensor:
    """The most recent event that each row sees (B, W), zeros if there is none."""
    position = batch.offsets[batch.chunk] + batch.visible_events  # from 1: 0 is the padding
    return F.pad(events, (0, 0, 1, 0))[torch.where(batch.visible_events > 0, position, 0)]
