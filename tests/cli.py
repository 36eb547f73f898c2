"""Parsing of `gemline` command lines, for tests of what documents and DAGs call."""

import importlib
from collections.abc import Sequence

from etl.cli.runner import arguments_model, parse_arguments
from etl.spec.base import StrictModel
from gemline import COMMAND_GROUPS


def parse_command(words: Sequence[str]) -> StrictModel:
    """The arguments of the words after `gemline`, parsed by the command's own model."""
    group, *arguments = words
    command = importlib.import_module(COMMAND_GROUPS[group][0]).COMMANDS[group]
    if isinstance(command, dict):
        name, *arguments = arguments
        command = command[name]
    return parse_arguments(arguments_model(command), arguments, "gemline")
