"""Files that cannot be read to their end, found together: a Spark job ends at its first such file.

Only compressed and Parquet files are read: any bytes are a text file.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from pyspark.sql import SparkSession

from etl.ingest.file_discovery import (
    MAX_PARALLEL_READS,
    RawSelection,
    find_files,
    is_compressed,
    read_parquet_footer,
)
from etl.ingest.readers import UnreadableFileError, translate_read_errors
from etl.spec.sources import Source


def find_corrupt_files(sources: Iterable[Source], selection: RawSelection) -> list[str]:
    """URIs of the selected files of some sources that begin as they should, but cannot be read.

    Each file is decompressed once, without parsing its records.
    """
    files = {
        file.uri: (source, file.path)
        for source in sources
        if source.format != "delta"
        for _, files_of_day in find_files(source, selection)
        for file in files_of_day
        if file.size
    }
    with ThreadPoolExecutor(MAX_PARALLEL_READS) as pool:
        are_corrupt = pool.map(lambda file: _is_corrupt(*file), files.values())
    return [uri for uri, is_corrupt in zip(files, are_corrupt, strict=True) if is_corrupt]


def _is_corrupt(source: Source, path: str) -> bool:
    reader = SparkSession.active().read.option("ignoreCorruptFiles", False)
    if source.format == "parquet":
        if read_parquet_footer(path) is None:
            return False
        rows = reader.parquet(path)
    elif is_compressed(path):
        rows = reader.text(path)
    else:
        return False
    try:
        with translate_read_errors():
            rows.write.format("noop").mode("overwrite").save()
    except UnreadableFileError:
        return True
    return False
