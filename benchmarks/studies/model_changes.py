"""Changes of GEM whose value is measured: rows of `gemline bench ablation`.

A row is the options that differ from the default, on each data set; a row for one data set alone
names event types of its spec. To add a row, add a line to CHANGES.
"""

from collections.abc import Mapping
from typing import Literal

Options = dict[str, object]
DataSet = Literal["simulated", "kuairand"]
DATA_SETS: tuple[DataSet, ...] = ("simulated", "kuairand")

ADS = ["ad_impression", "ad_view", "ad_long_view", "ad_click", "conversion"]
POSTS = ["post_view", "post_like", "message_sent", "post_purchase"]
SHOWN = ["impression", "view"]
OUTCOMES = ["click", "long_view", "like", "follow", "comment", "forward", "hate"]


def training(**options: object) -> dict[DataSet, Options]:
    """Options of training that differ from the default."""
    return dict.fromkeys(DATA_SETS, options)


def model(**options: object) -> dict[DataSet, Options]:
    """Options of the model that differ from the default."""
    return training(model=options)


def sequence(**options: object) -> dict[DataSet, Options]:
    """Options of the sequence encoder that differ from the default."""
    return model(sequence=options)


def event_groups(groups: Mapping[str, list[str]]) -> Options:
    """An encoder for each of several groups of event types."""
    options = {name: {"events": events} for name, events in groups.items()}
    return {"model": {"sequence": {"event_groups": options}}}


INTERACTIONS: dict[str, dict[DataSet, Options]] = {
    "Wukong alone": model(parallel_interaction=None),
    "Wukong alone, static projection": model(
        parallel_interaction=None, input_dependent_projection=False
    ),
    "Wukong: static projection": model(input_dependent_projection=False),
    "Wukong: cross-layer attention": model(cross_layer_rows=4),
    "Wukong: rows shrink": model(wukong_rows=[48, 32, 24]),
    "Wukong, DCNv2 beside": model(parallel_interaction="dcnv2"),
    "DCNv2": model(interaction="dcnv2"),
    "DCNv2 alone": model(interaction="dcnv2", parallel_interaction=None),
    "DHEN": model(interaction="dhen"),
    "two streams": model(interaction="finalmlp"),
    "RankMixer": model(interaction="rankmixer"),
    "RankMixer alone": model(interaction="rankmixer", parallel_interaction=None),
    "HyFormer": model(interaction="hyformer"),
    "MMoE": model(experts="mmoe"),
    "PLE": model(experts="ple"),
    "plain (MLP)": model(interaction="plain", parallel_interaction=None),
    "weak features share rows": model(low_cardinality_threshold=64),
    "rows of users": model(user_hash_buckets=2**17),
    "no biases": model(linear_biases=False),
    "BlockNorm": model(trunk_norm="block"),
    "SwishRMSNorm": model(trunk_norm="swish_rms"),
    "hard gates": model(hard_gates=True),
}
SEQUENCES: dict[str, dict[DataSet, Options]] = {
    "flow: sole": sequence(flow="sole"),
    "flow: s2n": sequence(flow="s2n"),
    "flow: n2s": sequence(flow="n2s"),
    "flow: int": sequence(flow="int"),
    "flow: int, PFFN": sequence(flow="int", personalization="pffn"),
    "flow: int, GDPA as its kernel": sequence(
        flow="int", gdpa_scale="weights", gdpa_activation="silu"
    ),
    "flow: int, hierarchical seed pooling": sequence(flow="int", pooling="hsp"),
    "flow: int, CLS rows": sequence(flow="int", cls_tokens=2),
    "flow: int, MaskNet": sequence(flow="int", masknet=True),
    "flow: int, 32 events": sequence(flow="int", max_events=32),
    "flow: int, 32 events of each candidate": sequence(
        flow="int", context="candidate", max_events=32
    ),
    "flow: int, computation skip": sequence(flow="int", computation_skip=True),
    "rotary time": sequence(rotary=True),
    "HSTU layers": sequence(layer="hstu"),
    "activation unit": sequence(target_attention="activation_unit"),
    "pyramid": sequence(pyramid_stride=4),
    "next-action loss": sequence(next_action_weight=0.1),
    "families of events": {
        "simulated": event_groups({"ads": ADS, "posts": POSTS}),
        "kuairand": event_groups({"shown": SHOWN, "outcomes": OUTCOMES}),
    },
}
TRAINING: dict[str, dict[DataSet, Options]] = {
    "1 pass": training(passes=1),
    "3 passes": training(passes=3),
    "no history": training(max_length=0),
    "32 events": training(max_length=32),
    "auxiliary objectives": model(auxiliary_weight=0.3),
    "losses without entropy": training(entropy_power=0),
    "Muon": training(dense_optimizer="muon"),
    "embeddings reset in each pass": training(reset_embeddings_each_pass=True),
    "a quarter of the negatives": training(
        negative_sampling_rate={"click": 0.25, "long_view": 0.25}
    ),
    "click, then conversion": {"simulated": {"model": {"esmm_parents": {"conversion": "click"}}}},
    "value head": {"simulated": {"model": {"value_loss_weight": 0.05}}},
}
PEERS: dict[str, dict[DataSet, Options]] = {
    "DIN": model(
        interaction="plain",
        parallel_interaction=None,
        sequence={"flow": "sole", "target_attention": "activation_unit"},
    ),
    "HSTU": model(
        interaction="plain", parallel_interaction=None, sequence={"layer": "hstu", "rotary": True}
    ),
}
CHANGES: Mapping[str, Mapping[DataSet, Options]] = INTERACTIONS | SEQUENCES | TRAINING | PEERS
