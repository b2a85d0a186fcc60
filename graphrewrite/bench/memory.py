"""Peak memory of one model in a process of its own: ``python -m graphrewrite.bench.memory FILE``.

The process loads the model, prefills some tokens, decodes a few, and prints its peak resident memory as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from graphrewrite.errors import InputError

_STEPS = 4


def peak_bytes(model: Path, threads: int, prompt: int) -> int:
    """Peak resident memory of a new process that runs the model.

    Args:
        prompt: tokens to prefill in one run.

    Raises:
        InputError: the process failed; the message has its last words.
    """
    command = [sys.executable, "-m", __name__, str(model), "--threads", str(threads), "--prompt", str(prompt)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{model} could not be run in a process of its own: {last}")
    return int(json.loads(finished.stdout.splitlines()[-1]))


def own_peak_bytes() -> int:
    """Peak resident memory of this process since it started its program."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands the parent's peak down through fork and exec in ru_maxrss; this one starts anew.
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource  # no such module on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _main() -> None:
    import graphrewrite as gr

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    options = parser.parse_args()
    decoder = gr.Decoder(gr.session(options.model, options.threads))
    prompt = max(1, min(options.prompt, decoder.capacity - _STEPS))
    decoder.prefill([1] * prompt, chunk=prompt)
    for _ in range(min(_STEPS, decoder.capacity - prompt)):
        decoder.step(1)
    print(json.dumps(own_peak_bytes()))


if __name__ == "__main__":
    _main()
