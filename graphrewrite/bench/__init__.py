"""`graphrewrite bench`: one attention layer beside its peers and its limits, and whole models beside each other.

Shape letters: B batch, S new tokens (rows), C cache capacity, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size,
n positions filled once the new rows are written.
"""

from __future__ import annotations
