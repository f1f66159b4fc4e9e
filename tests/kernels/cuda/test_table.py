"""The kernel table against the sources, and docs/kernels.md against both."""

from __future__ import annotations

import ctypes
import re

import pytest

from crucible.kernels import document, source
from crucible.kernels.ops_table import OPS
from crucible.kernels.table import KERNELS, Argument, KernelRow, kernel

SELECTIONS = {"argmax", "top_k"}
PARAMETERS = {ctypes.c_void_p: "u64", ctypes.c_int: "u32", ctypes.c_float: "f32"}


def parameters(name: str) -> dict[str, list[str]]:
    """The PTX types of the parameters of each kernel of a source, and its block size first."""
    pytest.importorskip("cupy")
    nvrtc = source._nvrtc()
    program = nvrtc.createProgram((source.source_dir() / name).read_text(encoding="utf-8"), name, (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_90", "-std=c++17", f"-I{source.source_dir()}"))
    ptx = nvrtc.getPTX(program).decode()
    nvrtc.destroyProgram(program)
    found = {}
    for entry, text, block in re.findall(r"\.entry (\w+)\((.*?)\)\s*\.maxntid (\d+)", ptx, re.DOTALL):
        found[entry] = [block, *re.findall(r"\.param \.(\w+)", text)]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted({row.source for row in KERNELS}))
def test_rows_say_what_the_sources_say(name: str) -> None:
    """Each kernel of a source that the table knows has a row, with its number and types of arguments."""
    rows = {row.name: row for row in KERNELS if row.source == name}
    found = parameters(name)
    assert set(found) == set(rows)
    for entry, (block, *types) in found.items():
        assert types == [PARAMETERS[c] for c in rows[entry].ctypes], entry
        assert int(block) == rows[entry].threads, entry


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
def test_a_row_is_sound(row: KernelRow) -> None:
    assert re.fullmatch(r"crucible_[a-z0-9_]+", row.name)
    assert row.op in {op.name for op in OPS} | SELECTIONS
    assert row.threads % 32 == 0
    names = [argument.name for argument in row.arguments]
    assert len(set(names)) == len(names)
    integers = {argument.name for argument in row.arguments if argument.ctype is ctypes.c_int}
    assert set(row.limits) <= integers
    assert kernel(row.name) is row


def test_no_kernel_without_a_row() -> None:
    assert set(source.source_names()) == {row.source for row in KERNELS}


def test_names_are_unique() -> None:
    assert len({row.name for row in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("text", ["x", "x:f64", "x:f16", "x:f99*", "x:i32?", "x:any", "x y:i32", "x:f16**"])
def test_an_argument_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="name:i32"):
        Argument.parse(text)


def test_arguments() -> None:
    assert Argument.parse("n:i32") == Argument("n", ctypes.c_int)
    assert Argument.parse("eps:f32") == Argument("eps", ctypes.c_float)
    assert Argument.parse("x:f32*") == Argument("x", ctypes.c_void_p, "f32")
    assert Argument.parse("x:any*?") == Argument("x", ctypes.c_void_p, "any", True)


def test_the_document_is_current() -> None:
    """Make it anew with ``python -m crucible.kernels.document``."""
    text = document.PATH.read_text(encoding="utf-8")
    table, mark, usage = text.partition("\n## Registers")
    assert table == document.render_table()
    pytest.importorskip("cupy")
    version = ".".join(map(str, source.nvrtc_version()))
    if f"by NVRTC {version}." not in usage:
        pytest.skip(f"the registers in {document.PATH.name} are those of another NVRTC than {version}")
    assert mark + usage == document.render_usage(document.compile_kernels())
