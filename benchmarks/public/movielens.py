"""MovieLens-100k in the layouts of `gemline bench sequence` and `gemline bench tabular`.

The files are those inside the wheel of recbole, which is downloaded and unpacked, not installed.
A rating of 4 or 5 is a positive label.
"""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from benchmarks.harness import BenchmarkResult
from benchmarks.public import sequence, tabular
from etl.array_types import Float64, Int64
from etl.errors import UserError
from etl.runtime.cache import user_cache
from etl.tables import atomic_io

WHEEL = "recbole==1.2.1"
FOLDER = "recbole/dataset_example/ml-100k"
FILES = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")
MIN_POSITIVE_RATING = 4
SEEDS = 3
METRICS = ("auc", "uauc")
COLUMNS = ("metric", "LightGBM", "GEM's blocks", "gain")
TRAIN_FRACTION, VALID_FRACTION = 0.8, 0.1
HOUR_SECONDS, DAY_SECONDS, DAYS_PER_WEEK = 3600, 86_400, 7
ZIP_DIGITS = 2  # the first digits of a ZIP code are a region


def movielens_folder() -> Path:
    """The folder of the files in the user's cache; they are downloaded if absent.

    Raises UserError if they cannot be had.
    """
    folder = user_cache("movielens")
    if not all((folder / name).is_file() for name in FILES):
        with tempfile.TemporaryDirectory() as scratch:
            command = ["pip", "download", WHEEL, "--no-deps", "--quiet", "--dest", scratch]
            done = subprocess.run(
                [sys.executable, "-m", *command], capture_output=True, text=True, check=False
            )
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise UserError(f"MovieLens-100k cannot be downloaded with pip: {reason}")
            (wheel,) = Path(scratch).glob("*.whl")
            unpack(wheel, folder)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    """Copy the three files out of a wheel; nothing else of it is unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            with atomic_io.replace_file(folder / name) as temporary:
                temporary.write_bytes(archive.read(f"{FOLDER}/{name}"))


@dataclass(frozen=True)
class Ratings:
    """Ratings (N) in order of time, with the rows of their users and items in the other tables."""

    ratings: pa.Table
    users: pa.Table
    items: pa.Table

    @classmethod
    def read(cls, folder: Path) -> "Ratings":
        """Read the three files; columns lose the type after the colon.

        Raises UserError if one is absent.
        """
        absent = [name for name in FILES if not (folder / name).is_file()]
        if absent:
            raise UserError(f"{folder} has no {', '.join(absent)}, files of MovieLens-100k")
        ratings, items, users = (_read(folder / name) for name in FILES)
        order = np.lexsort(
            (ratings["item_id"].to_numpy().astype(int), _seconds(ratings))
        )  # ratings of the same second in a fixed order
        return cls(ratings.take(order), users, items)

    @property
    def seconds(self) -> Int64:
        """Epoch seconds of the ratings (N)."""
        return _seconds(self.ratings)

    @property
    def labels(self) -> Int64:
        """1 for a high rating, else 0 (N)."""
        rating = self.ratings["rating"].to_numpy().astype(float)
        return np.asarray(rating >= MIN_POSITIVE_RATING, np.int64)


def _read(path: Path) -> pa.Table:
    options = pc_csv.ParseOptions(delimiter="\t", quote_char=False)
    header = pc_csv.open_csv(path, parse_options=options).schema.names
    as_text = pc_csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()))
    table = pc_csv.read_csv(path, parse_options=options, convert_options=as_text)
    return table.rename_columns([name.split(":")[0] for name in header])


def _seconds(ratings: pa.Table) -> Int64:
    return np.asarray(ratings["timestamp"].to_numpy().astype(float), np.int64)


def write_sequence_files(data: Ratings, folder: Path) -> None:
    """Write the layout of `bench sequence`, split by time: all test ratings are the latest ones."""
    rows = pa.table(
        {
            "user": data.ratings["user_id"],
            "item": data.ratings["item_id"],
            "time": data.seconds,
            "label": data.labels,
        }
    )
    position = np.arange(len(rows)) / len(rows)
    _write_splits(rows, position, folder)
    users = data.users.select(["user_id", "age", "gender", "occupation"])
    pc_csv.write_csv(
        users.rename_columns(["user", "age", "gender", "occupation"]), folder / "users.csv"
    )
    genres = pc.replace_substring(data.items["class"], " ", "|")
    items = pa.table(
        {"item": data.items["item_id"], "year": data.items["release_year"], "genres": genres}
    )
    pc_csv.write_csv(items, folder / "items.csv")


def write_tabular_files(data: Ratings, folder: Path) -> None:
    """Write ten categorical fields and the label; of each user the latest ratings are the test.

    Users and items of the test rows then also occur in the training rows, as in public tables.
    """
    user = pc.index_in(data.ratings["user_id"], data.users["user_id"])
    item = pc.index_in(data.ratings["item_id"], data.items["item_id"])
    seconds = data.seconds
    rows = pa.table(
        {
            "user": data.ratings["user_id"],
            "item": data.ratings["item_id"],
            "age": data.users["age"].take(user),
            "gender": data.users["gender"].take(user),
            "occupation": data.users["occupation"].take(user),
            "region": pc.utf8_slice_codeunits(data.users["zip_code"].take(user), 0, ZIP_DIGITS),
            "year": data.items["release_year"].take(item),
            "genres": data.items["class"].take(item),
            "hour": seconds % DAY_SECONDS // HOUR_SECONDS,
            "weekday": seconds // DAY_SECONDS % DAYS_PER_WEEK,
            "label": data.labels,
        }
    )
    _write_splits(rows, position_within(user.to_numpy()), folder)


def position_within(group: Int64) -> Float64:
    """The position of each row (N) among the rows of its group, in [0, 1), in the given order."""
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    starts = np.cumsum(counts) - counts
    position = np.empty(len(group))
    position[order] = (np.arange(len(group)) - starts[group[order]]) / counts[group[order]]
    return position


def _write_splits(rows: pa.Table, position: Float64, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    split = np.digitize(position, (TRAIN_FRACTION, TRAIN_FRACTION + VALID_FRACTION))
    for number, name in enumerate(("train", "valid", "test")):
        pc_csv.write_csv(rows.filter(split == number), folder / f"{name}.csv")


def measure_movielens(folder: Path, work: Path) -> BenchmarkResult:
    """Metrics of both benchmarks on the files of a folder, and their gains over LightGBM.

    Raises UserError if a file is absent.
    """
    ratings = Ratings.read(folder)
    write_sequence_files(ratings, work / "sequence")
    write_tabular_files(ratings, work / "tabular")
    by_bench = {
        "movielens": sequence.measure(work / "sequence", SEEDS).figures,
        "movielens_tabular": tabular.measure(
            work / "tabular", "label", (), SEEDS, ("lightgbm",)
        ).figures,
    }
    result = BenchmarkResult(f"MovieLens-100k, {SEEDS} seeds", COLUMNS)
    for prefix, own in by_bench.items():
        result.figures |= {f"{prefix}_{key}": value for key, value in own.items()}
        for metric in METRICS:
            add_gain(result, f"{prefix}_{metric}", own.get(metric), own.get(f"lightgbm_{metric}"))
    return result


def add_gain(result: BenchmarkResult, key: str, ours: object, lightgbm: object) -> None:
    """Add a row of the table and the gain over LightGBM, if both have the metric."""
    if isinstance(ours, float) and isinstance(lightgbm, float):
        gain = ours - lightgbm
        result.record(f"{key}_gain", gain, "")
        result.rows.append((key, f"{lightgbm:.4f}", f"{ours:.4f}", f"{gain:+.4f}"))
