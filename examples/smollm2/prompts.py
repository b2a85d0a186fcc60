"""What the demo asks the model."""

from __future__ import annotations

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five tips for sleeping better.",
    "What is 17 times 23? Show the steps.",
    "Translate 'good morning, my friend' into Spanish and Italian.",
    "Summarise what photosynthesis does in two sentences.",
)

SHOWN = PROMPTS[2]
