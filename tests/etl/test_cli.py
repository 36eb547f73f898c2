import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from etl.cli import parse, run
from etl.commands import RawArgs, ingest
from etl.errors import UserError
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
