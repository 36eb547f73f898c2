"""Laws of a training run's configuration: what processes are told is what was asked for."""

from pathlib import Path

import pytest
import yaml

from etl.cli import parse
from etl.errors import UserError
from training.commands import GemArgs, settings
from training.config import TrainConfig
from training.model.config import SCALES

BASE = {"spec": "s.yaml", "lake": "lake", "days": "2026-01-01"}
TOLD = [
    {},
    {"scale": "tiny", "model": {"attentive": False, "across_rows": 2}, "max_length": 0},
    {"model": {"sequence": {"flow": "int", "rotary": True, "cls_rows": 1}}},
    {"model": {"after": {"buy": "click"}}, "weights": {"buy": 2.0}, "negatives": {"buy": 0.5}},
    {"model": {"sequence": {"families": {"ads": {"events": ["a", "b"], "width": 8}}}}},
]


@pytest.mark.parametrize("told", TOLD, ids=str)
def test_processes_are_told_what_was_asked_for(told: dict, tmp_path: Path) -> None:
    args = GemArgs.model_validate(BASE | told)
    file = tmp_path / "gem.yaml"
    file.write_text(yaml.safe_dump(settings(args)))
    assert parse(GemArgs, ["--config", str(file)], "gem") == args


def test_families_are_told_on_the_command_line() -> None:
    words = [w for k, v in BASE.items() for w in (f"--{k}", v)]
    flag = ["--model.sequence.families", "{clicks: {events: [click], layers: 3}}"]
    families = parse(GemArgs, words + flag, "gem").model.sequence.families
    assert families["clicks"].events == ("click",) and families["clicks"].layers == 3
    with pytest.raises((UserError, SystemExit)):
        parse(GemArgs, [*words, flag[0], "{clicks: {event: [click]}}"], "gem")


def test_options_go_into_the_sizes_of_a_scale() -> None:
    config = TrainConfig.model_validate({"scale": "base", "model": TOLD[2]["model"]})
    assert (
        config.sizes.sequence.flow == "int" and config.sizes.row_width == SCALES["base"].row_width
    )
    assert config.reads()["model"] == config.model.model_dump()
