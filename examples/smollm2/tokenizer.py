"""The tokenizer stored in the GGUF file: byte-level BPE with digits split, and the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gguf
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.smollm2.weights import field_reader
from graphrewrite.errors import InputError

_CONTROL = int(gguf.TokenType.CONTROL)
_KIND = ("gpt2", "smollm")


@dataclass(frozen=True)
class ChatTokenizer:
    """Text to token numbers and back. ``end`` is the number of the token that ends an answer."""

    tokenizer: Tokenizer
    template: str
    end: int

    def encode(self, text: str) -> list[int]:
        """Token numbers of plain text; special tokens spelled in the text are recognised."""
        return list(self.tokenizer.encode(text).ids)

    def encode_chat(self, prompt: str) -> list[int]:
        """Token numbers of a conversation with one user message, up to where the answer starts."""
        # A template is a program from a file, so it runs in the sandbox.
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.template)
        text = template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token numbers; special tokens are left out, an incomplete character becomes U+FFFD."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(reader: gguf.GGUFReader) -> ChatTokenizer:
    """The tokenizer stored in a GGUF file. Raises InputError for any other kind of tokenizer."""
    field = field_reader(reader)
    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != _KIND:
        raise InputError(f"the GGUF file has a tokenizer of kind {kind}, this example reads {_KIND}")
    words = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False) for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
    )
    return ChatTokenizer(tokenizer, field("tokenizer.chat_template"), field("tokenizer.ggml.eos_token_id"))
