"""Rewriting large models, measured: ``python -m tests.benchmarks.scale``.

Decoders of 1 000, 10 000 and 100 000 nodes as an ONNX model and as a torch.export program, and a model with 20 GB of
weights in a file beside it, written with the weights linked and copied. The file has holes in place of its weights, so
it takes no space and no time to make. Prints a table; the targets are 10 seconds for each, and 500 MB for the weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import torch
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

import graphrewrite as gr

SIZES = (1_000, 10_000, 100_000)
WEIGHTS = 20 << 30

# A decoder layer of form O1: Hq=4, Hkv=2, D=16, C=32, so a width of 64; {l} is the layer, {h} what comes in.
_NORM = """
    {n}_square = Mul({i}, {i})
    {n}_mean = ReduceMean({n}_square, last_axis)
    {n}_safe = Add({n}_mean, epsilon)
    {n}_root = Sqrt({n}_safe)
    {n}_unit = Div({i}, {n}_root)
    {n} = Mul({n}_unit, {n}_weight)
"""
_PROJECTION = """
    {p}_flat = MatMul({l}_norm, {p}_weight)
    {p}_heads = Reshape({p}_flat, heads_shape)
    {p} = Transpose<perm=[0, 2, 1, 3]>({p}_heads)
"""
_QUANTIZE = """
    {c}_low_row = ReduceMin<keepdims=1>({c}, last_axis)
    {c}_high_row = ReduceMax<keepdims=1>({c}, last_axis)
    {c}_low = Min({c}_low_row, zero)
    {c}_high = Max({c}_high_row, zero)
    {c}_range = Sub({c}_high, {c}_low)
    {c}_new_scales = Div({c}_range, steps)
    {c}_low_steps = Div({c}_low, {c}_new_scales)
    {c}_zero_real = Sub(first_code, {c}_low_steps)
    {c}_zero_round = Round({c}_zero_real)
    {c}_new_zeros = Cast<to=3>({c}_zero_round)
    {c}_zero_float = Cast<to=1>({c}_new_zeros)
    {c}_scaled = Div({c}, {c}_new_scales)
    {c}_shifted = Add({c}_scaled, {c}_zero_float)
    {c}_code_round = Round({c}_shifted)
    {c}_clipped = Clip({c}_code_round, first_code, last_code)
    {c}_new_codes = Cast<to=3>({c}_clipped)
    {c}_codes_out = TensorScatter<axis=2>({c}_codes, {c}_new_codes, position)
    {c}_scales_out = TensorScatter<axis=2>({c}_scales, {c}_new_scales, position)
    {c}_zeros_out = TensorScatter<axis=2>({c}_zeros, {c}_new_zeros, position)
    {c}_float = DequantizeLinear<axis=-1, block_size=16>({c}_codes_out, {c}_scales_out, {c}_zeros_out)
"""
_REST = """
    {l}_heads = Attention<is_causal=1>({l}_query, {l}_key_float, {l}_value_float, "", "", "", valid)
    {l}_joined = Transpose<perm=[0, 2, 1, 3]>({l}_heads)
    {l}_flat = Reshape({l}_joined, flat_shape)
    {l}_projected = MatMul({l}_flat, {l}_out_weight)
    {l}_middle = Add({h}, {l}_projected)
"""
_MLP = """
    {l}_gate = MatMul({l}_post, {l}_gate_weight)
    {l}_sigmoid = Sigmoid({l}_gate)
    {l}_silu = Mul({l}_gate, {l}_sigmoid)
    {l}_up = MatMul({l}_post, {l}_up_weight)
    {l}_gated = Mul({l}_silu, {l}_up)
    {l}_down = MatMul({l}_gated, {l}_down_weight)
    {l}_hidden = Add({l}_middle, {l}_down)
"""
_CONSTANTS = """
    last_axis = Constant<value_ints=[-1]>()
    epsilon = Constant<value_float=0.00001>()
    zero = Constant<value_float=0.0>()
    steps = Constant<value_float=255.0>()
    first_code = Constant<value_float=-128.0>()
    last_code = Constant<value_float=127.0>()
    heads_shape = Constant<value_ints=[1, -1, 4, 16]>()
    flat_shape = Constant<value_ints=[1, -1, 64]>()
"""
_CACHES = {"codes": "int8[1,4,32,16]", "scales": "float[1,4,32,1]", "zeros": "int8[1,4,32,1]"}
_WEIGHTS = {"norm": 1, "post": 1, "query": 2, "key": 2, "value": 2, "out": 2, "gate": 2, "up": 2, "down": 2}


def onnx_decoder(layers: int) -> ir.Model:
    """A decoder of form O1 with 78 nodes a layer, of whose inner values no types are stated."""
    names = [f"l{index}" for index in range(layers)]
    caches = [
        (f"{name}_{side}_{part}", type_)
        for name in names
        for side in ("key", "value")
        for part, type_ in _CACHES.items()
    ]
    inputs = ["float[1,S,64] embedded", "int64[1] position", "int64[1] valid"]
    inputs += [f"{type_} {cache}" for cache, type_ in caches]
    inputs += [
        f"float[{'64,' * (rank - 1)}64] {name}_{kind}_weight" for name in names for kind, rank in _WEIGHTS.items()
    ]
    outputs = [f"float[1,S,64] {names[-1]}_hidden", *(f"{type_} {cache}_out" for cache, type_ in caches)]
    body = "".join(map("".join, _layers(names)))
    signature = f"decoder ({', '.join(inputs)}) => ({', '.join(outputs)})"
    text = f'<ir_version: 10, opset_import: ["" : 24]>\n{signature} {{ {_CONSTANTS} {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    weights = {rank: ir.tensor(np.ones((64,) * rank, np.float32)) for rank in (1, 2)}
    for value in [value for value in model.graph.inputs if (value.name or "").endswith("_weight")]:
        model.graph.inputs.remove(value)
        assert value.shape is not None
        value.const_value = weights[len(value.shape)]
        model.graph.register_initializer(value)
    return model


def _layers(names: list[str]) -> Iterator[list[str]]:
    hidden = "embedded"
    for name in names:
        parts = [_NORM.replace("{n}", f"{name}_norm").replace("{i}", hidden)]
        parts += [_PROJECTION.replace("{p}", f"{name}_{side}") for side in ("query", "key", "value")]
        parts += [_QUANTIZE.replace("{c}", f"{name}_{side}") for side in ("key", "value")]
        parts += [_REST, _NORM.replace("{n}", f"{name}_post").replace("{i}", f"{name}_middle"), _MLP]
        yield [part.replace("{l}", name).replace("{h}", hidden) for part in parts]
        hidden = f"{name}_hidden"


def torch_decoder(layers: int, one: ExportedProgram) -> ExportedProgram:
    """The graph of a program with one attention layer, repeated: each layer's query is the output of the one before.

    one: decomposed; its user inputs are the query and others that all layers share, its only output the attention's.
    """
    graph = torch.fx.Graph()
    nodes = list(one.graph.nodes)
    signature = one.graph_signature
    buffers = [node for node in nodes if node.name in signature.inputs_to_buffers]
    users = [node for node in nodes if node.op == "placeholder" and node not in buffers]
    values: list[dict[torch.fx.Node, torch.fx.Node]] = [{} for _ in range(layers)]
    inputs: list[InputSpec] = []
    state: dict[str, Any] = {}
    for index, known in enumerate(values):
        for node in buffers:
            known[node] = graph.placeholder(f"l{index}_{node.name}")
            known[node].meta = dict(node.meta)
            target = f"{index}.{signature.inputs_to_buffers[node.name]}"
            state[target] = one.state_dict[signature.inputs_to_buffers[node.name]]
            inputs.append(InputSpec(InputKind.BUFFER, TensorArgument(known[node].name), target, persistent=True))
    shared = {node: graph.node_copy(node) for node in users}
    inputs += [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in shared.values()]
    query = shared[users[0]]
    results: list[torch.fx.Node] = []
    outputs: list[OutputSpec] = []
    for index, known in enumerate(values):
        known |= {**shared, users[0]: query}
        for node in nodes:
            if node.op == "output":
                *written, query = (known[argument] for argument in node.args[0])
            elif node.op != "placeholder":
                known[node] = graph.node_copy(node, lambda argument, known=known: known[argument])  # type: ignore[misc]
        results += written
        for node, target in zip(written, signature.buffers_to_mutate.values(), strict=True):
            outputs.append(OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node.name), f"{index}.{target}"))
    graph.output((*results, query))
    outputs.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(query.name), None))
    return ExportedProgram(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints=one.range_constraints,
        module_call_graph=one.module_call_graph,
        example_inputs=one.example_inputs,
        constants={},
        verifiers=one.verifiers,
    )


def one_torch_layer() -> ExportedProgram:
    """The layer of form F1 that the tests have, decomposed."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import fx_forms

    return fx_forms.export(fx_forms.Layer("joint")).run_decompositions({})


def heavy_model(folder: Path, size: int, layers: int = 30, heads: int = 4) -> Path:
    """A decoder in `folder` with `size` bytes of weights, those of its output heads, in a file that is all holes."""
    model = onnx_decoder(layers)
    data = folder / "heavy.onnx.data"
    with open(data, "wb") as file:
        file.truncate(size)
    shape = ir.Shape([64, size // heads // (4 * 64)])
    for index in range(heads):
        length = 4 * 64 * int(shape[1])
        tensor = ir.ExternalTensor(
            data.name, index * length, length, ir.DataType.FLOAT, shape=shape, name=f"head_{index}", base_dir=folder
        )
        weight = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        model.graph.register_initializer(weight)
        product = ir.node("MatMul", [model.graph.outputs[0], weight])
        logits = product.outputs[0]
        logits.name, logits.type, logits.shape = f"logits_{index}", weight.type, ir.Shape([1, "S", shape[1]])
        model.graph.append(product)
        model.graph.outputs.append(logits)
    ir.save(model, folder / "heavy.onnx")
    return folder / "heavy.onnx"


_REWRITE_FILE = r"""
import pathlib, re, sys, time
start = time.perf_counter()
from graphrewrite.cli import run
code = run(["rewrite", sys.argv[1], sys.argv[2], "--weights", sys.argv[3]])
assert code == 0, code
seconds = time.perf_counter() - start
# Not getrusage, which counts what the parent had when it forked.
print(seconds, re.search(r"VmHWM:\s*(\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""


def rewrite_file(source: Path, target: Path, weights: str) -> tuple[float, float, str]:
    """Runs the command line in a process of its own. Returns seconds, the most MB, and the last line of its report."""
    command = [sys.executable, "-c", textwrap.dedent(_REWRITE_FILE), str(source), str(target), weights]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    *report, _, measured = done.stdout.splitlines()
    seconds, kilobytes = measured.split()
    return float(seconds), float(kilobytes) / 1024, report[-1]


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the wall and of this process."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="NODES")
    parser.add_argument("--formats", nargs="*", default=("onnx", "torch"), choices=("onnx", "torch"))
    parser.add_argument("--gigabytes", type=float, default=WEIGHTS / 2**30, help="of weights; 0 leaves these out")
    arguments = parser.parse_args()
    table = Table("Model", "Nodes", "Sites", "Seconds", "Of the processor", "Microseconds a node", "Peak MB")
    gr.rewrite(onnx_decoder(1))  # imports
    one = one_torch_layer()
    per_layer = {"onnx": len(onnx_decoder(2).graph) - len(onnx_decoder(1).graph), "torch": len(one.graph.nodes)}
    makers: dict[str, Callable[[int], Any]] = {"onnx": onnx_decoder, "torch": lambda layers: torch_decoder(layers, one)}
    for size in arguments.sizes:
        for name in arguments.formats:
            model = makers[name](size // per_layer[name])
            count = len(model.graph) if isinstance(model, ir.Model) else len(model.graph.nodes)
            results: list[Any] = []
            wall, processor = _timed(lambda: results.append(gr.rewrite(model)))  # noqa: B023
            sites = str(len(results[0].report.sites))
            table.add_row(name, str(count), sites, f"{wall:.2f}", f"{processor:.2f}", f"{wall / count * 1e6:.0f}", "")
    size = int(arguments.gigabytes * 2**30)
    for weights in ("link", "copy") if size else ():
        with tempfile.TemporaryDirectory() as name:
            source = heavy_model(Path(name), size)
            seconds, megabytes, summary = rewrite_file(source, Path(name) / "out.onnx", weights)
        label = f"ONNX, {arguments.gigabytes:g} GB of weights, {weights}"
        table.add_row(label, "", summary.split()[0], f"{seconds:.2f}", "", "", f"{megabytes:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
