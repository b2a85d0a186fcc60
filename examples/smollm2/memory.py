"""Peak memory of one program, measured in a process of its own: ``python -m examples.smollm2.memory FILE``.

The process loads a program (``.onnx`` or ``.pt2``), prefills a few hundred tokens, decodes a few, and prints a line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PREFILL = 256
STEPS = 5

Run = Callable[[int, int], object]


@dataclass(frozen=True)
class Footprint:
    """Peak resident memory of a process that ran one program, in MiB, and its decode speed at position 256."""

    peak_mib: float
    tokens_per_second: float


def footprint(program: Path, threads: int) -> Footprint:
    """Run a program in a new process. Raises RuntimeError with the process' last words when it fails."""
    command = [sys.executable, "-m", "examples.smollm2.memory", str(program), "--threads", str(threads)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"measuring {program.name} failed: {finished.stderr.strip().splitlines()[-1:]}")
    return Footprint(**json.loads(finished.stdout.splitlines()[-1]))


def _onnx_run(program: Path, threads: int) -> Run:
    import graphrewrite as gr
    from examples.smollm2.measure import StepRunner

    return StepRunner(gr.session(program, threads)).run


def _torch_run(program: Path, threads: int) -> Run:
    import torch

    import graphrewrite.custom_ops.torch_ops  # noqa: F401  (defines the operators the program calls)
    from graphrewrite import source_ops

    source_ops.register()
    torch.set_num_threads(threads)
    module = torch.export.load(program).module()

    def run(count: int, position: int) -> object:
        with torch.no_grad():
            return module(torch.ones(1, count, dtype=torch.int64), torch.tensor([position]))

    return run


def _measure(run: Run) -> Footprint:
    run(PREFILL, 0)
    seconds = []
    for step in range(STEPS + 1):
        started = time.perf_counter()
        run(1, PREFILL + step)
        seconds.append(time.perf_counter() - started)
    return Footprint(_peak_bytes() / 2**20, 1 / statistics.median(seconds[1:]))


def _peak_bytes() -> int:
    """Peak resident memory of this process since it started its program."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands the parent's peak down through fork and exec in ru_maxrss; this one starts anew.
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    load = _onnx_run if options.program.suffix == ".onnx" else _torch_run
    measured = _measure(load(options.program, options.threads))
    print(json.dumps({"peak_mib": measured.peak_mib, "tokens_per_second": measured.tokens_per_second}))


if __name__ == "__main__":
    main()
