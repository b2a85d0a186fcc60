"""The library as a file: what it exports, how it picks an instruction set, and that C can include its header."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphrewrite.custom_ops import capi, library_path
from graphrewrite.errors import KernelError
from tests.kernels.calls import instruction_sets

HEADER_FOLDER = Path(__file__).parents[2] / "custom_ops" / "include"


def run_python(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GRAPHREWRITE_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_version_and_instruction_set() -> None:
    assert len(capi.version().split(".")) == 3
    assert capi.isa() in ("scalar", "avx2", "avx512")


@pytest.mark.skipif(shutil.which("nm") is None or sys.platform != "linux", reason="needs nm and ELF")
def test_exports_only_its_interface() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library_path())], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    assert names == {
        "RegisterCustomOps",
        *("gr_version", "gr_isa", "gr_set_isa", "gr_operators", "gr_run"),
    }


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_environment_selects_the_instruction_set(isa: str) -> None:
    if isa not in instruction_sets():
        pytest.skip(f"this processor does not run {isa}")
    result = run_python("from graphrewrite.custom_ops import capi; print(capi.isa())", isa)
    assert result.stdout.strip() == isa, result.stderr


def test_unknown_instruction_set_in_the_environment() -> None:
    code = "from graphrewrite.custom_ops import capi; capi.isa()"
    result = run_python(code, "mmx")
    assert result.returncode != 0
    assert 'GRAPHREWRITE_ISA "mmx" is unknown, expected "scalar", "avx2" or "avx512"' in result.stderr
    code = (
        "import onnxruntime as ort; from graphrewrite.custom_ops import library_path;"
        "ort.SessionOptions().register_custom_ops_library(str(library_path()))"
    )
    result = run_python(code, "mmx")
    assert result.returncode != 0
    assert 'RegisterCustomOps: GRAPHREWRITE_ISA "mmx" is unknown' in result.stderr


def test_unknown_instruction_set_changes_nothing() -> None:
    before = capi.isa()
    with pytest.raises(KernelError, match='gr_set_isa: instruction set "mmx" is unknown'):
        capi.set_isa("mmx")
    assert capi.isa() == before


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_header_is_plain_c(tmp_path: Path) -> None:
    source = tmp_path / "use.c"
    source.write_text('#include "graphrewrite/kernels.h"\nint main(void) { return gr_version() == NULL; }\n')
    program = tmp_path / "use"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADER_FOLDER}"]
    library = library_path()
    link = [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(program), *link], check=True)
    subprocess.run([str(program)], check=True)
