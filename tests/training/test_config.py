"""Configuration of a training run: worker processes get the options of the command line."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from etl.cli.runner import parse_arguments
from etl.errors import UserError
from training.commands import GemArgs, worker_settings
from training.config import TrainConfig
from training.model.config import SCALES

BASE = {"spec": "s.yaml", "lake": "lake", "days": "2026-01-01"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {
        "scale": "tiny",
        "model": {
            "input_dependent_projection": False,
            "cross_layer_rows": 2,
            "wukong_rows": [9, 6],
        },
        "max_length": 0,
    },
    {"model": {"sequence": {"flow": "int", "rotary": True, "cls_tokens": 1, "num_layers": 3}}},
    {
        "model": {"esmm_parents": {"buy": "click"}},
        "objective_weights": {"buy": 2.0},
        "negative_sampling_rate": {"buy": 0.5},
    },
    {"scale": "tiny", "sizes": {"layers": 3, "event_width": 64}},
    {"model": {"sequence": {"event_groups": {"ads": {"events": ["a", "b"], "width": 8}}}}},
    {"embedding_ttl_days": None},
    {"model": {"parallel_interaction": None}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_worker_settings_parse_to_the_same_arguments(
    options: dict[str, Any], tmp_path: Path
) -> None:
    args = GemArgs.model_validate(BASE | options)
    file = tmp_path / "gem.yaml"
    file.write_text(yaml.safe_dump(worker_settings(args)))
    assert parse_arguments(GemArgs, ["--config", str(file)], "gem") == args


def test_event_groups_are_parsed_from_the_command_line() -> None:
    required = [word for name, value in BASE.items() for word in (f"--{name}", value)]
    flag = "--model.sequence.event-groups"
    args = parse_arguments(
        GemArgs, [*required, flag, "{clicks: {events: [click], layers: 3}}"], "gem"
    )
    group = args.model.sequence.event_groups["clicks"]
    assert group.events == ("click",) and group.layers == 3
    with pytest.raises((UserError, SystemExit)):
        parse_arguments(GemArgs, [*required, flag, "{clicks: {event: [click]}}"], "gem")


def test_model_options_are_combined_with_the_sizes_of_a_scale() -> None:
    config = TrainConfig.model_validate({"scale": "base", "model": OPTIONS[2]["model"]})
    assert config.gem_config.sequence.flow == "int"
    assert config.gem_config.embedding_dim == SCALES["base"].embedding_dim
    assert config.resume_invariants()["model"] == config.model.model_dump()


def test_sizes_replace_those_of_the_scale_and_no_others() -> None:
    config = TrainConfig(scale="base", width_multiplier=0.5, sizes={"layers": 5, "rank": 7})
    scaled = SCALES["base"].scaled_by(0.5)
    assert config.gem_config == scaled.model_copy(update={"layers": 5, "rank": 7})
    assert config.resume_invariants()["sizes"] == {"layers": 5, "rank": 7}


@pytest.mark.parametrize("sizes", [{"depth": 3}, {"layers": 0}, {"event_width": 30}], ids=str)
def test_sizes_that_no_model_has_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        TrainConfig.model_validate({"sizes": sizes})


def test_an_event_group_has_a_width_for_its_heads() -> None:
    groups = {"clicks": {"events": ["click"], "width": 30, "heads": 4}}
    with pytest.raises(ValidationError, match=r"event_groups\.clicks\.width is 30: .* of 8"):
        TrainConfig.model_validate({"model": {"sequence": {"event_groups": groups}}})
