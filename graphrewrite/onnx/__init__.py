"""ONNX models (as onnx_ir): reading their graphs into the vocabulary, and writing fused operators into them."""
