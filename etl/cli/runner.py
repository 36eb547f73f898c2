"""Runs a command: parses its arguments, takes its leases, and turns errors into exit codes.

A command is a function with one parameter, a frozen pydantic model of its arguments.
`--config FILE` reads defaults from a YAML file; flags override them.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

import tyro
import yaml
from pydantic import ValidationError

from etl.cli.yaml_options import yaml_option
from etl.errors import TemporaryError, UserError, known_temporary_error
from etl.event_time import is_in_future, parse_local_time
from etl.spec import DataSpec, load_spec
from etl.spec.base import StrictModel, suggest_name
from etl.spec.units import DayRange, parse_date_range

if TYPE_CHECKING:
    from etl.tables.lake import Lake

PROCESS_START = time.monotonic()  # before heavy libraries are imported
ConfigT = TypeVar("ConfigT", bound=StrictModel)
Command = Callable[[Any], object]
COMMAND_LEASES: dict[Command, tuple[str, ...]] = {}


class LakeArgs(StrictModel):
    """Arguments of a command that reads or writes tables."""

    spec: Annotated[Path, tyro.conf.arg(help="data spec (YAML)")]
    lake: Annotated[str, tyro.conf.arg(help="folder or URL of the tables")]
    pins: Annotated[
        dict[str, int],
        yaml_option(dict[str, int]),
        tyro.conf.arg(help="table versions to read instead of the latest: {events: 12}"),
    ] = {}

    def open_lake(self) -> "Lake":
        """The lake; its folder is created if missing.

        Raises UserError if `pins` names unknown tables, or versions that hold erased users.
        """
        from etl.tables.erased_versions import require_versions_after_erasures
        from etl.tables.lake import Lake, ensure_lake_root
        from etl.tables.schemas import table_schema

        ensure_lake_root(self.lake)
        lake = Lake(self.lake, self.load_spec(), self.pins)
        for name in self.pins:
            table_schema(lake.spec, name)
        require_versions_after_erasures(lake)
        return lake

    def load_spec(self) -> DataSpec:
        """The data spec, with the codes of surfaces and event types that the lake already uses."""
        from etl.tables.code_registry import assign_codes, read_codes

        return assign_codes(load_spec(self.spec), read_codes(self.lake))


class DayArgs(LakeArgs):
    """Arguments of a step that processes a range of days."""

    days: Annotated[str, tyro.conf.arg(help="one day or first:last, such as 2026-01-01:2026-01-08")]

    @property
    def day_range(self) -> DayRange:
        """First and last day."""
        return parse_days_argument(self.days)


def parse_days_argument(text: str, flag: str = "--days") -> DayRange:
    """First and last day of a flag's value; raises UserError if it cannot be parsed."""
    try:
        return parse_date_range(text)
    except ValueError as error:
        raise UserError(
            f"{flag} {text}: {error}; write first:last, such as 2026-01-01:2026-01-08"
        ) from None


def parse_day_argument(text: str, flag: str) -> date:
    """The day of a flag's value; raises UserError if it is not one day."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UserError(f"{flag} {text}: write one day, such as 2026-01-08") from None


DataUntilTime = Annotated[
    str,
    tyro.conf.arg(
        help="the latest day whose data has landed, or a time until which it has: 2026-01-08T14:00"
    ),
]


def parse_data_until(spec: DataSpec, text: str) -> int:
    """Epoch second at which the data ends: that of a time, or at which a day ends.

    Times are in the spec's time zone. Raises UserError if the text is neither, or if it is after
    now: labels would become final without outcomes that still follow.
    """
    try:
        second = _end_of_data(spec, text)
    except (ValueError, OverflowError):
        raise UserError(
            f"--data-until {text}: write a day or a time, such as 2026-01-08 or 2026-01-08T14:00"
        ) from None
    if is_in_future(second):
        raise UserError(
            f"--data-until {text} ends in the future: write a day that is over, or a time that has "
            "passed"
        )
    return second


def _end_of_data(spec: DataSpec, text: str) -> int:
    if "T" not in text:
        return spec.day_end(date.fromisoformat(text))
    return parse_local_time(spec, text)


def format_data_until(second: int) -> str:
    """An epoch second as `parse_data_until` reads it, in UTC: `2026-01-08T14:00:00+00:00`."""
    return datetime.fromtimestamp(second, UTC).isoformat()


def print_counts(step: str, counts: dict[str, int]) -> None:
    """Print the row counts of a step in one line."""
    print(f"{step}: {', '.join(f'{n:,} {name}' for name, n in counts.items())}", flush=True)


def holds_leases(*steps: str) -> Callable[[Command], Command]:
    """Decorator of a command that writes to a lake: it runs under the leases of these steps.

    A step may contain arguments of the command, such as `ranker-{surface}`.
    """

    def register(command: Command) -> Command:
        COMMAND_LEASES[command] = steps
        return command

    return register


def run_command(command: Command, argv: Sequence[str], prog: str) -> int:
    """Parse arguments and call a command under its leases.

    Returns:
        The exit code: 0, 2 for a UserError, 75 for a TemporaryError. Other errors are raised.
    """
    try:
        args = parse_arguments(arguments_model(command), argv, prog, inspect.getdoc(command))
        with _hold_leases(command, args, prog):
            command(args)
    except (UserError, TemporaryError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:
        known = known_temporary_error(error)
        if known is None:
            raise
        print(f"{prog}: {known}", file=sys.stderr)
        return known.exit_code
    return 0


@contextmanager
def _hold_leases(command: Command, args: Any, prog: str) -> Iterator[None]:
    """Hold the leases of a command; under torchrun, rank 0 holds them for all processes."""
    steps = [step.format(**dict(args)) for step in COMMAND_LEASES.get(command, ())]
    if not steps or int(os.environ.get("RANK", "0")):
        yield
        return
    from etl.tables.lake import ensure_lake_root
    from etl.tables.lease import hold_leases

    ensure_lake_root(args.lake)
    with hold_leases(args.lake, steps, prog):
        yield


def arguments_model(command: Command) -> type[StrictModel]:
    """The type of a command's only parameter."""
    (parameter,) = inspect.signature(command, eval_str=True).parameters.values()
    model: type[StrictModel] = parameter.annotation
    return model


def parse_arguments(
    model: type[ConfigT], argv: Sequence[str], prog: str, description: str | None = None
) -> ConfigT:
    """Parse flags into a configuration; defaults come from the file named by `--config`.

    Args:
        model: The type of the configuration.
        argv: The command-line arguments after `prog`.
        prog: The command, for help and messages.
        description: The text of `--help`; by default the docstring of the model.
    """
    words = _insert_config_file(model, list(argv))
    try:
        return tyro.cli(
            model,
            args=words,
            prog=prog,
            description=description,
            config=(tyro.conf.AvoidSubcommands,),
        )
    except ValidationError as error:
        raise UserError(f"{prog}: {format_validation_error(error)}") from None


def _insert_config_file(model: type[StrictModel], words: list[str]) -> list[str]:
    """Replace `--config FILE` by the flags of the file that the command line does not set."""
    if "--config" not in words:
        return words
    at = words.index("--config")
    if at + 1 == len(words):
        raise UserError("--config needs a file")
    file = Path(words[at + 1])
    words = words[:at] + words[at + 2 :]
    given_flags = {word.split("=")[0] for word in words if word.startswith("--")}
    defaults: list[str] = []
    for flag, values in config_file_flags(model, file):
        if flag not in given_flags:
            defaults += [flag, *values]
    return defaults + words


def config_file_flags(model: type[StrictModel], file: Path) -> Iterator[tuple[str, list[str]]]:
    """Flags of a YAML file, each with its values; raises UserError for unknown keys."""
    yield from _mapping_to_flags(model, read_yaml_mapping(file), file, ())


def read_yaml_mapping(file: Path) -> dict[str, Any]:
    """The content of a YAML file; raises UserError if it is missing or not a mapping."""
    if not file.is_file():
        raise UserError(f"{file}: configuration file not found")
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error.reason}): save it in this encoding") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: a configuration must be a mapping of names to values")
    return content


def format_validation_error(error: ValidationError) -> str:
    """All errors in one line: `field: message; field: message`."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _mapping_to_flags(
    model: type[StrictModel], values: dict[str, Any], file: Path, path: tuple[str, ...]
) -> Iterator[tuple[str, list[str]]]:
    for key, value in values.items():
        if key not in model.model_fields:
            name = ".".join((*path, str(key)))
            raise UserError(
                f"{file}: {name}: unknown key; {suggest_name(str(key), list(model.model_fields))}"
            )
        flag = ".".join((*path, key)).replace("_", "-")
        if isinstance(value, dict):
            inner = model.model_fields[key].annotation
            if isinstance(inner, type) and issubclass(inner, StrictModel):
                yield from _mapping_to_flags(inner, value, file, (*path, key))
            elif get_origin(inner) is dict:
                yield f"--{flag}", [yaml.safe_dump(value, default_flow_style=True)]
            else:
                raise UserError(f"{file}: {'.'.join((*path, key))}: expected a single value")
        elif isinstance(value, bool):
            yield (f"--{flag}" if value else f"--{'.'.join((*path, 'no-' + key))}", [])
        else:
            yield f"--{flag}", [str(v) for v in (value if isinstance(value, list) else [value])]
