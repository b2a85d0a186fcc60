"""The command `graphrewrite bench`. What it measures is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrewrite.errors import InputError

if TYPE_CHECKING:
    from graphrewrite.bench.case import Case, Layer
    from graphrewrite.bench.tables import Grid

_SCHEMES = "int8,int8-symmetric,int4,float32"
_PEERS = "unfused,onnxruntime,torch,llama.cpp,openvino,executorch"
_CONTEXTS, _ROWS = "1024,4096,16384,32768", "512,2048"
_MODEL_CONTEXTS = "256,2048,8000"
_FILE_WIDTH = 160


class _Layout(str, Enum):
    BSNH = "BSNH"
    BNSH = "BNSH"


class _CurrentTokens(str, Enum):
    exact = "exact"
    quantized = "quantized"


def _file(text: str) -> Any:
    return typer.Option(metavar="FILE", help=text)


def bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A .onnx file with caches. Without one: an attention layer.")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(metavar="OTHER", help="Hold MODEL against this .onnx file. May be repeated.")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help=f"Positions of decode steps. Default: {_CONTEXTS}; of models {_MODEL_CONTEXTS}.")
    ] = None,
    prefill: Annotated[str, typer.Option(help="Rows of a layer's prefill; ROWS@CONTEXT after cached positions.")] = (
        _ROWS
    ),
    query_heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_size: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    ragged: Annotated[bool, typer.Option("--ragged", help="Sequences of 1/B, 2/B .. 1 of the context.")] = False,
    capacity: Annotated[int | None, typer.Option(min=1, help="Slots of the caches. Default: the context.")] = None,
    layout: Annotated[_Layout, typer.Option(help="Of our own operators' tensors.")] = _Layout.BSNH,
    current_tokens: Annotated[
        _CurrentTokens, typer.Option(help="Read a quantized cache's new rows exactly or as it holds them.")
    ] = _CurrentTokens.exact,
    schemes: Annotated[str, typer.Option(help="Of our own caches.")] = _SCHEMES,
    peers: Annotated[str, typer.Option(help="What a layer is held against.")] = _PEERS,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Default: all processors.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Undisturbed rounds of a layer's case.")] = 15,
    seconds: Annotated[float, typer.Option(min=0, help="Most seconds to measure a layer's case.")] = 30.0,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a run in a model's prefill.")] = 512,
    steps: Annotated[int, typer.Option(min=5, help="Decode steps of a model at each context.")] = 25,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all samples as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a layer's latency against context: .png, .svg or .pdf.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put the tables into a .md page, where the last run's are.")
    ] = None,
) -> None:
    """Measure an attention layer beside its peers and its limits, or models beside each other."""
    if (against or plot) and (model is None) == bool(against):
        raise InputError("--against goes with a MODEL, --plot with a layer")
    output = _Output(json_file, markdown)
    count = threads or _processors()
    if model is not None:
        _bench_models([model, *(against or [])], contexts or _MODEL_CONTEXTS, chunk, steps, count, output)
        return
    from graphrewrite.bench.case import Layer

    layer = Layer(query_heads, kv_heads, head_size, batch, layout.value, current_tokens.value == "exact")
    cases = list(_cases(layer, contexts if contexts is not None else _CONTEXTS, prefill, capacity, ragged))
    _bench_layer(layer, cases, _words(schemes), _words(peers), (count, rounds, seconds), output, plot)


class _Output:
    """The files that are written besides the tables, checked before anything is measured."""

    def __init__(self, json_file: Path | None, page: Path | None) -> None:
        from graphrewrite.bench import publish
        from graphrewrite.files import check_output

        self._json, self._page = json_file, page
        if json_file is not None:
            if json_file.suffix != ".json":
                raise InputError(f"{json_file}: unknown suffix {json_file.suffix!r}; give a .json file")
            check_output(json_file)
        if page is not None:
            publish.check(page)

    def show(
        self, key: str, introduction: str, grids: Sequence[Grid], notes: Sequence[str], written: dict[str, Any]
    ) -> None:
        from rich.console import Console

        from graphrewrite.bench.publish import publish
        from graphrewrite.bench.tables import rich_table
        from graphrewrite.files import save_text

        console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
        console.print(introduction, highlight=False)
        for grid in grids:
            console.print(rich_table(grid))
        for note in notes:
            console.print(note, highlight=False)
        if self._json is not None:
            save_text(json.dumps(written, indent=1) + "\n", self._json)
        if self._page is not None:
            publish(self._page, key, introduction, grids, notes)


def _bench_layer(
    layer: Layer,
    cases: Sequence[Case],
    schemes: Sequence[str],
    peers: Sequence[str],
    plan: tuple[int, int, float],
    output: _Output,
    picture: Path | None,
) -> None:
    from graphrewrite.bench import layer as layers
    from graphrewrite.bench import plot, tables

    if picture is not None:
        plot.check(picture)
    chosen = layers.contenders(schemes, peers)
    with _progress() as progress:
        results = layers.run(layer, cases, chosen, layers.Plan(*plan), progress)
    grids = [tables.case_grid(case, results.methods) for case in results.cases]
    key = f"layer {tables.shape(layer)} {layer.layout} {'exact' if layer.exact else 'quantized'}"
    output.show(key, tables.summary(results), grids, tables.absentees(results), results.to_json())
    if picture is not None:
        plot.write(results, picture)


def _bench_models(paths: Sequence[Path], contexts: str, chunk: int, steps: int, threads: int, output: _Output) -> None:
    from graphrewrite.bench import model_tables, models
    from graphrewrite.models import check_model_path

    for path in paths:
        check_model_path(path)
    plan = models.Plan(threads, tuple(sorted(set(_numbers("--contexts", contexts)))), chunk, steps)
    with _progress() as progress:
        results = models.run(paths, plan, progress)
    key = "models " + " ".join(path.name for path in paths)
    output.show(key, model_tables.summary(results), model_tables.grids(results), [], results.to_json())


def _cases(layer: Layer, contexts: str, prefill: str, capacity: int | None, ragged: bool) -> Iterator[Case]:
    from graphrewrite.bench.case import decode_case, prefill_case

    for context in _numbers("--contexts", contexts):
        yield decode_case(layer, context, capacity, ragged=ragged)
    for word in _words(prefill):
        numbers = _numbers("--prefill", word.replace("@", ",", 1))
        if len(numbers) != 1 + ("@" in word):
            raise InputError(f"--prefill has {word!r}; give ROWS or ROWS@CONTEXT")
        yield prefill_case(layer, numbers[0], numbers[-1], capacity, ragged=ragged)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[int]:
    words = _words(text)
    if not all(word.isdecimal() and int(word) for word in words):
        raise InputError(f"{option} is {text!r}; give whole numbers from 1 on, with commas between them")
    return [int(word) for word in words]


def _processors() -> int:
    from graphrewrite.bench.machine import usable_processors

    return usable_processors()


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function that shows on a terminal what is being done; where standard error is no terminal, nothing."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("preparing") as status:
        yield status.update
