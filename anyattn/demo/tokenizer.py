"""Byte-level BPE tokenizer from GGUF metadata, built with `tokenizers`.

It gives the ids that `transformers` gives for the same file: the GPT-2 pre-tokenizer, control tokens matched
whole, nothing added in front or behind. (The original repository's tokenizer also splits digits off before
that; since no token holds a digit and anything else, only runs of spaces before a digit would differ.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyattn.errors import ConfigError, LibraryError

__all__ = ["Tokenizer"]

_CONTROL = 3  # llama.cpp's token type for control tokens


class Tokenizer:
    """Text to ids and back.

    Args:
        fields: GGUF metadata with `tokenizer.ggml.*` of kind `gpt2`.

    Attributes:
        eos_id: the id that ends an answer. `special_ids`: all control tokens.

    Raises:
        ConfigError: another kind of tokenizer.
        LibraryError: `tokenizers` is not installed.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        kind = fields.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ConfigError("kind of tokenizer in the GGUF file", asked=kind, allowed="gpt2")
        tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        self.eos_id = int(fields["tokenizer.ggml.eos_token_id"])
        self.special_ids = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
        self._template: str | None = fields.get("tokenizer.chat_template")
        self._backend = _build(tokens, fields["tokenizer.ggml.merges"], sorted(self.special_ids))

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a text; control tokens written out in it become their ids."""
        return list(self._backend.encode(text).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation, open for the assistant's answer, by the file's own template.

        Args:
            messages: records with `role` (system, user, assistant) and `content`.

        Raises:
            ConfigError: the file has no chat template.
        """
        if self._template is None:
            raise ConfigError("the model file has no chat template", hint="use plain prompts")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(self._template)
        return template.render(messages=list(messages), add_generation_prompt=True)


def _build(tokens: Sequence[str], merges: Sequence[str], special: Sequence[int]) -> Any:
    try:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise LibraryError(
            "the demo's tokenizer needs tokenizers", asked=str(error), hint="pip install 'anyattn[demo]'"
        ) from error
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    return backend
