"""Cases of attention for tables of tests, and their comparison with the float64 reference."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.kernels.calls import custom_sdpa, instruction_set, instruction_sets
from tests.kernels.reference import Sdpa, make_sdpa, sdpa_with_bound, visible_slots

ISAS = instruction_sets()


@dataclass(frozen=True)
class Case:
    """One call. `cache`, `scales`, `groups`, `dtype` and `mask` are those of `reference.make_sdpa`."""

    cache: str
    heads: tuple[int, int]
    dim: int
    rows: int
    layout: str = "BSNH"
    mask: str | None = None
    mask_leading: tuple[str, ...] = ("S",)
    start: int | tuple[int, ...] = 0
    batch: int = 1
    recent: bool = False
    zero_points: bool = True
    causal: bool = True
    spare: int = 3
    """Slots behind the last new row."""
    dtype: str = "float32"
    scales: str | tuple[str, str] = "rows"
    scales_type: str = "float32"
    groups: int = 1
    sinks: bool = False
    softcap: float = 0.0
    window: int = 0
    sink_tokens: int = 0

    def build(self) -> Sdpa:
        seed = zlib.crc32(str(self).encode())
        capacity = int(np.max(self.start)) + self.rows + self.spare
        sizes = {"B": self.batch, "H": self.heads[0], "S": self.rows, "1": 1}
        return make_sdpa(
            np.random.default_rng(seed),
            batch=self.batch,
            rows=self.rows,
            capacity=capacity,
            start=list(self.start) if isinstance(self.start, tuple) else self.start,
            heads=self.heads,
            dim=self.dim,
            dtype=self.dtype,
            cache=self.cache,
            scales=self.scales,
            scales_type=self.scales_type,
            groups=self.groups,
            zero_points=self.zero_points,
            recent=self.recent,
            mask=self.mask,
            # One key short of the capacity, so that the last slot is never visible.
            mask_shape=(*(sizes[size] for size in self.mask_leading), capacity - 1),
            sinks=self.sinks,
            is_causal=self.causal,
            softcap=self.softcap,
            window=self.window,
            sink_tokens=self.sink_tokens,
        )

    def __str__(self) -> str:
        mask = f"{self.mask}[{''.join(self.mask_leading)}]" if self.mask else "unmasked"
        scales = self.scales if isinstance(self.scales, str) else "|".join(self.scales)
        numbers = {"softcap": self.softcap, "window": self.window, "sink_tokens": self.sink_tokens}
        flags = [name for name in ("recent", "causal", "zero_points", "sinks") if getattr(self, name)]
        options = [*flags, *(f"{name}{value:g}" for name, value in numbers.items() if value)]
        kind = self.cache if self.cache not in ("int8", "int4") else f"{self.cache}{scales}x{self.groups}"
        start = str(self.start).replace(" ", "")
        return (
            f"{self.dtype}-{kind}-{self.heads[0]}/{self.heads[1]}-D{self.dim}-S{self.rows}-{self.layout}-{mask}-"
            f"at{start}-B{self.batch}-{'+'.join(options)}"
        )


def check(actual: Any, arguments: Sdpa) -> None:
    """Compares a result with the reference, within the bound that the reference derives."""
    expected, bound = sdpa_with_bound(arguments)
    error = np.abs(actual.astype(np.float64) - expected)
    assert np.all(error <= bound), f"off by {np.max(error)}, {np.max(error / np.maximum(bound, 1e-300))} of the bound"


def check_everywhere(case: Case) -> None:
    """Compares every instruction set with the reference, and two threads with one, hidden slots being NaN."""
    arguments = spoil_hidden(case.build())
    expected, bound = sdpa_with_bound(arguments)
    for isa in ISAS:
        with instruction_set(isa):
            one = custom_sdpa(arguments, layout=case.layout, threads=1)
            two = custom_sdpa(arguments, layout=case.layout, threads=2)
        error = np.abs(one.astype(np.float64) - expected)
        assert np.all(error <= bound), (
            f"{isa}: off by {error.max()}, {(error / np.maximum(bound, 1e-300)).max()} bounds"
        )
        # The work is cut by sizes alone, so the number of threads changes nothing at all.
        np.testing.assert_array_equal(one, two, err_msg=isa)


def spoil_hidden(arguments: Sdpa) -> Sdpa:
    """The same, with NaN in every slot that no row sees: in the scales of a slot where the cache holds codes."""
    unseen = np.logical_not(visible_slots(arguments).any(axis=(1, 2)))  # [B,C]
    batch, rows = arguments.query.shape[:2]
    changed: dict[str, Any] = {}
    for which in ("key", "value"):
        scales = getattr(arguments, f"{which}_scales")
        name = f"{which}_cache" if scales is None else f"{which}_scales"
        array = getattr(arguments, name)
        if array.ndim == 4:  # static scales are every slot's
            changed[name] = np.where(unseen[:, :, None, None], np.array(np.nan, array.dtype), array)
        recent = getattr(arguments, f"recent_{which}")
        if recent is not None:
            start = np.broadcast_to(arguments.start_pos, (batch,))
            new = np.stack([unseen[b, start[b] : start[b] + rows] for b in range(batch)])
            changed[f"recent_{which}"] = np.where(new[:, :, None, None], np.array(np.nan, recent.dtype), recent)
    return replace(arguments, **changed)
