"""What the machine is, and whether it did something else meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

_DEFAULT_CACHE = 32 << 20
_STEAL = 7  # field of the "cpu" line of /proc/stat, as proc(5) counts them
_IDLE = (3, 4)  # idle, iowait
_GUESTS = 8  # guest time from here on, which user time has in it already


@dataclass(frozen=True)
class Machine:
    """Where a run was made."""

    processor: str
    processors: int
    last_level_cache: int
    isa: str
    system: str
    versions: dict[str, str]


def describe() -> Machine:
    """Returns what there is to say of this machine."""
    from graphrewrite.custom_ops import capi

    names = ("graphrewrite", "onnxruntime", "numpy", "torch", "openvino", "executorch", "llama-cpp-python")
    versions = {name: version for name in names if (version := installed_version(name))}
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return Machine(_processor(), usable_processors(), last_level_cache(), capi.isa(), system, versions)


def installed_version(package: str) -> str | None:
    """The version of an installed distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * factor)
    return max(sizes, default=_DEFAULT_CACHE)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Meter:
    """Tells whether something else had the processors since the last `start`.

    Counted are the time that a hypervisor gave to other machines (steal) and that other processes ran. Both come from
    /proc/stat in ticks of 10 ms; where there is none, nothing counts as disturbed.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self.start()

    def start(self) -> None:
        self._before = self._read()

    def disturbed(self) -> bool:
        before, after = self._before, self._read()
        if before is None or after is None:
            return False
        elapsed, own, busy, stolen = (late - early for early, late in zip(before, after, strict=True))
        # A tick may belong to what ran before, and the clocks are not read at one instant.
        return stolen > 0 or busy - own > 0.02 + 0.1 * elapsed

    def _read(self) -> tuple[float, float, float, float] | None:
        """Seconds so far: of the clock, of this process on all processors, of all processes, stolen."""
        try:
            line = self._stat.read_text(encoding="ascii").splitlines()[0]
        except OSError:
            return None
        ticks = [int(field) for field in line.split()[1:]][:_GUESTS]
        second = os.sysconf("SC_CLK_TCK")
        stolen = ticks[_STEAL] / second
        busy = sum(ticks) / second - stolen - sum(ticks[field] for field in _IDLE) / second
        return time.perf_counter(), time.process_time(), busy, stolen
