"""What of an installation works: versions, the kernel library, and a tiny attention in onnxruntime against numpy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphrewrite.errors import GraphRewriteError


@dataclass(frozen=True)
class Check:
    """One finding. `ok` is False when it is broken, None when it is only information."""

    name: str
    ok: bool | None
    detail: str


def examine() -> list[Check]:
    """Runs every check; one that fails does not stop the others."""
    return [
        Check("graphrewrite", None, f"{_version('graphrewrite')}, Python {platform.python_version()}, {_machine()}"),
        *(Check(name, None, _version(name)) for name in ("numpy", "onnx", "onnx_ir")),
        Check("onnxruntime", *_guard(_runtime)),
        Check("kernel library", *_guard(_library)),
        Check("instruction set", *_guard(_isa)),
        Check("threads", None, _threads()),
        Check("self test", *_guard(_self_test)),
        *(Check(f"extra [{name}]", None, _extra(packages)) for name, packages in _EXTRAS.items()),
    ]


def print_checks(checks: list[Check]) -> None:
    """Writes the findings to standard output."""
    from rich.console import Console
    from rich.text import Text

    marks = {True: ("ok", "green"), False: ("BROKEN", "bold red"), None: ("", "")}
    width = max(len(check.name) for check in checks)
    console = Console()
    for check in checks:
        mark, style = marks[check.ok]
        # Left to the terminal to wrap: a path or a message that someone copies stays whole.
        console.print(
            Text.assemble(f"{check.name:<{width}}  ", (f"{mark:<6}", style), f"  {check.detail}"), soft_wrap=True
        )


_EXTRAS = {"torch": ("torch", "onnxscript"), "mlir": ("torch-mlir",)}


def _guard(check: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, check()
    except GraphRewriteError as error:
        return False, str(error)
    except Exception as error:  # whatever is broken is the finding
        return False, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}"


def _extra(packages: tuple[str, ...]) -> str:
    versions = {package: _version(package) for package in packages}
    if all(version == "not installed" for version in versions.values()):
        return "not installed"
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _runtime() -> str:
    import onnxruntime

    return f"{onnxruntime.__version__}, {', '.join(onnxruntime.get_available_providers())}"


def _library() -> str:
    import onnxruntime

    from graphrewrite.sessions import ops_library_path, register_library

    register_library(onnxruntime.SessionOptions())
    return str(ops_library_path())


def _isa() -> str:
    from graphrewrite.custom_ops import capi

    forced = os.environ.get("GRAPHREWRITE_ISA")
    return f"{capi.isa()}{f' (GRAPHREWRITE_ISA={forced})' if forced else ''}, kernels {capi.version()}"


def _threads() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} of {os.cpu_count()} processors usable"


def _self_test() -> str:
    """Runs causal attention of 2 tokens over an int8 cache with 2 earlier positions, heads grouped 4 to 2."""
    import numpy as np

    from graphrewrite.sessions import session

    rng = np.random.default_rng(0)
    tokens, query_heads, heads, size, capacity, start = 2, 4, 2, 8, 6, 2
    query = rng.standard_normal((1, tokens, query_heads, size)).astype(np.float32)
    codes = [rng.integers(-128, 128, (1, capacity, heads, size)).astype(np.int8) for _ in "kv"]
    scales = [rng.uniform(0.005, 0.02, (1, capacity, heads, 1)).astype(np.float32) for _ in "kv"]
    zeros = [rng.integers(-128, 128, (1, capacity, heads, 1)).astype(np.int8) for _ in "kv"]
    names = ("query", "key_cache", "value_cache", "start_pos", "key_scales", "key_zero_points", "value_scales")
    values = (query, codes[0], codes[1], np.array(start), scales[0], zeros[0], scales[1], zeros[1])
    feeds = dict(zip((*names, "value_zero_points"), values, strict=True))
    (output,) = session(_attention_model(feeds), threads=1).run(None, feeds)
    key, value = (
        (code.astype(np.float32) - zero) * scale for code, zero, scale in zip(codes, zeros, scales, strict=True)
    )
    expected = _attention(query, key, value, start)
    worst = float(np.abs(output - expected).max())
    # Values are at most 255 * 0.02 = 5; dot products of 8 terms and sums of 4: fewer than 32 roundings.
    allowed = 32 * 5.1 * 2.0**-24
    if not worst <= allowed:
        raise GraphRewriteError(f"CustomSdpa in onnxruntime is off by {worst:.2e} from numpy, allowed {allowed:.2e}")
    return f"CustomSdpa in onnxruntime equals numpy to {worst:.1e}"


def _attention_model(feeds: dict[str, Any]) -> Any:
    from onnx import TensorProto, helper

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    node = helper.make_node("CustomSdpa", list(feeds), ["output"], domain="graphrewrite", is_causal=1)
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, feeds["query"].shape)
    graph = helper.make_graph([node], "self_test", inputs, [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("graphrewrite", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _attention(query: Any, key: Any, value: Any, start: int) -> Any:
    """softmax(q k^T / sqrt(D)) v, row i over the positions up to start + i, in float64."""
    import numpy as np

    group = query.shape[2] // key.shape[2]
    key, value = (np.repeat(array.astype(np.float64), group, axis=2) for array in (key, value))
    scores = np.einsum("bihd,bjhd->bhij", query.astype(np.float64), key) / np.sqrt(query.shape[-1])
    seen = np.arange(key.shape[1]) <= start + np.arange(query.shape[1])[:, None]
    weights = np.exp(np.where(seen, scores, -np.inf))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), value)
