"""The command line. Results go to standard output; progress and errors to standard error.

Exit codes: 0 done, 1 a requirement is not met (or two models are not equal, or the installation is broken), 2 bad usage
or input. An error is one line; GRAPHREWRITE_DEBUG=1 shows where it came from.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

# Everything that loads a model library is imported inside the commands: help and usage errors answer at once.
from graphrewrite.bench.command import bench
from graphrewrite.errors import GraphRewriteError, InputError, RequirementNotMet

if TYPE_CHECKING:
    from graphrewrite.models import LoadedModel
    from graphrewrite.report import Report

NOT_MET, BAD_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Fuse attention over a quantized KV cache in exported models into one operator that reads the cache in place.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class PassChoice(str, Enum):
    """The passes of `graphrewrite.rewrite`."""

    fuse_quantized_sdpa = "fuse_quantized_sdpa"
    separate_cache_update = "separate_cache_update"


class CurrentTokensChoice(str, Enum):
    """How keys and values of the current tokens are read."""

    exact = "exact"
    quantized = "quantized"


class WeightsChoice(str, Enum):
    """What becomes of the files that hold a model's weights."""

    gather = "gather"
    copy = "copy"
    link = "link"


Require = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Exit with 1 unless at least N attentions are fused.")
]


def main() -> NoReturn:
    """Runs the command line and exits."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs the command line and returns the exit code."""
    try:
        with _quiet_libraries():
            code = app(args=arguments, prog_name="graphrewrite", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader went away, as with `| head`. What is still buffered must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if _debugging():
            raise
        return _fail(error)


def _debugging() -> bool:
    return os.environ.get("GRAPHREWRITE_DEBUG") == "1"


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keeps warnings of the model libraries, which come with tracebacks of theirs, out of standard error."""
    if _debugging():
        yield
        return
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _fail(error: Exception) -> int:
    """Says in one line what is wrong, and returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(str(error))
        return BAD_INPUT
    code = NOT_MET if isinstance(error, RequirementNotMet) else BAD_INPUT
    if isinstance(error, GraphRewriteError):
        message = str(error)
    elif hasattr(error, "format_message"):  # a usage error; the class depends on the version of the parser
        message = f"{error.format_message()} (see graphrewrite --help)"
    else:
        message = f"unexpected {type(error).__name__}: {error} (GRAPHREWRITE_DEBUG=1 shows where; please report it)"
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _version(show: bool) -> None:
    if show:
        import graphrewrite

        print(f"graphrewrite {graphrewrite.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .onnx or .pt2 file.")],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="The file to write; .onnx for an IN of .pt2 exports it. Not for --dry-run."),
    ] = None,
    require: Require = None,
    current_tokens: Annotated[
        CurrentTokensChoice,
        typer.Option(help="Read the current tokens' keys and values as the source does, or from the cache (lossy)."),
    ] = CurrentTokensChoice.exact,
    passes: Annotated[
        list[PassChoice],
        typer.Option("--pass", help="A pass to run; repeat it for several. separate_cache_update is for float caches."),
    ] = [PassChoice.fuse_quantized_sdpa],  # noqa: B006 - typer reads it and does not change it
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; write no model.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report to a .json or .html file as well.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run both models on random inputs first; exit with 1 if they differ.")
    ] = False,
    weights: Annotated[
        WeightsChoice,
        typer.Option(
            help="Of weights in files beside IN: write those in use into one file; copy the files as they are; or link "
            "them (hard links: no time and no space, and then only onnxruntime reads them, not onnx)."
        ),
    ] = WeightsChoice.gather,
) -> None:
    """Rewrite a model. OUT is written only when something was rewritten and every requirement is met."""
    _check_paths(source, target, report, dry_run)
    import graphrewrite as gr
    from graphrewrite.files import save
    from graphrewrite.models import load

    with _progress(f"reading {source}"):
        model = load(source)
    try:
        with _progress("matching"):
            result = gr.rewrite(
                cast("Any", model),
                passes=[one.value for one in passes],
                require=require,
                current_tokens=current_tokens.value,
                dry_run=dry_run,
            )
    except RequirementNotMet as error:
        _show(error.report, report)
        raise
    if not result.report.attention_cores:
        raise InputError(f"{source}: {result.report.summary()}, so there is nothing to rewrite")
    _show(result.report, report)
    if dry_run or target is None:
        return
    if not result.report.sites:
        print(f"nothing was rewritten; {target} is not written")
        return
    with _progress("exporting"):
        rewritten = _as_target(result.model, target)
    if verify:
        _verify_rewrite(source, rewritten)
    with _progress(f"writing {target}"):
        save(rewritten, target, source=source, weights=weights.value)
    print(f"wrote {target}")


def _check_paths(source: Path, target: Path | None, report: Path | None, dry_run: bool) -> None:
    """Refuses what cannot work before anything is read."""
    _check_model_path(source)
    if target is None and not dry_run:
        raise InputError("OUT is missing; give the file to write, or --dry-run")
    kinds = {".onnx": (".onnx",), ".pt2": (".pt2", ".onnx")}[source.suffix]
    if target is not None and target.suffix not in kinds:
        raise InputError(f"{target}: a {source.suffix} file is rewritten to {' or '.join(kinds)}; name it so")
    from graphrewrite.files import check_output

    if target is not None and not dry_run:
        check_output(target, source)
    if report is not None:
        _check_report_path(report, source, (".json", ".html"))


def _check_model_path(path: Path) -> None:
    from graphrewrite.models import check_model_path

    check_model_path(path)


def _check_report_path(path: Path, source: Path, suffixes: tuple[str, ...]) -> None:
    """The suffix keeps a report apart from every model; what is left is IN under another name."""
    from graphrewrite.files import check_output

    if path.suffix not in suffixes:
        raise InputError(f"{path}: unknown suffix {path.suffix!r}; the report is a {' or a '.join(suffixes)} file")
    check_output(path, source)


def _as_target(model: LoadedModel, target: Path) -> LoadedModel:
    from graphrewrite.models import is_exported_program

    if target.suffix != ".onnx" or not is_exported_program(model):
        return model
    import graphrewrite as gr

    return gr.export_onnx(cast("Any", model))


def _verify_rewrite(source: Path, rewritten: LoadedModel) -> None:
    import graphrewrite as gr

    with _progress("verifying"):
        verification = gr.verify(source, cast("Any", rewritten))
    verification.print()
    if not verification:
        raise _NotEqual(f"the rewritten model is not equal to {source}; it is not written")


class _NotEqual(RequirementNotMet):
    """The requirement that two models are equal, which has no report of sites."""

    def __init__(self, message: str) -> None:
        GraphRewriteError.__init__(self, message)


@app.command()
def explain(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .onnx or .pt2 file.")],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as a page, a .html file, as well.")
    ] = None,
    require: Require = None,
) -> None:
    """Say what a rewrite would match, and why it would leave the rest."""
    _check_model_path(source)
    if html is not None:
        _check_report_path(html, source, (".html",))
    import graphrewrite as gr

    with _progress(f"reading {source} and matching"):
        report = gr.explain(source)
    if html is not None:
        from graphrewrite.files import save_text

        save_text(report.to_html(), html)
    if json:
        print(report.to_json())
    else:
        report.print()
    fused = len(report.sites) + report.already_fused
    if require is not None and fused < require:
        raise RequirementNotMet(f"{require} fused attentions are required and {fused} found", report)


@app.command()
def verify(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="The model that is right: .onnx or .pt2.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The model in question: .onnx or .pt2.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to run, caches carried along.")] = 4,
    rtol: Annotated[float | None, typer.Option(min=0, help="Relative tolerance; default: derived.")] = None,
    atol: Annotated[float | None, typer.Option(min=0, help="Absolute tolerance; default: derived.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run two models on the same random inputs and compare outputs and caches. Exit with 1 if they differ."""
    _check_model_path(before)
    _check_model_path(after)
    import graphrewrite as gr

    with _progress("verifying"):
        result = gr.verify(before, after, steps=steps, rtol=rtol, atol=atol, seed=seed)
    if json:
        print(result.to_json())
    else:
        result.print()
    if not result:
        raise typer.Exit(NOT_MET)


app.command()(bench)


@app.command()
def doctor() -> None:
    """Check the installation: versions, the kernel library, a tiny run of it. Exit with 1 if something is broken."""
    from graphrewrite.doctor import examine, print_checks

    checks = examine()
    print_checks(checks)
    if any(check.ok is False for check in checks):
        raise typer.Exit(NOT_MET)


@app.command()
def ops() -> None:
    """Print the path of the kernel library, and how to register it from other languages."""
    import graphrewrite as gr

    path = gr.ops_library_path()
    print(path)
    print("  Python  session_options.register_custom_ops_library(path)")
    print("  C       ort->RegisterCustomOpsLibrary_V2(session_options, path)")
    print("  C#      sessionOptions.RegisterCustomOpLibrary(path)")
    print("  Java    sessionOptions.registerCustomOpLibrary(path)")


def _show(report: Report, file: Path | None) -> None:
    report.print()
    if file is not None:
        from graphrewrite.files import save_text

        save_text(report.to_json() if file.suffix == ".json" else report.to_html(), file)


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Shows on a terminal what is being done; where standard error is no terminal, nothing."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
