"""A Spark step under spark-submit writes the table that it writes here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etl.jars import delta_jars
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST, ROOT
from tests.pipeline import rows


@pytest.mark.proof
def test_a_submitted_step_writes_the_same_table(
    lake: Lake, spec_path: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    shutil.copytree(lake.root, own)
    shutil.rmtree(own / "impressions")
    submit = Path(sys.executable).with_name("spark-submit")
    jars = ",".join(map(str, delta_jars()))
    where = ["--spec", str(spec_path), "--lake", str(own), "--days", f"{FIRST}:{LAST}"]
    done = subprocess.run(
        [submit, "--master", "local[2]", "--jars", jars, "etl/labels.py", *where],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert rows(Lake(str(own), lake.spec), "impressions") == rows(lake, "impressions")
