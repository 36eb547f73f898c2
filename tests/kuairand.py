"""The folder of KuaiRand-Pure's raw files, for tests on real logs."""

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT

DATA = Path(os.environ.get("GEMLINE_KUAIRAND", ROOT.parent / "shared/data/KuaiRand-Pure"))
needs_kuairand = pytest.mark.skipif(
    not DATA.is_dir(),
    reason="KuaiRand's raw files are missing; set GEMLINE_KUAIRAND to their folder",
)
