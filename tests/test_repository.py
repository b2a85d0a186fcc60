"""What holds for every file of the repository: no traces of one machine, small source files, documented modules."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
SOURCE_SUFFIXES = {".cpp", ".h", ".hpp", ".py"}

# Each stands for a way in which a file can depend on the machine it was written on.
PRIVATE_NETWORKS = r"10\.\d{1,3}|127\.\d{1,3}|192\.168|172\.(?:1[6-9]|2\d|3[01])"
MACHINE_TRACES = {
    "a folder of one machine": re.compile(r"(?<![\w.$}])/(?:home|root|Users|work|opt|tmp|mnt|srv)/\w"),
    "a folder of one Windows machine": re.compile(r"\b[A-Z]:\\{1,2}Users\b"),
    "a private network address": re.compile(rf"\b(?:{PRIVATE_NETWORKS})(?:\.\d{{1,3}}){{2}}\b"),
    "a host of one network": re.compile(r"\bhttps?://(?:localhost|[\w.-]+\.(?:internal|lan|local))\b"),
    "a package registry": re.compile(r"python[h]osted|pypi\.org/simple|\bdownload\.pytorch|--(?:extra-)?index-url "),
}


def repository_files() -> list[Path]:
    """The files that are, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_of(path: Path) -> str | None:
    """The file's text, or None for a binary file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def machine_traces(text: str) -> list[str]:
    """`kind: line` for every line that names something of one machine."""
    return [
        f"{kind}: {line.strip()[:120]}"
        for line in text.splitlines()
        for kind, pattern in MACHINE_TRACES.items()
        if pattern.search(line)
    ]


def describe(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


in_a_git_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="looks at the files that git knows")


@in_a_git_checkout
def test_no_file_names_a_machine() -> None:
    found = {describe(path): traces for path in repository_files() if (traces := machine_traces(text_of(path) or ""))}
    assert not found


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("model = load('/" + "home/someone/model.onnx')", ["a folder of one machine"]),
        ("cache: /" + "tmp/x", ["a folder of one machine"]),
        ("see tests/tmp/x and ../work/y", []),
        ("C:" + "\\Users", ["a folder of one Windows machine"]),
        ("listen on 192.168" + ".0.1", ["a private network address"]),
        ("listen on 10.0" + ".0.1:80", ["a private network address"]),
        ("torch==2.13.0, version 10.15.0", []),
        ("http://" + "localhost:8000", ["a host of one network"]),
        ("pip install --index-url" + " x", ["a package registry"]),
        ("https://onnx.ai/onnx/operators/", []),
    ],
)
def test_machine_traces_are_told_from_ordinary_text(text: str, kinds: list[str]) -> None:
    assert [trace.split(": ")[0] for trace in machine_traces(text)] == kinds


@in_a_git_checkout
def test_source_files_stay_small() -> None:
    sizes = {
        describe(path): len((text_of(path) or "").splitlines())
        for path in repository_files()
        if path.suffix in SOURCE_SUFFIXES
    }
    assert {name: lines for name, lines in sizes.items() if lines >= MAX_LINES} == {}


@in_a_git_checkout
def test_every_module_says_what_it_is_for() -> None:
    modules = [path for path in repository_files() if path.suffix == ".py"]
    assert modules
    silent = [describe(path) for path in modules if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent
