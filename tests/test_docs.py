"""The documents are correct: commands parse, figures match the results, the example runs."""

import gzip
import json
import re
import runpy
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from benchmarks.code_quality import FOLDERS
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.cli import parse_command
from tests.conftest import ROOT
from tests.pages import DOCS, PAGES, blocks, commands
from tests.pipeline import build_tables, rows
from tests.proof import RESULT, skipped_tests, summary

pytestmark = pytest.mark.spark

DAY = date(2026, 1, 1)


@pytest.mark.parametrize("words", list(commands("gemline")), ids=" ".join)
def test_every_command_in_the_pages_parses(words: list[str]) -> None:
    parse_command(words)
    for word in words:
        if word.startswith(("conf/", "benchmarks/", "docs/")):
            assert (ROOT / word).exists(), word


def test_every_make_target_in_the_pages_exists() -> None:
    targets = {words[0] for words in commands("make")}
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= targets <= rules


def test_the_reference_is_what_the_code_generates() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    for name, page in generate["pages"]().items():
        assert (DOCS / "reference" / name).read_text() == page, "run `python docs/generate.py`"


def test_no_generated_page_depends_on_the_folder_of_the_checkout() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    for name, page in generate["pages"]().items():
        assert str(ROOT) not in page and str(ROOT.parent / "shared") not in page, name


def test_every_environment_variable_is_documented() -> None:
    """Except those that processes of this project set for each other."""
    page = (DOCS / "reference" / "configuration.md").read_text()
    sources = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    read = {
        name for file in sources for name in re.findall(r'"(GEMLINE_[A-Z_]+)"', file.read_text())
    }
    assert {name for name in read if f"`{name}`" not in page} <= {"GEMLINE_LEASES", "GEMLINE_SERVE"}


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    built = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr


def test_the_spec_of_the_readme_loads(tmp_path: Path) -> None:
    (spec,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "shop.yaml").write_text(spec)
    assert load_spec(tmp_path / "shop.yaml").ad_surfaces


def test_the_files_of_the_ten_tasks_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Ten common tasks")[1]
    rows_of_tasks = re.findall(r"^\| add .*$", table, re.MULTILINE)
    files = re.findall(r"`([a-z_]+/[\w./*-]+)`", "\n".join(rows_of_tasks))
    assert len(rows_of_tasks) == 10
    missing = [file for file in files if not any(ROOT.glob(file))]
    assert not missing


def test_the_readme_shows_the_result_of_the_last_proof() -> None:
    assert summary(json.loads(RESULT.read_text())) in (ROOT / "README.md").read_text()


def test_skipped_tests_are_counted_by_their_reason(tmp_path: Path) -> None:
    skips = [
        f"@pytest.mark.skip(reason={reason!r})\ndef test_{number}(): pass\n"
        for number, reason in enumerate(["no docker", "no docker", "no GPU"])
    ]
    others = "def test_that_runs(): pass\n@pytest.mark.xfail\ndef test_that_fails(): assert False\n"
    (tmp_path / "test_x.py").write_text("import pytest\n" + "".join(skips) + others)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--junitxml=report.xml"]
    subprocess.run([*command, "test_x.py"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    skipped = skipped_tests(tmp_path / "report.xml")
    assert skipped == {"no docker": 2, "no GPU": 1}
    record = json.loads(RESULT.read_text())
    record["parts"][0]["skipped"] = skipped
    assert ", 3 tests skipped (" in summary(record)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULT.parent.glob("*.json")) if path != RESULT],
    ids=lambda path: path.stem,
)
def test_the_pages_show_the_committed_results(path: Path) -> None:
    study = json.loads(path.read_text())
    text = "".join(page.read_text() for page in PAGES)
    assert study["command"] in text and study["date"] in text
    for row in study["rows"]:
        assert f"| {' | '.join(row)} |" in text, row


def test_the_worked_example_gives_the_labels_that_the_page_states(
    spark: object, tmp_path: Path
) -> None:
    (page,) = (
        page
        for page in PAGES
        if blocks(page, "json") and any("sources:" in block for block in blocks(page, "yaml"))
    )
    log, spec = blocks(page, "json")[0], blocks(page, "yaml")[0]
    path = tmp_path / "shop.yaml"
    path.write_text(spec)
    raw = tmp_path / "raw"
    folder = raw / "events" / str(DAY)
    folder.mkdir(parents=True)
    (folder / "part.json.gz").write_bytes(gzip.compress(log.encode()))
    (raw / "products.csv").write_text("sku,brand,price\nsku-9,acme,19.9\n")
    lake = Lake(str(tmp_path / "lake"), load_spec(path))
    build_tables(lake, raw, (DAY, DAY))
    (impression,) = rows(lake, "impressions")
    assert impression["label_click"] == 1
    assert len(rows(lake, "events")) == 3 and not rows(lake, "quarantine")
    (example,) = rows(lake, "examples")
    assert example["ctx_phone"] and example["history_length"] == 0
