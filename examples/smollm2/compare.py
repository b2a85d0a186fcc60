"""Do the four programs choose the same tokens? Greedy decoding of the same prompts, step by step.

The first program decodes freely. The others are fed the tokens that it chose and their own choice is compared at every
step: up to the first difference that is what each would have decoded alone, and the logits stay comparable after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

import graphrewrite as gr

Logits = npt.NDArray[np.float32]
# Tokens [S] and the position of the first of them; the logits [V] of the last.
Program = Callable[[Sequence[int], int], Logits]


@dataclass(frozen=True)
class Difference:
    """One step at which a program chose another token than the first one.

    gap: the first program's logit of its own choice less that of the other choice.
    """

    prompt: int
    step: int
    expected: int
    actual: int
    gap: float


@dataclass
class Agreement:
    """How one program compares with the first over all steps of all prompts.

    prompt_difference: largest difference of a logit on the prompts, where both read the same exact keys and values.
    largest_difference: the same over all steps. The caches are each program's own by then: a key that differs in its
        last bit may be quantized to the neighbouring code, and what is read later differs by a whole step of the scale.
    """

    name: str
    steps: int = 0
    seconds: float = 0.0
    prompt_difference: float = 0.0
    largest_difference: float = 0.0
    largest_logit: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def identical(self) -> int:
        return self.steps - len(self.differences)


def torch_program(module: torch.nn.Module) -> Program:
    """A program in torch. Slots at and after the position are never read, so a new prompt needs no reset."""

    def run(tokens: Sequence[int], position: int) -> Logits:
        with torch.no_grad():
            logits: torch.Tensor = module(torch.tensor([list(tokens)]), torch.tensor([position]))
        return logits[0, -1].numpy()

    return run


def decoder_program(decoder: gr.Decoder) -> Program:
    """A program in onnxruntime."""

    def run(tokens: Sequence[int], position: int) -> Logits:
        if position == 0:
            decoder.reset()
        return np.asarray(decoder.prefill(list(tokens)))

    return run


def compare(
    programs: dict[str, Program], prompts: Sequence[Sequence[int]], steps: int, progress: Callable[[str], None]
) -> list[Agreement]:
    """Decode ``steps`` tokens of every prompt with every program; the first one sets the tokens."""
    agreements = [Agreement(name) for name in programs]
    for number, prompt in enumerate(prompts):
        expected: list[Logits] = []
        for agreement, program in zip(agreements, programs.values(), strict=True):
            progress(f"prompt {number + 1} of {len(prompts)}, {agreement.name}")
            logits = _decode(program, prompt, steps, expected, agreement)
            if not expected:
                expected = logits
            _record(agreement, number, expected, logits)
    return agreements


def _decode(
    program: Program, prompt: Sequence[int], steps: int, expected: list[Logits], agreement: Agreement
) -> list[Logits]:
    """The logits of each step. Tokens follow ``expected`` where it is given, else the program's own choices."""
    logits = [program(prompt, 0)]
    started = time.perf_counter()
    for step in range(steps - 1):
        chosen = int((expected or logits)[step].argmax())
        logits.append(program([chosen], len(prompt) + step))
    agreement.seconds += time.perf_counter() - started
    return logits


def _record(agreement: Agreement, prompt: int, expected: list[Logits], actual: list[Logits]) -> None:
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        agreement.steps += 1
        difference = float(np.abs(ours - theirs).max())
        agreement.largest_difference = max(agreement.largest_difference, difference)
        if step == 0:
            agreement.prompt_difference = max(agreement.prompt_difference, difference)
        agreement.largest_logit = max(agreement.largest_logit, float(np.abs(theirs).max()))
        if (chosen := int(ours.argmax())) != (wanted := int(theirs.argmax())):
            gap = float(theirs[wanted] - theirs[chosen])
            agreement.differences.append(Difference(prompt, step, wanted, chosen, gap))
