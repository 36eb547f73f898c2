"""A fresh clone on a machine with an empty home directory."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages import blocks

OURS = ("HOME", "XDG_", "GEMLINE_", "VIRTUAL_ENV", "MAKE", "OMP_", "PYTHON")


@pytest.mark.proof
def test_make_demo_from_nothing(tmp_path: Path) -> None:
    clone, home = tmp_path / "gemline", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)} | {"HOME": str(home)}
    start = time.monotonic()
    subprocess.run(["make", "demo"], cwd=clone, env=env, check=True)
    print(f"make demo from nothing: {time.monotonic() - start:.0f} s")
    report = clone / "work/demo/lake/report.html"
    assert "<svg" in report.read_text()
    (example,) = blocks(ROOT / "README.md", "python")
    python = clone / ".venv" / "bin" / "python"
    ranked = subprocess.run(
        [python, "-c", example], cwd=clone, env=env, check=True, capture_output=True, text=True
    )
    assert ranked.stdout.startswith("0 ")
    serve, ask = (
        shown for shown in blocks(ROOT / "README.md", "sh") if "8080" in shown or "serve" in shown
    )
    answers = asked(clone, env, serve, ask)
    assert '"ranking":[{"place":0' in answers and '{"taken":1}' in answers


def asked(clone: Path, env: dict[str, str], serve: str, ask: str) -> str:
    """What the service of the README says to the requests of the README."""
    path = f"{clone / '.venv' / 'bin'}:{env['PATH']}"
    service = subprocess.Popen(["sh", "-c", f"exec {serve}"], cwd=clone, env=env | {"PATH": path})
    try:
        wait = "curl -s --retry 30 --retry-all-errors --retry-delay 1 localhost:8080/ready"
        subprocess.run(wait.split(), check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run(["sh", "-e", "-c", ask], check=True, capture_output=True, text=True)
    finally:
        service.terminate()
    assert service.wait(30) == 0
    return done.stdout
