"""The README's commands on a fresh clone, with an empty home directory."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages import blocks

OWN_VARIABLES = ("HOME", "XDG_", "GEMLINE_", "VIRTUAL_ENV", "MAKE", "OMP_", "PYTHON")


@pytest.mark.proof
def test_make_demo_works_on_a_fresh_clone(tmp_path: Path) -> None:
    clone, home = tmp_path / "gemline", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OWN_VARIABLES)} | {
        "HOME": str(home)
    }
    start = time.monotonic()
    subprocess.run(["make", "demo"], cwd=clone, env=env, check=True)
    print(f"make demo on a fresh clone: {time.monotonic() - start:.0f} s")
    report = clone / "work/demo/lake/report.html"
    assert "<svg" in report.read_text()
    (example,) = blocks(ROOT / "README.md", "python")
    python = clone / ".venv" / "bin" / "python"
    ranked = subprocess.run(
        [python, "-c", example], cwd=clone, env=env, check=True, capture_output=True, text=True
    )
    assert ranked.stdout.startswith("0 ")
    serve, request = (
        block for block in blocks(ROOT / "README.md", "sh") if "8080" in block or "serve" in block
    )
    responses = responses_of_service(clone, env, serve, request)
    assert '"ranking":[{"rank":0' in responses and '{"accepted":1}' in responses


def responses_of_service(clone: Path, env: dict[str, str], serve: str, request: str) -> str:
    """The responses of the README's service to the README's requests."""
    path = f"{clone / '.venv' / 'bin'}:{env['PATH']}"
    service = subprocess.Popen(["sh", "-c", f"exec {serve}"], cwd=clone, env=env | {"PATH": path})
    try:
        wait_until_ready = (
            "curl -s --retry 30 --retry-all-errors --retry-delay 1 localhost:8080/ready"
        )
        subprocess.run(wait_until_ready.split(), check=True, stdout=subprocess.DEVNULL)
        result = subprocess.run(
            ["sh", "-e", "-c", request], check=True, capture_output=True, text=True
        )
    finally:
        service.terminate()
    assert service.wait(30) == 0
    return result.stdout
