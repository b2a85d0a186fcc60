"""What an installation holds: the wheel's files, what the core imports, and what the kernel library exports."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from graphrewrite.custom_ops import library_path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "graphrewrite": ROOT / "graphrewrite",
    "graphrewrite.patterns": ROOT / "patterns",
    "graphrewrite.custom_ops": ROOT / "custom_ops",
}

# Distributions of the extras [torch] and [mlir]; executorch is used when it is present.
OPTIONAL = ("torch", "torchgen", "onnxscript", "torch_mlir", "executorch")
# Modules that exist for an extra. Everything else is core.
FOR_EXTRAS = ("graphrewrite.fx.", "graphrewrite.source_ops", "graphrewrite.custom_ops.torch_ops")

IMPORT_CORE = textwrap.dedent(
    """
    import importlib, sys

    optional, modules, block = {optional!r}, {modules!r}, {block!r}

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in optional:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    if block:
        sys.meta_path.insert(0, Absent())
    for module in modules:
        importlib.import_module(module)
        loaded = [name for name in optional if name in sys.modules]
        assert not loaded, f"importing {{module}} imported {{loaded}}"
    """
)


def run_python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    """The names of all modules of the three packages."""
    found = set()
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found.add(".".join((package, *parts)).removesuffix(".__init__"))
    return sorted(found)


@pytest.mark.parametrize("block", [True, False], ids=["without the extras", "with the extras installed"])
def test_core_imports_nothing_of_the_extras(block: bool, tmp_path: Path) -> None:
    core = [module for module in modules() if not module.startswith(FOR_EXTRAS)]
    assert {"graphrewrite", "graphrewrite.cli", "graphrewrite.fx", "graphrewrite.custom_ops"} <= set(core)
    run_python("-c", IMPORT_CORE.format(optional=OPTIONAL, modules=core, block=block), cwd=tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the symbol table of an ELF file")
def test_library_exports_its_interface_and_nothing_else() -> None:
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library_path())]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    symbols = {line.split()[0] for line in listing.splitlines()}
    assert {
        "RegisterCustomOps",
        "gr_isa",
        "gr_operators",
        "gr_run",
        "gr_set_isa",
        "gr_version",
    } <= symbols
    assert {name for name in symbols if not re.fullmatch(r"RegisterCustomOps|gr_\w+", name)} == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel as `pip install .` builds it, except that it takes the objects that `make setup` compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", f"--wheel-dir={folder}"]
    run_python("-m", "pip", "wheel", *options, str(ROOT), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_packages_and_the_library(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
    }
    expected |= {"graphrewrite/py.typed", f"graphrewrite/custom_ops/{library_path().name}"}
    assert expected <= names
    # Templates and the like are data of the packages; sources and build files are not.
    suffixes = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert suffixes <= {".py", ".typed", ".so", ".dylib", ".dll", ".html", ".j2", ".json", ".txt"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_one_wheel_serves_every_python_version(wheel: Path) -> None:
    assert re.fullmatch(r"graphrewrite-[\d.]+-py3-none-\w+\.whl", wheel.name)


def test_wheel_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # -S leaves out site-packages, and with it the editable installation; the dependencies come back as a plain path.
    dependencies = str(Path(pytest.__file__).parent.parent)
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {dependencies!r}]
import ctypes, graphrewrite.patterns
from graphrewrite.custom_ops import library_path
version = ctypes.CDLL(str(library_path())).gr_version
version.restype = ctypes.c_char_p
print(library_path(), version().decode())
"""
    path, version = run_python("-S", "-c", code, cwd=tmp_path).split()
    assert Path(path).is_relative_to(tmp_path)
    assert version == wheel.name.split("-")[1]
