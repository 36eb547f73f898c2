"""From the command line to a typed function: one frozen pydantic model an argument list.

A command is a function with one parameter, its configuration. `--config FILE` gives defaults in
YAML; flags override them.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

import tyro
import yaml
from pydantic import ValidationError

from etl.errors import TemporaryError, UserError
from etl.known_failures import temporary_error
from etl.spec import DataSpec, load_spec
from etl.spec.base import Strict, suggestion
from etl.spec.units import parse_days
from etl.words import in_yaml

if TYPE_CHECKING:
    from etl.tables.lake import Lake

BEGAN = time.monotonic()  # before what is heavy is imported
Config = TypeVar("Config", bound=Strict)
Command = Callable[[Any], object]
LEASES: dict[Command, tuple[str, ...]] = {}


class LakeArgs(Strict):
    """Arguments of whatever reads or writes tables."""

    spec: Annotated[Path, tyro.conf.arg(help="the data spec, a YAML file")]
    lake: Annotated[str, tyro.conf.arg(help="folder of the tables")]
    pins: Annotated[
        dict[str, int],
        in_yaml(dict[str, int]),
        tyro.conf.arg(help="versions to read tables at, the newest without: {events: 12}"),
    ] = {}

    def open_lake(self) -> "Lake":
        """The lake, its folder made."""
        from etl.tables.lake import Lake, ensure_folder

        ensure_folder(self.lake)
        return Lake(self.lake, self.load(), self.pins)

    def load(self) -> DataSpec:
        """The data spec, its codes as in the lake."""
        from etl.tables.codes import bind, read_codes

        return bind(load_spec(self.spec), read_codes(self.lake))


class DayArgs(LakeArgs):
    """Arguments of a step that works on days."""

    days: Annotated[str, tyro.conf.arg(help="first:last, or one day: 2026-01-01:2026-01-08")]

    @property
    def span(self) -> tuple[date, date]:
        """First and last day."""
        return days_argument(self.days)


def days_argument(text: str, flag: str = "--days") -> tuple[date, date]:
    """First and last day that a flag names; raises UserError where it names none."""
    try:
        return parse_days(text)
    except ValueError as error:
        raise UserError(
            f"{flag} {text}: {error}; write first:last, 2026-01-01:2026-01-08"
        ) from None


def exclusive(*steps: str) -> Callable[[Command], Command]:
    """Mark a command that changes a lake: it runs under the leases of these steps.

    A step may name arguments of the command, as `ranker-{surface}` does.
    """

    def mark(command: Command) -> Command:
        LEASES[command] = steps
        return command

    return mark


def run(command: Command, argv: Sequence[str], prog: str) -> int:
    """Parse arguments and call a command under its leases; returns the exit code.

    2 means that the input was refused, 75 a temporary fault; other errors are raised.
    """
    try:
        args = parse(configuration_of(command), argv, prog)
        with _leases_of(command, args, prog):
            command(args)
    except (UserError, TemporaryError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:
        known = temporary_error(error)
        if known is None:
            raise
        print(f"{prog}: {known}", file=sys.stderr)
        return known.exit_code
    return 0


@contextmanager
def _leases_of(command: Command, args: Any, prog: str) -> Iterator[None]:
    """Hold what a command needs; of the processes of one torchrun the first does for all."""
    steps = [step.format(**dict(args)) for step in LEASES.get(command, ())]
    if not steps or int(os.environ.get("RANK", "0")):
        yield
        return
    from etl.tables.lake import ensure_folder
    from etl.tables.lease import held

    ensure_folder(args.lake)
    with held(args.lake, steps, prog):
        yield


def configuration_of(command: Command) -> type[Strict]:
    """The model of a command's one parameter."""
    (parameter,) = inspect.signature(command, eval_str=True).parameters.values()
    model: type[Strict] = parameter.annotation
    return model


def parse(model: type[Config], argv: Sequence[str], prog: str) -> Config:
    """A configuration from flags, with defaults from the file that `--config` names."""
    given = list(argv)
    if "--config" in given:
        at = given.index("--config")
        if at + 1 == len(given):
            raise UserError("--config needs a file")
        file = Path(given[at + 1])
        del given[at : at + 2]
        flags = {word.split("=")[0] for word in given if word.startswith("--")}
        given = [
            *(w for k, v in file_flags(model, file) if k not in flags for w in (k, *v)),
            *given,
        ]
    try:
        return tyro.cli(model, args=given, prog=prog, config=(tyro.conf.AvoidSubcommands,))
    except ValidationError as error:
        raise UserError(f"{prog}: {reasons_of(error)}") from None


def file_flags(model: type[Strict], file: Path) -> Iterator[tuple[str, list[str]]]:
    """A YAML file as flags and their words; raises UserError for keys that the model lacks."""
    yield from _flags(model, read_mapping(file), file, ())


def read_mapping(file: Path) -> dict[str, Any]:
    """The content of a YAML file; raises UserError where it is missing or no mapping."""
    if not file.is_file():
        raise UserError(f"{file}: no such configuration file")
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: a configuration is a mapping of names to values")
    return content


def reasons_of(error: ValidationError) -> str:
    """What is wrong, name by name, in one line."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _flags(
    model: type[Strict], values: dict[str, Any], file: Path, path: tuple[str, ...]
) -> Iterator[tuple[str, list[str]]]:
    for key, value in values.items():
        if key not in model.model_fields:
            name = ".".join((*path, str(key)))
            raise UserError(
                f"{file}: {name}: unknown key; {suggestion(key, list(model.model_fields))}"
            )
        flag = ".".join((*path, key)).replace("_", "-")
        if isinstance(value, dict):
            inner = model.model_fields[key].annotation
            if isinstance(inner, type) and issubclass(inner, Strict):
                yield from _flags(inner, value, file, (*path, key))
            elif get_origin(inner) is dict:
                yield f"--{flag}", [yaml.safe_dump(value, default_flow_style=True)]
            else:
                raise UserError(f"{file}: {'.'.join((*path, key))}: one value is wanted here")
        elif isinstance(value, bool):
            yield (f"--{flag}" if value else f"--{'.'.join((*path, 'no-' + key))}", [])
        else:
            yield f"--{flag}", [str(v) for v in (value if isinstance(value, list) else [value])]
