"""What the documents show is true: their commands parse, their example gives what they say."""

import gzip
import importlib
import json
import re
from datetime import date
from pathlib import Path

import pytest

from etl.cli import configuration_of, parse
from etl.spec import load_spec
from etl.tables.lake import Lake
from etl.tables.page import page as page_of_tables
from gemline import GROUPS
from tests.conftest import ROOT, SPEC
from tests.pages import PAGES, blocks, commands
from tests.pipeline import build_tables, rows
from tests.proof import RESULT, summary

pytestmark = pytest.mark.spark

DAY = date(2026, 1, 1)


@pytest.mark.parametrize("words", list(commands("gemline")), ids=" ".join)
def test_every_command_of_the_pages_parses(words: list[str]) -> None:
    group, *rest = words
    command = importlib.import_module(GROUPS[group][0]).COMMANDS[group]
    if isinstance(command, dict):
        name, *rest = rest
        command = command[name]
    parse(configuration_of(command), rest, "gemline")
    for word in rest:
        if word.startswith(("conf/", "benchmarks/", "docs/")):
            assert (ROOT / word).exists(), word


def test_every_make_target_of_the_pages_exists() -> None:
    named = {words[0] for words in commands("make")}
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= rules


def test_the_page_of_tables_is_what_the_contracts_say() -> None:
    assert (ROOT / "docs/tables.md").read_text() == page_of_tables(load_spec(SPEC)), (
        "run `gemline etl contracts --spec conf/specs/simulator.yaml > docs/tables.md`"
    )


def test_the_readme_shows_the_record_of_the_last_proof() -> None:
    assert summary(json.loads(RESULT.read_text())) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULT.parent.glob("*.json")) if path != RESULT],
    ids=lambda path: path.stem,
)
def test_the_pages_show_the_committed_results(path: Path) -> None:
    study, shown = json.loads(path.read_text()), "".join(page.read_text() for page in PAGES)
    assert study["command"] in shown and study["date"] in shown
    for row in study["rows"]:
        assert f"| {' | '.join(row)} |" in shown, row


def test_the_worked_example_gives_the_labels_that_its_log_tells(
    spark: object, tmp_path: Path
) -> None:
    page = ROOT / "docs" / "spec.md"
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
    (shown,) = rows(lake, "impressions")
    assert shown["label_click"] == 1
    assert len(rows(lake, "events")) == 3 and not rows(lake, "quarantine")
    (example,) = rows(lake, "examples")
    assert example["x_phone"] and example["hist_len"] == 0
