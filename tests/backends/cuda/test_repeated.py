"""Calls that are made again and again: as if made by name, and seen by whoever looks into operators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_stands import TOKENSPEED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.backends.cuda.flash_providers import load_flash
from anyattn.backends.cuda.repeated import positional, repeated
from anyattn.core.facts import LibraryFacts
from anyattn.testing.emulators import emulating

_SCHEMA = (
    "tell(int rows, ScalarType dtype, Tensor lens, Tensor? more=None, int? page=None, int splits=3) -> Tensor"
)


@pytest.fixture(scope="module")
def tell() -> Iterator[Any]:
    """An operator of several kinds of arguments, which returns its numbers and the lengths."""
    library: Any = torch.library.Library("anyattn_test_repeated", "DEF")  # type: ignore[no-untyped-call]
    library.define(_SCHEMA)

    def kernel(
        rows: int, dtype: torch.dtype, lens: torch.Tensor, more: Any = None, page: Any = None, splits: int = 3
    ) -> torch.Tensor:
        return torch.cat([torch.tensor([rows, dtype.itemsize, page or 0, splits]), lens.long()])

    library.impl("tell", kernel, "CPU")
    library.impl("tell", lambda *given: torch.empty(4 + given[2].shape[0], device="meta"), "Meta")
    yield torch.ops.anyattn_test_repeated.tell.default
    library._destroy()


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _given(lens: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"lens": lens, "rows": 7, "dtype": torch.bfloat16, **more}


@pytest.mark.parametrize("more", [{}, {"page": 16}, {"splits": 1}, {"splits": 1, "page": 16}])
@pytest.mark.parametrize("inference", [False, True])
def test_it_is_the_call_by_name_with_what_its_tensors_hold_now(
    tell: Any, more: dict[str, int], inference: bool
) -> None:
    lens = torch.tensor([3, 4], dtype=torch.int32)
    call = repeated(tell, _given(lens, **more))
    for _ in range(2):
        with torch.inference_mode(inference):
            assert torch.equal(call(), tell(**_given(lens, **more)))
        lens += 1


def test_the_kernel_is_called_without_torch_but_for_modes(tell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    through, real = list[int](), tell._op

    def counted(*given: Any) -> Any:
        through.append(len(given))
        return real(*given)

    monkeypatch.setattr(tell, "_op", counted)
    call = repeated(tell, _given(torch.tensor([3], dtype=torch.int32)))
    call()
    assert not through
    with _Seen() as seen:
        call()
    assert through == [3, 3], "by us, and by the mode"
    assert [name for name in seen.names if "tell" in name] == ["anyattn_test_repeated.tell.default"]


def test_what_only_looks_like_a_tensor_goes_through_torch(tell: Any) -> None:
    with FakeTensorMode() as mode:
        lens = mode.from_tensor(torch.zeros(2, dtype=torch.int32))
    found = repeated(tell, _given(lens))()  # its mode is left: nothing on the stack says what it is
    assert type(found) is type(lens)
    assert found.shape == (6,)


def test_a_python_function_is_called_by_name() -> None:
    def function(rows: int, *, lens: torch.Tensor) -> tuple[int, torch.Tensor]:
        return rows, lens

    lens = torch.zeros(1)
    assert repeated(function, {"lens": lens, "rows": 2})() == (2, lens)


def test_names_and_gaps_that_a_schema_has_no_place_for_are_refused(tell: Any) -> None:
    lens = torch.zeros(1, dtype=torch.int32)
    assert positional(tell._schema, _given(lens, page=16)) == (7, torch.bfloat16, lens, None, 16)
    with pytest.raises(TypeError, match="width"):
        repeated(tell, _given(lens, width=3))
    with pytest.raises(TypeError, match="needs rows"):
        repeated(tell, {"lens": lens})


def test_the_scheduler_is_called_as_the_operator_where_it_is_known() -> None:
    with emulating("fa3", TOKENSPEED):
        module: Any = sys.modules["flash_attn_interface"]
        provider = LibraryFacts("tokenspeed-fa3", "3.0.0.post20260810")
        known = load_flash(provider, 3).schedule
        assert known is not None
        assert known.call is module.flash_attn_3_gpu.get_scheduler_metadata
        assert known.names["heads_q"] == "num_heads"
        schema = str(known.call._schema).replace("page_size", "page")
        known.call._schema = torch._C.parse_schema(schema)
        other = load_flash(provider, 3).schedule
        assert other is not None
        assert other.call is module.get_scheduler_metadata
