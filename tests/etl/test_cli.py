"""The command line: flags and files, exit codes, help of every group, and no heavy imports."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from etl.cli.runner import parse_arguments, run_command
from etl.commands import RawArgs, ingest
from etl.errors import TemporaryError, UserError, error_from_exit_code
from etl.spec.base import StrictModel
from gemline import COMMAND_GROUPS, main


def test_flags_override_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("spec: a.yaml\nlake: here\nraw: logs\ndays: 2026-01-01\n")
    args = parse_arguments(RawArgs, ["--config", str(file), "--lake", "there"], "t")
    assert (args.lake, args.raw, args.day_range[0].isoformat()) == ("there", "logs", "2026-01-01")


def test_an_unknown_key_names_the_key_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lak: here\n")
    with pytest.raises(UserError, match=rf"{file}: lak: unknown key; did you mean 'lake'\?"):
        parse_arguments(RawArgs, ["--config", str(file)], "t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lake: [", "is not YAML"),
        ("lake: {a: 1}", "lake: expected a single value"),
        ("- a", "must be a mapping"),
    ],
)
def test_an_invalid_configuration_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        parse_arguments(RawArgs, ["--config", str(file)], "t")


def test_invalid_days_give_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], spec_path: Path, tmp_path: Path
) -> None:
    flags = ["--spec", str(spec_path), "--lake", str(tmp_path / "lake"), "--raw", "y"]
    assert run_command(ingest, [*flags, "--days", "2026-02-01:2026-01-01"], "t") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "the first day is after the last" in message


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("no such day"), 2, "no such day"),
        (TemporaryError("no answer"), 75, "no answer"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 75, "the disk is full"),
        (RuntimeError("py4j: java.lang.OutOfMemoryError: Java heap space"), 75, "out of memory"),
        (RuntimeError("[DELTA_CONCURRENT_APPEND] conflict"), 75, "another run wrote"),
    ],
)
def test_known_failures_have_their_exit_code_and_one_line(
    error: Exception, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: StrictModel) -> None:
        raise error

    assert run_command(command, [], "t") == code
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_unknown_failures_are_raised() -> None:
    def command(_: StrictModel) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_command(command, [], "t")


@pytest.mark.parametrize(
    ("exit_code", "error_type"),
    [(2, UserError), (75, TemporaryError), (-9, TemporaryError), (1, SystemExit)],
)
def test_the_exit_code_of_a_subprocess_is_passed_on(
    exit_code: int, error_type: type[BaseException]
) -> None:
    with pytest.raises(error_type, match="it failed"):
        raise error_from_exit_code(exit_code, "it failed")


@pytest.mark.parametrize("group", COMMAND_GROUPS)
def test_every_command_group_has_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main([group, "--help"])
    assert "usage" in capsys.readouterr().out


def test_the_help_of_a_command_describes_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(["etl", "vacuum", "--help"])
    assert "Delete files that neither" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        (["etl", "ingest", "--help"], ("torch", "pyspark.sql")),
        (["features", "examples", "--help"], ("torch",)),
        (["train", "gem", "--help"], ("pyspark", "torch")),
        (["rank", "train", "--help"], ("pyspark", "torch")),
        (["run", "--help"], ("pyspark", "torch", "deltalake")),
    ],
)
def test_help_imports_no_heavy_library(command: list[str], absent: tuple[str, ...]) -> None:
    code = (
        "import sys; from gemline import main\n"
        f"try: main({command!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', [m for m in {absent!r} if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "LOADED []" in process.stdout
