"""The README's commands on a fresh clone, with an empty home directory."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from etl.spec import load_spec
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from ranking.registry.manifest import MODEL_CARD, read_manifest
from ranking.registry.ranker import live_version
from ranking.registry.records import read_promotion_record
from tests.conftest import ROOT, SPEC
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
    assert_refits_are_live(Lake(str(report.parent), load_spec(SPEC)))
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


def assert_refits_are_live(lake: Lake) -> None:
    """Each surface serves the refit of the version that passed the gate, with a model card."""
    for surface in lake.spec.ad_surfaces:
        record = read_promotion_record(lake.root, surface)
        live = read_manifest(live_version(lake.root, surface))
        assert record and record.promoted and live.version != record.version
        assert live.training and live.training.refit_of == record.version
        card = local_path(live_version(lake.root, surface)) / MODEL_CARD
        assert card.read_text().startswith(f"# Ranker of {surface}, {live.version}\n")


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
