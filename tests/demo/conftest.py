"""The demo model, loaded once for all tests of this folder; without its weights those tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from demo_server import Server

from anyattn.demo.model import LlamaModel
from anyattn.demo.tokenizer import Tokenizer
from anyattn.demo.weights import Checkpoint, find_gguf, load_gguf
from anyattn.errors import LibraryError


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """Dequantised weights and metadata."""
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        return load_gguf(find_gguf())
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer(checkpoint.metadata)


@pytest.fixture(scope="session")
def model(checkpoint: Checkpoint) -> LlamaModel:
    """The whole model in float32."""
    return LlamaModel(checkpoint, max_context=512)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Thread pools of several test processes on few cores wait for each other; one thread each doesn't."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server(model: LlamaModel, tokenizer: Tokenizer) -> Server:
    return Server(model, tokenizer.eos_id)
