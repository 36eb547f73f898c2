"""`gemline bench house`: sizes, names, types and documentation of the code base.

All figures are of FOLDERS and `gemline.py`; banned identifiers are counted in tests, too.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from benchmarks.harness import BenchmarkResult
from etl.spec.base import StrictModel

ROOT = Path(__file__).parents[1]
FOLDERS = ("dags", "etl", "features", "training", "ranking", "benchmarks")
BANNED_NAMES = ROOT / "conf" / "banned_names.yaml"
FOLDERS_WITH_SUBPACKAGES = ("etl", "training", "ranking")
GOALS = {
    "import_cycles": 0, "banned_identifiers": 0, "loose_files_etl": 6, "loose_files_training": 6,
    "loose_files_ranking": 6, "files": 260, "file_lines_p50": 150, "file_lines_p90": 300,
    "function_lines_p50": 12, "function_lines_p90": 35, "public_undocumented": 0,
    "public_untyped": 0, "mypy_strict_errors": 0, "readme_lines": 250, "docs_strict": True,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


class CodeQualityArgs(StrictModel):
    """Arguments of the benchmark."""

    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


@dataclass(frozen=True)
class Module:
    """A Python file: its path relative to the root, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[Function]:
        """All functions and methods, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]


def read_modules(*folders: str) -> list[Module]:
    """The modules in some folders and their subfolders."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [read_module(file) for file in files]


def read_module(file: Path) -> Module:
    """The module of a file."""
    text = file.read_text()
    return Module(file.relative_to(ROOT), text, ast.parse(text))


def import_cycles() -> list[list[str]]:
    """The modules of each import cycle; imports inside functions count."""
    import grimp  # a development dependency
    import networkx

    graph = grimp.build_graph(*FOLDERS, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    components = networkx.strongly_connected_components(imports)
    return [sorted(component) for component in components if len(component) > 1]


def defined_identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a module defines, each with its line number."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno


def words_of(identifier: str) -> list[str]:
    """The words of an identifier in snake case or camel case, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


def banned_identifiers(modules: list[Module]) -> list[str]:
    """Each defined name with a banned word, as `file:line: name: instead of … write …`."""
    banned: dict[str, str] = yaml.safe_load(BANNED_NAMES.read_text())
    return [
        f"{module.path}:{line}: {name}: instead of {word!r} write {banned[word]}"
        for module in modules
        for name, line in defined_identifiers(module.tree)
        for word in words_of(name)
        if word in banned
    ]


def public_definitions(module: Module) -> Iterator[Function | ast.ClassDef]:
    """Public classes and functions of a module, and public methods of its public classes.

    Signatures of overloads do not count, only their implementation.
    """
    for node in module.tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                methods = (child for child in node.body if isinstance(child, Function))
                yield from (
                    method
                    for method in methods
                    if not method.name.startswith("_") and not is_overload(method)
                )


def is_overload(function: Function) -> bool:
    """Whether a function is decorated by `typing.overload`."""
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in function.decorator_list)


def is_typed(function: Function) -> bool:
    """Whether the return value and all parameters but `self` and `cls` are annotated."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [variadic for variadic in (arguments.vararg, arguments.kwarg) if variadic]
    untyped = {parameter.arg for parameter in parameters if parameter.annotation is None}
    return function.returns is not None and untyped <= {"self", "cls"}


def mypy_strict_errors() -> int | None:
    """The number of errors of `mypy --strict`; None if it does not finish."""
    command = [sys.executable, "-m", "mypy", "--strict"]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    summary = re.search(r"Found (\d+) errors?", result.stdout)
    if summary:
        return int(summary[1])
    return None if result.returncode else 0


def docs_build_strictly() -> bool:
    """Whether `mkdocs build --strict` passes."""
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return result.returncode == 0


def length_percentiles(modules: list[Module]) -> dict[str, float]:
    """Median and 90th percentile of the lines of functions, and of files that are not empty."""
    import numpy as np

    files = [module.text.count("\n") for module in modules if module.tree.body]
    functions = [
        (function.end_lineno or 0) - function.lineno + 1
        for module in modules
        for function in module.functions
    ]
    return {
        f"{name}_p{percent}": round(float(np.percentile(lines, percent)), 1)
        for name, lines in (("file_lines", files), ("function_lines", functions))
        for percent in (50, 90)
    }


def measure_code_quality() -> dict[str, float | None]:
    """All figures by key; None if a tool does not finish."""
    modules = [*read_modules(*FOLDERS), read_module(ROOT / "gemline.py")]
    public = [node for module in modules for node in public_definitions(module)]
    top_level_files = {
        f"loose_files_{folder}": sum(
            file.name != "__init__.py" for file in (ROOT / folder).glob("*.py")
        )
        for folder in FOLDERS_WITH_SUBPACKAGES
    }
    return {
        "import_cycles": len(import_cycles()),
        "banned_identifiers": len(banned_identifiers([*modules, *read_modules("tests")])),
        **top_level_files,
        "files": len(modules),
        **length_percentiles(modules),
        "public_undocumented": sum(ast.get_docstring(node) is None for node in public),
        "public_untyped": sum(not is_typed(node) for node in public if isinstance(node, Function)),
        "mypy_strict_errors": mypy_strict_errors(),
        "readme_lines": (ROOT / "README.md").read_text().count("\n"),
        "docs_strict": docs_build_strictly(),
    }


def bench_code_quality(args: CodeQualityArgs) -> None:
    """Sizes of files and functions, names, types and documentation, with their goals."""
    result = BenchmarkResult("The code base", ("what", "now", "goal"))
    figures = measure_code_quality()
    for key, value in figures.items():
        at_most = "" if isinstance(GOALS[key], bool) else "at most "
        result.rows.append((key, str(value), f"{at_most}{GOALS[key]}"))
    result.figures |= figures
    result.record("mypy_strict_errors", figures["mypy_strict_errors"], "mypy did not finish")
    result.show(args.as_json)
