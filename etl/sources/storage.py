"""Raw files wherever Hadoop's file systems reach: which there are, and what columns they tell."""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

AT_ONCE = 16
LOCAL = "^file:/+", "file:///"  # Hadoop and Spark write local addresses with one slash or three


@dataclass(frozen=True)
class RawFile:
    """A file as Spark reads it, its size in bytes, and its address: see `one_form`."""

    path: str
    size: int
    address: str


def files_like(pattern: str) -> list[RawFile]:
    """Files that a glob pattern matches, in order; hidden ones are left out."""
    path = _hadoop().Path(pattern)
    found = path.getFileSystem(_settings()).globStatus(path) or []
    files = [_raw_file(status) for status in found if status.isFile()]
    return sorted((f for f in files if f.path.rsplit("/", 1)[-1][0] not in "._"), key=str)


def _raw_file(status: Any) -> RawFile:
    path = status.getPath()
    return RawFile(path.toString(), status.getLen(), one_form(path.toUri().toString()))


def one_form(address: str) -> str:
    """An address with three slashes where it is a local one."""
    return re.sub(*LOCAL, address)


def first_line(path: str) -> str | None:
    """The first line of a text file, unpacked where its name says so; None where it can't be."""
    java, place = _java(), _hadoop().Path(path)
    codec = java.org.apache.hadoop.io.compress.CompressionCodecFactory(_settings()).getCodec(place)
    stream = place.getFileSystem(_settings()).open(place)
    try:
        stream = codec.createInputStream(stream) if codec else stream
        utf8 = java.java.nio.charset.StandardCharsets.UTF_8
        lines = java.java.io.BufferedReader(java.java.io.InputStreamReader(stream, utf8))
        line: str | None = lines.readLine()
        return line and line.removeprefix("\ufeff")
    except Py4JJavaError:
        return None
    finally:
        stream.close()


def footer(path: str) -> str | None:
    """The schema in the footer of a Parquet file, as text; None where it has none."""
    hadoop = _java().org.apache.parquet.hadoop
    try:
        place = hadoop.util.HadoopInputFile.fromPath(_hadoop().Path(path), _settings())
        reader = hadoop.ParquetFileReader.open(place)
    except Py4JJavaError:
        return None
    try:
        return str(reader.getFileMetaData().getSchema().toString())
    finally:
        reader.close()


def of_each(
    tell: Callable[[str], str | None], files: Iterable[RawFile]
) -> list[tuple[RawFile, str | None]]:
    """What `tell` says of each file, several at once."""
    listed = list(files)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(zip(listed, pool.map(lambda file: tell(file.path), listed), strict=True))


def _java() -> Any:
    return SparkSession.active().sparkContext._jvm


def _hadoop() -> Any:
    return _java().org.apache.hadoop.fs


def _settings() -> Any:
    return SparkSession.active().sparkContext._jsc.hadoopConfiguration()
