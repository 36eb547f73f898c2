"""Fixtures of the tests of etl/."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etl.tables.lake import Lake
from tests.etl.shop import shop_lake


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Lake:
    return shop_lake(tmp_path)
