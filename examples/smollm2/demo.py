"""The rewrite at work on a real language model: ``python -m examples.smollm2.demo``.

Builds SmolLM2-135M-Instruct with an int8 KV cache, exports and rewrites it, writes the fused ONNX model, lets it
answer a prompt, and compares before and after: tokens, speed and memory, in torch and in onnxruntime.

Caches hold 8192 positions, except where greedy tokens are compared: there the unfused programs would spend minutes on
dequantizing empty positions, so their caches hold 128. Speeds at a context are measured with caches filled with
arbitrary codes (see ``measure``); memory is that of a process which runs one program and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from tokenizers.decoders import DecodeStream

import graphrewrite as gr
from examples.smollm2 import compare, measure, peer, programs
from examples.smollm2.memory import footprint
from examples.smollm2.model import Decoder
from examples.smollm2.prompts import PROMPTS, SHOWN
from examples.smollm2.results import Results, table
from examples.smollm2.tokenizer import ChatTokenizer, load_tokenizer
from examples.smollm2.weights import load_model, read_gguf
from graphrewrite.files import check_output

CAPACITY = 8192
COMPARED_CAPACITY = 128
CHUNK = 512


@dataclass(frozen=True)
class Plan:
    """How much the demo measures. ``seconds`` bounds each series of measurements."""

    prompts: int
    tokens: int
    contexts: tuple[int, ...]
    seconds: float


FULL = Plan(prompts=8, tokens=64, contexts=(256, 2048, 8000), seconds=6.0)
QUICK = Plan(prompts=2, tokens=16, contexts=(256, 2048), seconds=2.0)


class Progress:
    """Says on standard error what is being done and how long each stage took."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        started = time.perf_counter()
        self._status = self._console.status(text)
        with self._status:
            yield
        self._console.print(f"[dim]{time.perf_counter() - started:6.1f} s[/]  {text}", highlight=False)

    def detail(self, text: str) -> None:
        self._status.update(text)


def run(
    plan: Plan, model: Decoder, tokenizer: ChatTokenizer, output: Path, threads: int, work: Path, progress: Progress
) -> Results:
    """Everything the demo does with the model; ``work`` is a folder for files that are not kept."""
    torch.set_num_threads(threads)
    with progress.stage(f"export and rewrite, caches of {CAPACITY} positions"):
        full = programs.build(model, CAPACITY)
    report = full.report
    results = Results(threads, len(report.sites), report.attention_cores, plan.prompts)
    with progress.stage(f"write the fused model to {output}"):
        after = programs.write_onnx(full.after, output)
    answer(after, tokenizer, threads)
    with progress.stage("write the unfused model"):
        before = programs.write_onnx(full.before, work / "before.onnx")
    del full
    with progress.stage(f"export and rewrite, caches of {COMPARED_CAPACITY} positions"):
        small = programs.build(model, COMPARED_CAPACITY)
    prompts = [tokenizer.encode_chat(prompt) for prompt in PROMPTS[: plan.prompts]]
    with progress.stage("compare greedy tokens"):
        results.agreements = _compare(small, before, after, prompts, plan, threads, progress)
    del small
    _measure(results, before, after, plan, progress)
    with progress.stage("peak memory, each program in a process of its own"):
        results.onnx_footprints = (footprint(before, threads), footprint(after, threads))
    with progress.stage("one attention layer beside onnxruntime's own"):
        results.layer = peer.layer_times(threads, seconds=plan.seconds)
    return results


def answer(model: Path, tokenizer: ChatTokenizer, threads: int, longest: int = 120) -> None:
    """Let the fused model answer a prompt, printed as it comes."""
    decoder = gr.Decoder(gr.session(model, threads))
    print(f"\n> {SHOWN}\n")
    stream = DecodeStream(skip_special_tokens=True)
    token = int(decoder.prefill(tokenizer.encode_chat(SHOWN)).argmax())
    for _ in range(longest):
        if token == tokenizer.end:
            break
        print(stream.step(tokenizer.tokenizer, token) or "", end="", flush=True)
        token = int(decoder.step(token).argmax())
    print("\n", flush=True)


def _compare(
    small: programs.TorchPrograms,
    before: Path,
    after: Path,
    prompts: list[list[int]],
    plan: Plan,
    threads: int,
    progress: Progress,
) -> list[compare.Agreement]:
    longest = max(map(len, prompts)) + plan.tokens
    if longest > COMPARED_CAPACITY:
        raise gr.InputError(f"a prompt and its answer take {longest} positions, the caches hold {COMPARED_CAPACITY}")
    sessions = [gr.session(programs.with_capacity(before, COMPARED_CAPACITY), threads), gr.session(after, threads)]
    candidates = {
        "torch before": compare.torch_program(small.before.module()),
        "torch after": compare.torch_program(small.after.module()),
        "onnxruntime before": compare.decoder_program(gr.Decoder(sessions[0])),
        "onnxruntime after": compare.decoder_program(gr.Decoder(sessions[1])),
    }
    # A step in torch is thousands of small operators. Shared out between threads, each one waits for a thread that the
    # system may have put aside, which makes steps several times slower as soon as the machine does anything else.
    torch.set_num_threads(1)
    try:
        return compare.compare(candidates, prompts, plan.tokens, progress.detail)
    finally:
        torch.set_num_threads(threads)


def _measure(results: Results, before: Path, after: Path, plan: Plan, progress: Progress) -> None:
    with progress.stage("measure prefill and decode"):
        runners = [measure.StepRunner(gr.session(path, results.threads)) for path in (before, after)]
        results.cache_mib = (runners[0].cache_bytes / 2**20, runners[1].cache_bytes / 2**20)
        for context in plan.contexts:
            progress.detail(f"measure prefill and decode at context {context}")
            results.speeds.append(measure.speeds(runners, context, chunk=CHUNK, seconds=plan.seconds))
        del runners
    with progress.stage("measure the attention part of a step"):
        for context in plan.contexts:
            results.attention_milliseconds[context] = (
                measure.attention_milliseconds(before, context, threads=results.threads, steps=5),
                measure.attention_milliseconds(after, context, threads=results.threads, steps=5),
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("smollm2.onnx"), help="where to write the fused model")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and contexts, in about a third of the time")
    parser.add_argument("--threads", type=int, default=_processors(), help="default: all processors (%(default)s)")
    return parser.parse_args()


def _quieten_torch() -> None:
    """Keep remarks about torch's own insides off the screen."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_json(results: Results, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results.to_json(), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> int:
    options = _arguments()
    started = time.perf_counter()
    progress = Progress()
    _quieten_torch()
    try:
        for path in filter(None, (options.output, options.json)):
            check_output(path.absolute())
        with tempfile.TemporaryDirectory(prefix="smollm2-") as work:
            with progress.stage("read the model"):
                reader = read_gguf()
                model, tokenizer = load_model(reader, capacity=CAPACITY), load_tokenizer(reader)
            plan = QUICK if options.quick else FULL
            results = run(plan, model, tokenizer, options.output, options.threads, Path(work), progress)
    except gr.GraphRewriteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, gr.RequirementNotMet) else 2
    results.seconds = time.perf_counter() - started
    Console().print(table(results))
    print(f"wrote {options.output}")
    if options.json:
        _write_json(results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
