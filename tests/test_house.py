"""House rules that no linter checks; `make lint` runs those that one does."""

import grimp
import networkx

from tests.conftest import ROOT

FOLDERS = ("dags", "etl", "features", "training", "ranking", "benchmarks")


def test_files_are_short() -> None:
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")]
    long = {str(f): n for f in files if (n := f.read_text().count("\n")) > 350}
    assert not long


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, too."""
    modules = grimp.build_graph(*FOLDERS, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in modules.modules
        for imported in modules.find_modules_directly_imported_by(importer)
    )
    circles = [sorted(c) for c in networkx.strongly_connected_components(imports) if len(c) > 1]
    assert not circles
