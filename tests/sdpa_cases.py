"""Facts of attentions, for `make_sdpa`: what tests of CustomSdpa, CustomQuantizedSdpa and SdpaWithKvCache run on."""

from __future__ import annotations

from typing import Any

_GROUPED = {"heads": (4, 2)}
_CHUNK = {"rows": 5, "start": 7, "is_causal": True, **_GROUPED}
_RAGGED = {"batch": 2, "rows": 3, "start": (11, 2), **_GROUPED}

POSITIONS_AND_MASKS: dict[str, dict[str, Any]] = {
    "decode": {"start": 9, "is_causal": True, "recent": True, "heads": (4, 2)},
    "prefill": {"rows": 6, "is_causal": True, "recent": True, "heads": (6, 2)},
    "chunk": {"batch": 2, "rows": 5, "start": 7, "is_causal": True, "heads": (6, 3)},
    "chunk of float rows": {"rows": 5, "start": 7, "is_causal": True, "heads": (6, 3), "cache": "float"},
    "not causal": {"rows": 3, "start": 4, "heads": (2, 1)},
    "not causal, recent": {"rows": 3, "start": 4, "heads": (2, 1), "recent": True},
    "no zero points": {"rows": 2, "start": 4, "zero_points": False, "is_causal": True},
    "one position in a list": {"batch": 2, "rows": 2, "start": (5,), "is_causal": True, "recent": True},
    "positions per sequence": {"batch": 3, "rows": 2, "start": (0, 9, 14), "is_causal": True, "heads": (4, 2)},
    "positions per sequence, recent": {"batch": 2, "rows": 3, "start": (11, 2), "is_causal": True, "recent": True},
    "positions per sequence, all": {"batch": 2, "rows": 3, "start": (11, 2), "recent": True, "cache": "float"},
    "positions per sequence, mask": {"batch": 2, "rows": 3, "start": (11, 2), "recent": True, "mask": "bool"},
    "mask [S,kv]": {"rows": 4, "start": 3, "mask": "bool", "heads": (4, 2)},
    "mask [Hq,S,kv]": {"batch": 2, "rows": 4, "start": 3, "mask": "float", "mask_shape": (4, 4, 12), "heads": (4, 2)},
    "mask [1,S,kv]": {"rows": 2, "start": 3, "mask": "bool", "mask_shape": (1, 2, 16), "heads": (4, 2)},
    "mask [B,Hq,S,kv]": {"batch": 2, "rows": 4, "mask": "bool", "mask_shape": (2, 4, 4, 16), "heads": (4, 2)},
    "mask [B,1,1,kv]": {"batch": 2, "rows": 4, "mask": "float", "mask_shape": (2, 1, 1, 16), "heads": (4, 2)},
    "mask and causal": {"rows": 4, "start": 3, "mask": "float", "is_causal": True, "heads": (4, 2)},
    "mask narrower than the recent rows": {"rows": 4, "start": 6, "mask": "bool", "mask_shape": (4, 8), "recent": True},
    "float mask narrower, causal": {
        "rows": 4,
        "start": 6,
        "mask": "float",
        "mask_shape": (4, 8),
        "recent": True,
        "is_causal": True,
        "heads": (4, 2),
    },
    "mask of one key": {"rows": 2, "start": 5, "mask": "bool", "mask_shape": (2, 1), "recent": True},
    "scale": {"rows": 3, "start": 4, "scale": 0.7, "is_causal": True, "cache": "float"},
    "full cache": {"rows": 2, "start": 14, "is_causal": True, "recent": True, "heads": (4, 2)},
    "no rows": {"rows": 0, "start": 4, "is_causal": True, "recent": True, "heads": (4, 2)},
    "no rows, masked": {"rows": 0, "start": 4, "mask": "float", "heads": (4, 2)},
    "no rows at the end": {"rows": 0, "start": 16, "cache": "float"},
    "no sequences": {"batch": 0, "rows": 2, "start": 4, "is_causal": True, "recent": True},
    "no sequences, no positions": {"batch": 0, "rows": 2, "start": (), "mask": "bool", "cache": "float"},
}

ELEMENT_TYPES: dict[str, dict[str, Any]] = {
    "float16": {**_CHUNK, "dtype": "float16", "cache": "float16"},
    "bfloat16, recent": {**_CHUNK, "dtype": "bfloat16", "cache": "bfloat16", "recent": True},
    "bfloat16 over float32": {**_CHUNK, "dtype": "bfloat16", "cache": "float32", "dim": 12},
    "float32 over bfloat16, recent": {**_RAGGED, "cache": "bfloat16", "recent": True},
    "float16 over bfloat16": {**_RAGGED, "dtype": "float16", "cache": "bfloat16", "is_causal": True},
    "bfloat16 over int8, recent": {**_CHUNK, "dtype": "bfloat16", "recent": True},
    "float16 over int4, masked": {"rows": 3, "start": 4, "dtype": "float16", "cache": "int4", "mask": "float16"},
    "float16 mask": {"rows": 3, "start": 4, "cache": "float", "mask": "float16", **_GROUPED},
    "bfloat16 mask, recent": {"rows": 3, "start": 4, "mask": "bfloat16", "mask_shape": (3, 6), "recent": True},
    "bfloat16, no rows": {"rows": 0, "start": 4, "dtype": "bfloat16", "cache": "bfloat16", "mask": "bfloat16"},
}

GRANULARITIES: dict[str, dict[str, Any]] = {
    "int8 in groups": {**_CHUNK, "groups": 4, "dim": 24},
    "int8 in groups, no zero points, recent": {**_RAGGED, "groups": 2, "zero_points": False, "recent": True},
    "int4": {**_CHUNK, "cache": "int4"},
    "int4, no zero points, recent": {**_RAGGED, "cache": "int4", "zero_points": False, "recent": True},
    "int4 in groups": {**_CHUNK, "cache": "int4", "groups": 3, "dim": 12},
    "int4 in groups, decode": {"start": 9, "cache": "int4", "groups": 2, "dim": 64, "recent": True, "is_causal": True},
    "one scale": {**_CHUNK, "scales": "[]", "recent": True},
    "one scale in a list, no zero points": {**_RAGGED, "scales": "[1]", "zero_points": False},
    "scales of dimensions, int4": {**_CHUNK, "scales": "[D]", "cache": "int4", "scales_type": "float64"},
    "scales of heads": {**_RAGGED, "scales": "[H,1]", "mask": "bool"},
    "scales of channels": {**_CHUNK, "scales": "[H,D]", "scales_type": "float64"},
    "scales of channels, int4, no zero points": {**_CHUNK, "scales": "[H,D]", "cache": "int4", "zero_points": False},
    "keys by row, values by channel": {**_CHUNK, "scales": ("rows", "[H,D]"), "groups": 2},
    "keys by dimension, values by row, int4": {**_RAGGED, "scales": ("[D]", "rows"), "cache": "int4", "recent": True},
    "scales of rows, zero points of heads": {**_CHUNK, "groups": 2, "zero_points": "[H,1]"},
    "scales of dimensions, zero points of rows": {**_RAGGED, "scales": "[D]", "groups": 4, "zero_points": "rows"},
}

LIMITS: dict[str, dict[str, Any]] = {
    "softcap": {**_CHUNK, "cache": "float", "softcap": 2.0, "scale": 3.0},
    "softcap, float mask": {"rows": 3, "start": 4, "softcap": 0.5, "mask": "float", **_GROUPED},
    "window": {**_CHUNK, "window": 3},
    "window, decode": {"start": 12, "is_causal": True, "recent": True, "window": 4, **_GROUPED},
    "window of one": {**_CHUNK, "window": 1, "recent": True},
    "window beyond the cache": {**_CHUNK, "window": 100, "recent": True},
    "window, not causal": {**_RAGGED, "window": 4, "cache": "float"},
    "window, positions per sequence": {**_RAGGED, "window": 4, "recent": True, "is_causal": True},
    "window and mask": {"rows": 4, "start": 6, "window": 3, "mask": "bool", "is_causal": True, **_GROUPED},
    "window and mask, recent": {**_RAGGED, "window": 6, "sink_tokens": 2, "mask": "float", "recent": True},
    "window from the first row": {"rows": 4, "window": 3, "is_causal": True, "recent": True},
    "sink tokens": {**_CHUNK, "window": 2, "sink_tokens": 3},
    "sink tokens, decode": {"start": 12, "window": 4, "sink_tokens": 3, "recent": True, "is_causal": True, **_GROUPED},
    "sink tokens inside the window": {"rows": 4, "start": 2, "window": 5, "sink_tokens": 4, "is_causal": True},
    "sink tokens among the recent": {"rows": 6, "window": 2, "sink_tokens": 3, "recent": True, "is_causal": True},
    "sink tokens, positions per sequence": {**_RAGGED, "window": 2, "sink_tokens": 4, "recent": True, "cache": "int4"},
    "sink tokens without a window": {**_CHUNK, "sink_tokens": 2},
    "sinks": {**_CHUNK, "sinks": True},
    "sinks, recent": {**_RAGGED, "sinks": True, "recent": True, "is_causal": True},
    "sinks, mask": {"rows": 3, "start": 4, "sinks": True, "mask": "float", "dtype": "bfloat16", **_GROUPED},
    "sinks, no rows": {"rows": 0, "start": 4, "sinks": True, "window": 3, "recent": True},
    "all at once": {**_RAGGED, "dtype": "float16", "cache": "int4", "groups": 2, "recent": True, "mask": "bfloat16",
                    "is_causal": True, "sinks": True, "softcap": 3.0, "window": 5, "sink_tokens": 2},
}  # fmt: skip

QUANTIZED_QUERIES: dict[str, dict[str, Any]] = {
    "int8 query": {**_CHUNK},
    "int8 query, no zero points": {**_CHUNK, "zero_points": False, "recent": True},
    "int8 query over float": {**_RAGGED, "cache": "float", "mask": "bool"},
    "int8 query over int4": {**_RAGGED, "cache": "int4", "groups": 2, "recent": True, "is_causal": True},
    "int8 query, channels": {**_CHUNK, "scales": "[H,D]", "softcap": 2.0, "sinks": True, "window": 4},
    "int8 query, no rows": {"rows": 0, "start": 4, "is_causal": True},
}
QUANTIZED_QUERIES = {name: {**facts, "dtype": "int8"} for name, facts in QUANTIZED_QUERIES.items()}

SDPA_CASES = {**POSITIONS_AND_MASKS, **ELEMENT_TYPES, **GRANULARITIES, **LIMITS, **QUANTIZED_QUERIES}

JOINT_CASES: dict[str, dict[str, Any]] = {
    "causal": {**_CHUNK, "cache": "float"},
    "positions per sequence": {"batch": 2, "rows": 2, "start": (0, 9), "cache": "float"},
    "mask": {**_CHUNK, "cache": "float", "mask": "float", "scale": 0.3},
    "no rows": {"rows": 0, "start": 16, "is_causal": True, "cache": "float"},
    "float16": {**_CHUNK, "dtype": "float16", "cache": "float16", "mask": "float16"},
    "bfloat16": {**_RAGGED, "dtype": "bfloat16", "cache": "bfloat16", "is_causal": True, "sinks": True},
    "float32 over bfloat16": {**_CHUNK, "cache": "bfloat16", "recent_type": "bfloat16", "softcap": 2.0},
    "bfloat16 over float32": {**_RAGGED, "dtype": "bfloat16", "cache": "float32", "recent_type": "float32",
                              "window": 4, "sink_tokens": 1},
}  # fmt: skip
JOINT_CASES = {name: {**_GROUPED, **facts, "recent": True} for name, facts in JOINT_CASES.items()}
