"""Files that cannot be read are refused in one sentence, with exit code 2."""

import gzip
import json
import random
from pathlib import Path

import pytest

from gemline import main
from tests.etl.shop import SPEC

DAY = "2026-01-02"


def refused(capfd: pytest.CaptureFixture[str], *command: str) -> str:
    """What a command that fails with exit code 2 prints, without white space: lines are broken."""
    assert main(command) == 2
    printed = capfd.readouterr()
    text = without_spaces(printed.out + printed.err)
    assert "Traceback" not in text
    return text


def without_spaces(text: str) -> str:
    return "".join(text.split())


def events(number: int) -> bytes:
    """A gzip of the shop's log of events."""
    rng = random.Random(0)
    lines = [
        json.dumps({"id": f"e{n}", "who": f"u{n}", "what": "i", "page": "home", "action": "shown",
                    "at": 1_767_312_000 + n, "noise": rng.random()})
        for n in range(number)
    ]  # fmt: skip
    return gzip.compress("\n".join(lines).encode())


@pytest.mark.parametrize("damage", ["cut off", "not a gzip", "changed"])
@pytest.mark.parametrize("command", ["infer", pytest.param("check", marks=pytest.mark.spark)])
def test_a_corrupt_file_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, command: str, damage: str
) -> None:
    content = events(1500)
    damaged = {
        "cut off": content[: len(content) // 2],
        "not a gzip": b"no gzip",
        "changed": content[:1000] + bytes(20) + content[1020:],
    }
    file = tmp_path / "raw" / "app" / f"{DAY}.json.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(damaged[damage])
    if command == "infer":
        text = refused(capfd, "spec", "infer", str(tmp_path / "raw"))
    else:
        spec = tmp_path / "spec.yaml"
        spec.write_text(SPEC.replace("app/{day}.json", "app/{day}.json.gz"))
        text = refused(capfd, "spec", "check", str(spec), "--raw", str(tmp_path / "raw"))
    assert f"app/{DAY}.json.gz" in text and without_spaces("cannot be read") in text


def test_a_spec_in_another_encoding_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_bytes(f"# Geschäft\n{SPEC}".encode("latin-1"))
    text = refused(capfd, "spec", "check", str(tmp_path / "spec.yaml"), "--raw", str(tmp_path))
    assert without_spaces("spec.yaml: not UTF-8") in text
    command = ["etl", "ingest", "--config", str(tmp_path / "spec.yaml")]
    assert without_spaces("spec.yaml is not UTF-8") in refused(capfd, *command)


CSV_SPEC = SPEC.replace("format: json", "format: csv").replace("{day}.json", "{day}.csv")


@pytest.mark.spark
@pytest.mark.parametrize("names", ["Note,note", ",", "WHO,other"])
def test_columns_of_one_name_are_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, names: str
) -> None:
    write_csv(tmp_path, names)
    text = refused(capfd, "spec", "check", str(tmp_path / "spec.yaml"), "--raw", str(tmp_path))
    assert without_spaces(f"app/{DAY}.csv: several columns have the same name") in text


@pytest.mark.spark
@pytest.mark.parametrize("names", ["corrupt,other", "Note,"])
def test_any_other_name_of_a_column_is_read(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, names: str
) -> None:
    write_csv(tmp_path, names)
    command = ["spec", "check", str(tmp_path / "spec.yaml"), "--raw", str(tmp_path)]
    assert main(command) == 0 and "shown on home" in capfd.readouterr().out


def write_csv(folder: Path, names: str) -> None:
    """Write the shop's spec for CSV, and an event with two further columns."""
    (folder / "spec.yaml").write_text(CSV_SPEC)
    (folder / "app").mkdir()
    text = f"id,who,what,page,action,at,phone,{names}\ne1,u1,i1,home,shown,1767312000,ios,1,2\n"
    (folder / "app" / f"{DAY}.csv").write_text(text)
