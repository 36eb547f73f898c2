"""The Spark session of all steps, with every setting that tables and tests rely on."""

import logging
import os
import sys
from pathlib import Path

from py4j.java_gateway import java_import
from pyspark.sql import SparkSession

from etl.runtime.java import class_archive_options, delta_jars, require_java

# The code that Spark generates for the columns of one projection is often a method of more than
# 8,000 bytes, which Java would only interpret.
COMPILE_LARGE_METHODS = "-XX:-DontCompileHugeMethods"
COMMON_CONF = {
    "spark.executor.defaultJavaOptions": COMPILE_LARGE_METHODS,
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    # Otherwise each Column operation sends its Python call site to the JVM.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
LOG4J_OPTION = (
    f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
)
# Local mode: one process, loopback only, few partitions.
LOCAL_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "4g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
    # By default each task allocates a page of 64 MB, and broadcast tables keep theirs.
    "spark.buffer.pageSize": "4m",
    "spark.sql.shuffle.partitions": "8",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.driver.extraJavaOptions": " ".join(
        (COMPILE_LARGE_METHODS, "-XX:+UseParallelGC", LOG4J_OPTION)
    ),
}


def spark_session(app_name: str) -> SparkSession:
    """The active Spark session, created on the first call.

    Under spark-submit, master and memory are the submitter's choice, and the Delta JARs come from
    `--jars`. Otherwise Spark runs in this process, with the master in `GEMLINE_SPARK_MASTER`
    (default `local[*]`) and the heap size in `GEMLINE_SPARK_MEMORY` (default `4g`).
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Where root logs INFO, as under Airflow, py4j logs each connection that it closes.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    builder = SparkSession.builder.appName(app_name)
    settings = dict(COMMON_CONF)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        require_java()
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        jars = ",".join(map(str, delta_jars()))
        builder = builder.master(os.environ.get("GEMLINE_SPARK_MASTER", "local[*]"))
        memory = os.environ.get("GEMLINE_SPARK_MEMORY", LOCAL_CONF["spark.driver.memory"])
        options = " ".join((LOCAL_CONF["spark.driver.extraJavaOptions"], *class_archive_options()))
        settings |= LOCAL_CONF | {
            "spark.jars": jars,
            "spark.driver.memory": memory,
            "spark.driver.extraJavaOptions": options,
        }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    # PySpark refers to this class by its simple name about a thousand times in a table build.
    # Without this import, each reference searches all JARs for it in the packages before its own.
    java_import(session.sparkContext._jvm, "org.apache.spark.api.python.PythonUtils")
    return session
