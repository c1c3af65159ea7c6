"""The tokenizer against transformers' on the same file, and against recorded ids."""

from __future__ import annotations

import os

import pytest
from demo_reference import cases

from anyattn.demo.tokenizer import Tokenizer
from anyattn.demo.weights import Checkpoint, find_gguf
from anyattn.errors import ConfigError

TEXTS = (
    "",
    " ",
    "The capital of France is",
    " leading and trailing  ",
    "In 2018, 12345 people paid 3.14 €; 007 and 1e-10, ½ and ٣",
    "x  42   7\n 8\n\n\n  9\t10",
    "Grüße aus Köln — 世界 こんにちは 🎉👩‍👩‍👧 \u00a0 é é",
    "don't I'll WE'VE they're 'quoted'",
    "def f(x):\n    return x**2  # комментарий\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
    "<|im_start |> <|not_special|> <|im_end|",
    "a" * 300,
    "\r\n\x00\x07 control \ufeff",
)
MESSAGES = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": " two  spaces\n"},
    ],
)


@pytest.mark.model
def test_recorded_prompts(tokenizer: Tokenizer) -> None:
    for case in cases():
        assert tokenizer.encode(case.prompt) == case.prompt_ids
        assert tokenizer.decode(case.ids) == case.text


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.model
def test_special_tokens_are_single_ids_and_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == tokenizer.eos_id == 2
    assert {1, 2} < tokenizer.special_ids
    assert tokenizer.decode(ids) == "hi"


@pytest.mark.model
def test_as_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = find_gguf()
    reference = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    assert tokenizer.vocab_size == len(reference) == 49152
    assert tokenizer.special_ids == set(reference.added_tokens_decoder) >= set(reference.all_special_ids)
    assert tokenizer.eos_id == reference.eos_token_id
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    for messages in MESSAGES:
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.chat(messages) == expected


@pytest.mark.model
def test_other_kinds_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="asked: llama; allowed: gpt2"):
        Tokenizer({**checkpoint.metadata, "tokenizer.ggml.model": "llama"})
    bare = {k: v for k, v in checkpoint.metadata.items() if k != "tokenizer.chat_template"}
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(bare).chat(MESSAGES[0])
