import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from etl.cli import parse, run
from etl.commands import RawArgs, ingest
from etl.errors import TemporaryError, UserError, error_of_exit_code
from etl.spec.base import Strict
from gemline import GROUPS, main


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("spec: a.yaml\nlake: here\nraw: logs\ndays: 2026-01-01\n")
    args = parse(RawArgs, ["--config", str(file), "--lake", "there"], "t")
    assert (args.lake, args.raw, args.span[0].isoformat()) == ("there", "logs", "2026-01-01")


def test_an_unknown_key_names_the_key_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lak: here\n")
    with pytest.raises(UserError, match=rf"{file}: lak: unknown key; did you mean 'lake'\?"):
        parse(RawArgs, ["--config", str(file)], "t")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lake: [", "is not YAML"),
        ("lake: {a: 1}", "lake: one value is wanted"),
        ("- a", "a mapping"),
    ],
)
def test_a_broken_configuration_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        parse(RawArgs, ["--config", str(file)], "t")


def test_bad_days_are_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], spec_path: Path, tmp_path: Path
) -> None:
    words = ["--spec", str(spec_path), "--lake", str(tmp_path / "lake"), "--raw", "y"]
    assert run(ingest, [*words, "--days", "2026-02-01:2026-01-01"], "t") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the first day is after the last" in said


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("no such day"), 2, "no such day"),
        (TemporaryError("no answer"), 75, "no answer"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 75, "the disk is full"),
        (RuntimeError("py4j: java.lang.OutOfMemoryError: Java heap space"), 75, "out of memory"),
        (RuntimeError("[DELTA_CONCURRENT_APPEND] conflict"), 75, "another run wrote"),
    ],
)
def test_a_fault_of_the_machine_has_an_exit_code_of_its_own(
    error: Exception, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: Strict) -> None:
        raise error

    assert run(command, [], "t") == code
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


def test_what_is_no_known_failure_is_raised() -> None:
    def command(_: Strict) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run(command, [], "t")


@pytest.mark.parametrize(
    ("exit_code", "kind"),
    [(2, UserError), (75, TemporaryError), (-9, TemporaryError), (1, SystemExit)],
)
def test_the_exit_code_of_a_process_is_passed_on(exit_code: int, kind: type[BaseException]) -> None:
    with pytest.raises(kind, match="it failed"):
        raise error_of_exit_code(exit_code, "it failed")


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main([group, "--help"])
    assert "usage" in capsys.readouterr().out


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
def test_no_heavy_import_before_it_is_needed(command: list[str], absent: tuple[str, ...]) -> None:
    code = (
        "import sys; from gemline import main\n"
        f"try: main({command!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', [m for m in {absent!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "LOADED []" in out
