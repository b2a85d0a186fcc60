"""The command line: exit codes, one line for each error, and no file where something went wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_forms
import onnx_ir as ir
import pytest
from decoder_models import toy_decoder

import graphrewrite
from graphrewrite import cli, doctor, sessions
from graphrewrite.errors import LibraryError
from graphrewrite.report import Mismatch, Report, SiteSummary


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with good and bad inputs, and made the current one."""
    ir.save(onnx_forms.build(), tmp_path / "attention.onnx")
    onnx.save(toy_decoder(), tmp_path / "plain.onnx")
    content = (tmp_path / "attention.onnx").read_bytes()
    (tmp_path / "truncated.onnx").write_bytes(content[: len(content) // 2])
    (tmp_path / "random.onnx").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("this is no model\n")
    (tmp_path / "model.bin").write_bytes(content)
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "random.pt2").write_bytes(np.random.default_rng(0).bytes(5000))
    with zipfile.ZipFile(tmp_path / "zip.pt2", "w") as archive:
        archive.writestr("letter.txt", "hello")
    (tmp_path / "page.html").symlink_to("attention.onnx")
    (tmp_path / "link.onnx").symlink_to("page.html")
    os.mkfifo(tmp_path / "pipe.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        # usage
        ("", 2, None),
        ("nonsense", 2, "No such command 'nonsense'"),
        ("rewrite", 2, "Missing argument 'IN'"),
        ("rewrite attention.onnx", 2, "OUT is missing"),
        ("rewrite attention.onnx out.onnx --require many", 2, "--require"),
        ("rewrite attention.onnx out.onnx --require -1", 2, "--require"),
        ("rewrite attention.onnx out.onnx --current-tokens sometimes", 2, "--current-tokens"),
        ("rewrite attention.onnx out.onnx --unknown", 2, "--unknown"),
        ("verify attention.onnx", 2, "Missing argument 'AFTER'"),
        ("verify attention.onnx plain.onnx --steps 0", 2, "--steps"),
        # input
        ("rewrite none.onnx out.onnx", 2, "none.onnx: no such file"),
        ("rewrite folder.onnx out.onnx", 2, "folder.onnx: not a file"),
        ("rewrite empty.onnx out.onnx", 2, "empty.onnx: not an ONNX model"),
        ("rewrite random.onnx out.onnx", 2, "random.onnx: not an ONNX model"),
        ("rewrite text.onnx out.onnx", 2, "text.onnx: not an ONNX model"),
        ("rewrite truncated.onnx out.onnx", 2, "truncated.onnx: not an ONNX model"),
        ("rewrite model.bin out.onnx", 2, "model.bin: unknown suffix '.bin'"),
        ("rewrite none.pt2 out.pt2", 2, "none.pt2: no such file"),
        ("rewrite random.pt2 out.pt2", 2, "random.pt2: not a torch.export program"),
        ("rewrite zip.pt2 out.pt2", 2, "zip.pt2: not a torch.export program"),
        ("explain none.onnx", 2, "no such file"),
        ("explain empty.onnx", 2, "not an ONNX model"),
        ("explain model.bin", 2, "unknown suffix"),
        ("verify none.onnx plain.onnx", 2, "none.onnx: no such file"),
        ("verify plain.onnx random.onnx", 2, "random.onnx: not an ONNX model"),
        ("verify plain.onnx attention.onnx", 2, "inputs do not correspond"),
        # output
        ("rewrite attention.onnx none/out.onnx", 2, "the folder none does not exist"),
        ("rewrite attention.onnx attention.onnx", 2, "attention.onnx is the input itself"),
        ("rewrite attention.onnx ./attention.onnx", 2, "is the input itself"),
        ("rewrite attention.onnx folder.onnx", 2, "folder.onnx is a folder"),
        ("rewrite attention.onnx out.pt2", 2, "out.pt2: a .onnx file is rewritten to .onnx"),
        ("rewrite attention.onnx out.txt", 2, "out.txt: a .onnx file is rewritten to .onnx"),
        ("rewrite attention.onnx /proc/out.onnx", 2, "/proc/out.onnx"),
        ("rewrite attention.onnx out.onnx --report report.txt", 2, "report.txt: unknown suffix"),
        ("rewrite attention.onnx out.onnx --report none/report.json", 2, "the folder none does not exist"),
        ("explain attention.onnx --html none/page.html", 2, "the folder none does not exist"),
        ("explain attention.onnx --html attention.onnx", 2, "attention.onnx: unknown suffix '.onnx'"),
        ("explain attention.onnx --html page.json", 2, "the report is a .html file"),
        ("explain attention.onnx --html page.html", 2, "page.html is the input itself"),
        ("explain link.onnx --html page.html", 2, "page.html is the input itself"),
        ("explain plain.onnx --html page.html", 2, "page.html is a symbolic link to attention.onnx"),
        ("rewrite attention.onnx out.onnx --report attention.onnx", 2, "attention.onnx: unknown suffix"),
        ("rewrite attention.onnx out.onnx --report out.onnx", 2, "out.onnx: unknown suffix"),
        ("rewrite attention.onnx out.onnx --report page.html", 2, "page.html is the input itself"),
        ("rewrite attention.onnx pipe.onnx", 2, "pipe.onnx exists and is not a regular file"),
        ("rewrite pipe.onnx out.onnx", 2, "pipe.onnx: not a file"),
        (f"rewrite {'n' * 300}.onnx out.onnx", 2, "File name too long"),
        (f"rewrite attention.onnx {'n' * 300}.onnx", 2, "File name too long"),
        ("explain no\0.onnx", 2, "null byte"),
        # requirements
        ("rewrite attention.onnx out.onnx --require 2", 1, "2 fused attentions are required"),
        ("rewrite plain.onnx out.onnx --require 1", 1, "1 fused attentions are required"),
        ("explain attention.onnx --require 2", 1, "2 fused attentions are required"),
    ],
)
def test_errors_are_one_line_with_a_code_and_leave_no_file(
    arguments: str, code: int, message: str | None, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    content = (folder / "attention.onnx").read_bytes()
    assert cli.run(arguments.split()) == code
    errors = capfd.readouterr().err
    if message is not None:
        assert errors.startswith("error: ") and errors.count("\n") == 1 and errors.endswith("\n"), errors
        assert message in errors
    assert files(folder) == before
    assert (folder / "attention.onnx").read_bytes() == content


def test_rewrite_writes_and_says_so(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["rewrite", "attention.onnx", "out.onnx", "--require", "1", "--verify"]) == 0
    out, errors = capfd.readouterr()
    assert errors == ""
    assert "1 of 1 attention sites matched" in out and "equal within the tolerance" in out
    assert out.endswith("wrote out.onnx\n")
    assert "CustomSdpa" in {node.op_type for node in onnx.load("out.onnx").graph.node}
    assert cli.run(["verify", "attention.onnx", "out.onnx"]) == 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved torch program with one attention over a quantized cache that reads the current tokens exactly."""
    torch = pytest.importorskip("torch")
    fx_forms = importlib.import_module("fx_forms")
    path = tmp_path_factory.mktemp("program") / "joint.pt2"
    torch.export.save(fx_forms.export(fx_forms.Layer("joint")), path)
    return path


@pytest.mark.parametrize("target", ["out.pt2", "out.onnx"])
def test_a_torch_program_is_rewritten_and_exported(
    target: str, program: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["rewrite", str(program), target, "--require", "1", "--verify"]) == 0
    out, errors = capfd.readouterr()
    assert errors == ""
    assert "equal within the tolerance over 4 steps" in out and f"wrote {target}" in out
    # What was written is the rewritten model, and it is equal when it is read again.
    assert cli.run(["verify", str(program), target]) == 0
    assert cli.run(["explain", target, "--require", "1"]) == 0


def test_verify_tells_that_reading_current_tokens_from_the_cache_is_lossy(
    program: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["rewrite", str(program), "out.pt2", "--current-tokens", "quantized"]
    assert cli.run([*arguments, "--verify"]) == 1
    out = capfd.readouterr().out
    assert "current tokens quantized" in out and "diverges first, at step 0" in out
    assert not Path("out.pt2").exists()
    assert cli.run(arguments) == 0
    assert Path("out.pt2").exists()


def test_a_rewritten_model_meets_the_requirement_and_is_not_written_again(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["rewrite", "attention.onnx", "out.onnx"]) == 0
    capfd.readouterr()
    assert cli.run(["rewrite", "out.onnx", "again.onnx", "--require", "1"]) == 0
    assert "nothing was rewritten; again.onnx is not written" in capfd.readouterr().out
    assert not Path("again.onnx").exists()


def test_a_model_without_attention(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    assert cli.run(["rewrite", "plain.onnx", "out.onnx"]) == 2
    captured = capfd.readouterr()
    assert captured.err.splitlines() == [
        "error: plain.onnx: no attention found in this model, so there is nothing to rewrite"
    ]
    assert captured.out == "" and files(folder) == before


@pytest.mark.parametrize("arguments", ["rewrite attention.onnx --dry-run", "rewrite attention.onnx o.onnx --dry-run"])
def test_dry_run_writes_nothing(arguments: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    assert cli.run(arguments.split()) == 0
    assert "1 of 1 attention sites matched" in capfd.readouterr().out
    assert files(folder) == before


@pytest.mark.parametrize(("require", "code"), [("1", 0), ("2", 1)])
def test_report_files_are_written_whether_the_requirement_is_met_or_not(require: str, code: int, folder: Path) -> None:
    for name in ("r.json", "r.html"):
        assert cli.run(["rewrite", "attention.onnx", "out.onnx", "--require", require, "--report", name]) == code
    document = json.loads(Path("r.json").read_text())
    assert document["summary"] == "1 of 1 attention sites matched"
    assert "1 of 1 attention sites matched" in Path("r.html").read_text()
    assert Path("out.onnx").exists() is (code == 0)


def test_explain_as_json_is_nothing_but_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain", "attention.onnx", "--json", "--html", "p.html"]) == 0
    out, errors = capfd.readouterr()
    assert json.loads(out)["attention_cores"] == 1 and errors == ""
    assert Path("p.html").read_text().startswith("<!doctype html>")


def test_verify_unequal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(toy_decoder(bias=0.5), "biased.onnx")
    assert cli.run(["verify", "plain.onnx", "biased.onnx"]) == 1
    out, errors = capfd.readouterr()
    assert "not equal: output 'logits' diverges first, at step 0" in out and errors == ""
    assert cli.run(["verify", "plain.onnx", "biased.onnx", "--atol", "1", "--rtol", "1"]) == 0
    capfd.readouterr()
    assert cli.run(["verify", "plain.onnx", "biased.onnx", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["ok"] is False


def test_a_rewrite_that_verify_finds_unequal_is_not_written(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = graphrewrite.rewrite("attention.onnx")
    node = next(node for node in result.model.graph if node.op_type == "CustomSdpa")
    node.attributes["scale"] = ir.AttrFloat32("scale", 3.0)
    monkeypatch.setattr(graphrewrite, "rewrite", lambda *_, **__: result)
    assert cli.run(["rewrite", "attention.onnx", "out.onnx", "--verify"]) == 1
    out, errors = capfd.readouterr()
    assert "not equal: output 'output' diverges first" in out
    assert "not equal to attention.onnx; it is not written" in errors
    assert not Path("out.onnx").exists()


def test_unexpected_errors_are_one_line_and_a_traceback_on_demand(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(graphrewrite, "explain", fail)
    assert cli.run(["explain", "plain.onnx"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1 and "unexpected ZeroDivisionError: a b" in errors
    monkeypatch.setenv("GRAPHREWRITE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.run(["explain", "plain.onnx"])


def test_doctor_on_a_sound_installation(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    out = capfd.readouterr().out
    assert "CustomSdpa in onnxruntime equals numpy" in out and "BROKEN" not in out
    assert str(sessions.ops_library_path()) in out


def test_doctor_names_what_is_broken(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise LibraryError("the kernel library is not there")

    monkeypatch.setattr(sessions, "library_path", missing)
    assert cli.run(["doctor"]) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if "BROKEN" in line]
    assert [line.split("BROKEN")[0].strip() for line in lines] == ["kernel library", "self test"]
    assert all("the kernel library is not there" in line for line in lines)


def test_doctor_finds_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = doctor._attention
    monkeypatch.setattr(doctor, "_attention", lambda *arguments: honest(*arguments) + 1e-4)
    checks = {check.name: check for check in doctor.examine()}
    assert checks["self test"].ok is False and "off by 1.00e-04" in checks["self test"].detail


def test_ops_prints_a_path_that_exists_and_how_to_use_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ops"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert Path(lines[0]).is_file()
    assert [line.split()[0] for line in lines[1:]] == ["Python", "C", "C#", "Java"]


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capfd.readouterr().out == f"graphrewrite {graphrewrite.__version__}\n"


def test_the_command_is_installed_and_starts_fast() -> None:
    command = Path(sys.executable).with_name("graphrewrite")
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
        durations.append(time.perf_counter() - start)
    assert "rewrite" in done.stdout and done.stderr == ""
    # The best of three, as other work on the machine slows single runs: 0.15 s on two idle cores.
    assert min(durations) < 0.5


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["torch", "onnx", "onnxruntime", "numpy"]),
        (["rewrite", "attention.onnx", "out.onnx", "--verify"], ["torch", "torch_mlir"]),
        (["doctor"], ["torch", "torch_mlir"]),
    ],
)
def test_what_is_not_needed_is_not_imported(arguments: list[str], absent: list[str], folder: Path) -> None:
    program = (
        "import sys; from graphrewrite import cli; code = cli.run(sys.argv[1:]); "
        f"sys.exit(code or str([name for name in {absent} if name in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) in ((0, ""), (1, "")), done.stderr


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    program = f"{sys.executable} -c 'from graphrewrite import cli; cli.main()' explain attention.onnx --json | true"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def site(index: int, **changes: Any) -> SiteSummary:
    values: dict[str, Any] = {
        "name": f"layer{index}",
        "pattern": "joint",
        "layout": "BSNH",
        "query_heads": 9,
        "kv_heads": 3,
        "head_size": 64,
        "capacity": 8192,
        "current_tokens": "exact",
        "updates": "key+value",
        "notes": ("a <note>",),
    }
    return SiteSummary(**{**values, **changes})


def refusal(index: int) -> Mismatch:
    return Mismatch("mask-form", f"the mask of {index} <is> [red]odd[/red]", (f"n{index}", "m"), "joint", "change it")


def test_equal_sites_and_refusals_are_shown_once_on_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    Report((site(0), site(1), site(2, capacity=16)), (refusal(0), refusal(1), refusal(2)), already_fused=1).print()
    assert capfd.readouterr().out.splitlines() == [
        "matched 2 x joint  layer0 .. layer1",
        "  9 query heads, 3 KV heads of size 64, capacity 8192, BSNH; current tokens exact; fused updates: key+value",
        "matched 1 x joint  layer2",
        "  9 query heads, 3 KV heads of size 64, capacity 16, BSNH; current tokens exact; fused updates: key+value",
        "note: a <note>",
        "not rewritten [mask-form] the mask of 0 <is> [red]odd[/red]",
        "  nodes: n0, m",
        "  nearest pattern: joint",
        "  remedy: change it",
        "  likewise: n1 .. n2 (2 more)",
        "3 of 7 attention sites matched, 1 already fused",
    ]


def test_the_page_lists_each_and_escapes_and_refers_to_nothing() -> None:
    page = Report((site(0), site(1)), (refusal(0),)).to_html()
    assert "layer0" in page and "layer1" in page and "a &lt;note&gt;" in page and "&lt;is&gt;" in page
    assert "http" not in page and "src=" not in page and "href=" not in page
    assert "There was nothing to rewrite." in Report((), ()).to_html()
