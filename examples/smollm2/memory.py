"""Peak memory of one program, measured in a process of its own: ``python -m examples.smollm2.memory FILE``.

The process loads an ONNX model, prefills a few hundred tokens, decodes a few, and prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

PREFILL = 256
STEPS = 5


@dataclass(frozen=True)
class Footprint:
    """Peak resident memory of a process that ran one program, in MiB."""

    peak_mib: float


def footprint(program: Path, threads: int) -> Footprint:
    """Run a program in a new process. Raises RuntimeError with the process' last words when it fails."""
    command = [sys.executable, "-m", "examples.smollm2.memory", str(program), "--threads", str(threads)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"measuring {program.name} failed: {finished.stderr.strip().splitlines()[-1:]}")
    return Footprint(**json.loads(finished.stdout.splitlines()[-1]))


def _measure(program: Path, threads: int) -> Footprint:
    import graphrewrite as gr
    from examples.smollm2.measure import StepRunner

    runner = StepRunner(gr.session(program, threads))
    runner.run(PREFILL, 0)
    for step in range(STEPS):
        runner.run(1, PREFILL + step)
    return Footprint(_peak_bytes() / 2**20)


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
    print(json.dumps(asdict(_measure(options.program, options.threads))))


if __name__ == "__main__":
    main()
