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
    """What a command that fails with exit code 2 prints, without line breaks."""
    assert main(command) == 2
    printed = capfd.readouterr()
    text = " ".join(f"{printed.out} {printed.err}".split())
    assert "Traceback" not in text
    return text


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
    assert f"app/{DAY}.json.gz" in text and "cannot be read" in text
