"""SmolLM2-135M-Instruct with an int8 KV cache: a real model for graph rewriting, from weights to generated text."""
