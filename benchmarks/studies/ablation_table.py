"""The table of the ablation, and its verdicts."""

from collections.abc import Mapping

from benchmarks.harness import BenchmarkResult
from benchmarks.studies import ablation_rows
from benchmarks.studies.ablation_rows import DEEP, Differences, has_row
from benchmarks.studies.model_changes import DataSet
from benchmarks.studies.seeded_estimates import LEVEL, SeededEstimate, holm


def ablation_table(differences: Differences, paired: Differences, title: str) -> BenchmarkResult:
    """A row per change with its difference on each data set, and whether the default is best.

    Rows are compared with the reference of DEPTH layers; `default_is_best` and the rows that are
    `better` are judged by their differences from the default, `paired` where these are measured.
    """
    all_rows = ablation_rows.all_rows()
    expected = [(data, name) for data in differences for name in all_rows if has_row(data, name)]
    verdicts = verdicts_of(differences, len(expected))
    from_default = {
        data: differences_from_default(rows) | paired[data] for data, rows in differences.items()
    }
    result = BenchmarkResult(
        title,
        ("change", *(cell for data in differences for cell in (data, f"{data}, corrected"))),
    )
    names = [name for name in all_rows if any(name in rows for rows in differences.values())]
    for name in names:
        cells = []
        for data, by_name in differences.items():
            cells += [str(by_name.get(name, "")), verdicts[data].get(name, "")]
        result.rows.append((name, *cells))
    better = {
        data: [name for name, verdict in by_name.items() if verdict == "better"]
        for data, by_name in verdicts_of(from_default, len(expected)).items()
    }
    missing = [f"{name}, {data}" for data, name in expected if name not in differences[data]]
    if missing and not any(better.values()):
        result.record("default_is_best", None, f"{len(missing)} rows are not measured yet")
    else:
        result.figures["default_is_best"] = not any(better.values())
    result.figures |= {
        "rows_not_measured": missing,
        "comparisons": sum(map(len, differences.values())),
        **{f"better_{data}": rows for data, rows in better.items()},
        "better_on_all_data": [n for n in names if all(n in rows for rows in better.values())],
    }
    return result


def differences_from_default(by_name: Mapping[str, SeededEstimate]) -> dict[str, SeededEstimate]:
    """Differences of NE of a data set's rows from the default instead of the reference.

    The difference of the reference from the default is added as if it were independent. That is
    wider than pairs are, because both differences contain the reference, with opposite signs: it is
    for rows of studies that store no pairs. Empty as long as the row DEEP is not measured.
    """
    if DEEP not in by_name:
        return {}
    deep = by_name[DEEP]
    return {
        name: e
        if name == DEEP
        else SeededEstimate.combine(e.value + deep.value, e.variance, deep.variance)
        for name, e in by_name.items()
    }


def verdicts_of(
    differences: Mapping[DataSet, Mapping[str, SeededEstimate]], comparisons: int
) -> dict[DataSet, dict[str, str]]:
    """Whether each row is better or worse outside noise, corrected for a number of comparisons.

    These are all rows and data sets, measured or not, so that later rows change no verdict.
    """
    flat = [(data, name) for data, by_name in differences.items() for name in by_name]
    p_values = [differences[data][name].p_value for data, name in flat]
    unmeasured = [1.0] * (comparisons - len(flat))
    corrected = holm([*p_values, *unmeasured])[: len(flat)]
    verdicts: dict[DataSet, dict[str, str]] = {data: {} for data in differences}
    for (data, name), p_value in zip(flat, corrected, strict=True):
        direction = "worse" if differences[data][name].value > 0 else "better"
        verdicts[data][name] = direction if p_value < LEVEL else "within noise"
    return verdicts
