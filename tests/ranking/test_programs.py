"""Programs of a ranker are traced once: later weights are filled into the traced graph."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxscript import ir

from ranking.registry.manifest import GRAPH_FILES, read_graphs, read_manifest
from ranking.registry.onnx_programs import OnnxProgram
from ranking.registry.programs import TRACED_FROM, ExportableProgram, exportable_programs
from ranking.registry.ranker import load_ranker
from tests.conftest import LAST
from tests.ranking.conftest import batch_of, untrained_student
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader


@dataclass(frozen=True)
class Written:
    """A program as it was written: its ONNX file and its traced graph."""

    program: bytes
    graph: bytes


def write(program: ExportableProgram, folder: Path, earlier: bytes | None = None) -> Written:
    path, graph_path = folder / "program.onnx", folder / "graph.onnx"
    program.write_onnx(path, graph_path, earlier)
    return Written(path.read_bytes(), graph_path.read_bytes())


def programs_of(reader: ExampleReader, seed: int) -> tuple[ExportableProgram, ExportableProgram]:
    student = untrained_student(reader, seed)
    return exportable_programs(student, student.input_builder(batch_of(reader, 30)))


@pytest.fixture(scope="module")
def later(reader: ExampleReader) -> tuple[ExportableProgram, ExportableProgram]:
    """The programs of a student with other weights than those of `graphs`."""
    return programs_of(reader, 2)


@pytest.fixture(scope="module")
def graphs(reader: ExampleReader, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The traced graphs of an earlier student's programs."""
    folder = tmp_path_factory.mktemp("programs")
    return [write(program, folder).graph for program in programs_of(reader, 1)]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[ExportableProgram]:
    """The programs that were traced during the test."""
    programs: list[ExportableProgram] = []
    trace = ExportableProgram._trace_graph

    def recorded(program: ExportableProgram) -> torch.onnx.ONNXProgram:
        programs.append(program)
        return trace(program)

    monkeypatch.setattr(ExportableProgram, "_trace_graph", recorded)
    return programs


def outputs(program: bytes, inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return OnnxProgram(program)({name: x.numpy() for name, x in inputs.items()})


@pytest.mark.parametrize("number", [0, 1])
def test_a_filled_graph_is_the_program_that_tracing_gives(
    graphs: list[bytes],
    later: tuple[ExportableProgram, ExportableProgram],
    traced: list[ExportableProgram],
    tmp_path: Path,
    number: int,
) -> None:
    program = later[number]
    filled = write(program, tmp_path, graphs[number])
    again = write(program, tmp_path, filled.graph)
    assert traced == []
    reference = write(program, tmp_path)
    assert traced == [program]
    expected = outputs(reference.program, program.inputs)
    for written in (filled, again):
        found = outputs(written.program, program.inputs)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
    sizes = [len(onnx.load_model_from_string(w.program).graph.node) for w in (filled, reference)]
    assert sizes[0] == sizes[1]  # optimized alike


def test_a_graph_of_another_origin_is_not_filled(
    graphs: list[bytes],
    later: tuple[ExportableProgram, ExportableProgram],
    traced: list[ExportableProgram],
    tmp_path: Path,
) -> None:
    model = ir.from_proto(onnx.load_model_from_string(graphs[0]))
    model.metadata_props[TRACED_FROM] = "another"
    write(later[0], tmp_path, ir.to_proto(model).SerializeToString())
    assert traced == [later[0]]


def test_a_graph_that_computes_something_else_is_not_filled(
    graphs: list[bytes],
    later: tuple[ExportableProgram, ExportableProgram],
    traced: list[ExportableProgram],
    tmp_path: Path,
) -> None:
    """As after a change of code that is in no module of the program."""
    model = ir.from_proto(onnx.load_model_from_string(graphs[0]))
    last = next(node for node in reversed(list(model.graph)) if node.op_type == "Add")
    last.op_type = "Sub"
    written = write(later[0], tmp_path, ir.to_proto(model).SerializeToString())
    assert traced == [later[0]]
    found = outputs(written.program, later[0].inputs)
    for name, expected in later[0].outputs.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-4)


def test_the_origin_depends_on_the_architecture_alone(
    reader: ExampleReader, later: tuple[ExportableProgram, ExportableProgram]
) -> None:
    assert [p.origin for p in programs_of(reader, 1)] == [p.origin for p in later]
    assert later[0].origin != later[1].origin
    narrow, wide = (ExportableProgram(torch.nn.Linear(3, width), {}, {}) for width in (4, 5))
    assert narrow.origin != wide.origin


@pytest.mark.parametrize("number", [0, 1])
def test_the_origin_depends_on_configuration_and_fixed_sizes(
    later: tuple[ExportableProgram, ExportableProgram], number: int
) -> None:
    program = later[number]
    assert replace(program, built_from="another").origin != program.origin
    for name, x in program.inputs.items():
        for axis in range(x.ndim):
            inputs = program.inputs | {name: x.repeat_interleave(2, axis)}
            is_dynamic = axis in program.dynamic_shapes[name]
            assert (replace(program, inputs=inputs).origin == program.origin) is is_dynamic


def test_a_ranker_keeps_graphs_that_it_does_not_load(folder: Path) -> None:
    assert set(GRAPH_FILES) <= set(read_manifest(folder).file_hashes)
    graphs = read_graphs(folder)
    assert sorted(graphs) == sorted(GRAPH_FILES)
    for name in GRAPH_FILES:
        assert (folder / name).read_bytes() == graphs[name]
    assert load_ranker(folder).manifest.version == folder.name


def test_a_damaged_version_has_no_graphs(folder: Path, tmp_path: Path) -> None:
    assert read_graphs(tmp_path / "none") == {}
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / GRAPH_FILES[0]).write_bytes(b"another")
    assert read_graphs(copy) == {}


def test_a_program_that_was_traced_on_one_impression_scores_many(
    reader: ExampleReader, tmp_path: Path
) -> None:
    """A day that has just begun may have no more."""
    student = untrained_student(reader, 1)
    window = LabelWindow(0, 0, include_unlabelled=True)
    batches = reader.batches([LAST], window, 1, Shuffle(None))
    one = next(batch for batch in batches if len(batch) == 1)
    alone, together = (
        exportable_programs(student, student.input_builder(batch))
        for batch in (one, batch_of(reader, 30))
    )
    for traced, program in zip(alone, together, strict=True):
        stored = OnnxProgram(write(traced, tmp_path).program)
        outputs = stored({name: x.numpy() for name, x in program.inputs.items()})
        for name, expected in program.outputs.items():
            np.testing.assert_allclose(outputs[name], expected.detach().numpy(), atol=1e-4)
