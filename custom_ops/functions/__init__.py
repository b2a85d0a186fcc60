"""Function bodies in standard ONNX operators, so that a rewritten model runs without the kernel library.

`attach(model)` adds the bodies a model needs. A runtime that has the kernels uses them; any other inlines the bodies.

Source operators have bodies as well. A torch program that was exported without being rewritten holds them as nodes of
the domain of their torch namespace (`llama`, `quantized_decomposed`): inputs are the Tensor and SymInt arguments in
schema order, attributes the float, int and bool arguments (a dtype as ONNX number), and an operator that mutates a
cache returns it: update_cache -> (new_cache), sdpa_with_kv_cache -> (output, new_key_cache, new_value_cache). With the
bodies such a model runs in any ONNX runtime, unfused.
"""

from __future__ import annotations

from graphrewrite.custom_ops.functions.attach import attach
from graphrewrite.custom_ops.functions.bodies import MINIMUM_OPSET, body
from graphrewrite.custom_ops.functions.signature import DOMAIN, SOURCE_DOMAINS, Signature, signature_of

__all__ = ["DOMAIN", "MINIMUM_OPSET", "SOURCE_DOMAINS", "Signature", "attach", "body", "signature_of"]
