"""Which build serves, and what its functions call our arguments."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_stands import SGLANG, TOKENSPEED, VLLM, backend_of, spec

from anyattn.backends.cuda.flash_providers import MODULES, FlashFunction, load_flash
from anyattn.catalog.cuda_flash import FA3_DENSE_ROWS, FA3_MLA_ROWS, FA4_DENSE_ROWS, FA4_MLA_ROWS
from anyattn.core.facts import LibraryFacts
from anyattn.core.rows import aligned
from anyattn.errors import BackendBuildError, FeatureError, LibraryError
from anyattn.testing.emulators import emulating


@pytest.mark.parametrize(
    ("host", "distribution"), [(TOKENSPEED, "tokenspeed-fa3"), (SGLANG, "sglang-kernel"), (VLLM, "vllm")]
)
def test_the_provider_that_was_decided_on_serves(host: str, distribution: str) -> None:
    with emulating("fa3", host):
        backend = backend_of("fa3", host, [spec()])
    assert backend.config.provider.distribution == distribution


def test_every_provider_of_the_rows_has_a_module() -> None:
    rows = (*FA3_DENSE_ROWS, *FA3_MLA_ROWS, *FA4_DENSE_ROWS, *FA4_MLA_ROWS)
    assert {p.distribution for row in rows for p in row.providers} == set(MODULES)


def test_sglangs_paged_calls_avoid_the_function_that_ignores_its_table() -> None:
    with emulating("fa3", SGLANG):
        library = load_flash(LibraryFacts("sglang-kernel", "0.4.10"), 3)
    assert "cache_seqlens" in library.paged.names.values()
    assert "page_table" in library.ragged.names.values()
    assert library.paged is not library.ragged
    assert library.schedule is not None
    assert library.schedule.names["heads_q"] == "num_heads"


def test_without_a_provider_nothing_loads() -> None:
    with pytest.raises(LibraryError, match="tokenspeed-fa3"):
        load_flash(None, 3)
    with pytest.raises(LibraryError, match="flash-attn-2"):
        load_flash(LibraryFacts("flash-attn-2"), 3)


def test_a_module_without_the_function_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(LibraryError, match="flash_attn_varlen_func"):
        load_flash(LibraryFacts("tokenspeed-fa3", "3.0.0"), 3)


def test_an_import_that_fails_is_one_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # type: ignore[arg-type]
    with pytest.raises(BackendBuildError, match="flash_attn_interface"):
        backend_of("fa3", TOKENSPEED, [spec()])


def test_a_build_without_sinks_is_refused_before_the_first_step() -> None:
    with emulating("fa3", TOKENSPEED):
        module = sys.modules["flash_attn_interface"]
        vars(module).pop("flash_attn_3_gpu", None)

        def older(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, page_table: Any) -> None: ...

        module.flash_attn_with_kvcache = older  # type: ignore[attr-defined]
        with pytest.raises(FeatureError, match="sinks"):
            backend_of("fa3", TOKENSPEED, [spec(sinks=True)])


def test_an_argument_that_a_function_lacks_is_named() -> None:
    def narrow(q: Any, k: Any, v: Any, causal: bool = False) -> None: ...

    function = FlashFunction.of(narrow)
    assert function.bind(causal=True, cap=None) == {"causal": True}
    with pytest.raises(FeatureError, match="softcap"):
        function.bind(cap=30.0)


def test_windows_in_both_conventions() -> None:
    def pair(q: Any, k: Any, v: Any, window_size: Any = (-1, -1)) -> None: ...

    def apart(q: Any, k: Any, v: Any, window_size_left: int = -1, window_size_right: int = -1) -> None: ...

    assert FlashFunction.of(pair).bind(window=(6, 0)) == {"window_size": (6, 0)}
    assert FlashFunction.of(pair, version=4).bind(window=(6, -1)) == {"window_size": (6, None)}
    assert FlashFunction.of(apart).bind(window=(6, 0)) == {"window_size_left": 6, "window_size_right": 0}


def test_rows_that_vector_loads_cannot_reach_are_copied() -> None:
    x = torch.randn(4, 2, 64).to(torch.bfloat16)
    assert aligned(x) is x
    fused = torch.randn(4, 3 * 128).to(torch.bfloat16)[:, 128:256].view(4, 2, 64)
    assert aligned(fused) is fused
    odd = torch.randn(4, 2 * 64 + 3).to(torch.bfloat16)[:, : 2 * 64].view(4, 2, 64)
    shifted = torch.randn(4 * 128 + 1).to(torch.bfloat16)[1:].view(4, 2, 64)
    across = torch.randn(4, 64, 2).to(torch.bfloat16).transpose(1, 2)
    for given in (odd, shifted, across):
        copy = aligned(given)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, given)
