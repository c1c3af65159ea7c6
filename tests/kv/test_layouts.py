"""Layouts: what is written is read back, and lies where the libraries' documents say."""

import pytest
import torch

from anyattn.core.kv.layouts import LAYOUTS, layout_named
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError, UnknownNameError

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=48)
KINDS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def pool(layout: str, kv_dtype: torch.dtype = torch.float32, page: int = 16) -> MHAPool:
    return MHAPool(
        [SPEC], num_slots=8 * page, page_size=page, layout=layout, kv_dtype=kv_dtype, dtype=torch.float32
    )


@pytest.mark.parametrize("kv_dtype", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_gives_what_was_written(layout: str, kv_dtype: torch.dtype) -> None:
    made = pool(layout, kv_dtype)
    slots = torch.randperm(8 * 16)[:40] + 16
    k, v = torch.randn(40, 2, 32), torch.randn(40, 2, 48)
    made.write(0, slots, k, v)
    order = torch.randperm(40)
    got_k, got_v = made.gather(0, slots[order])
    assert torch.equal(got_k.float(), k[order].to(kv_dtype).float())
    assert torch.equal(got_v.float(), v[order].to(kv_dtype).float())
    touched = made.key_cache(0).float().ne(0).sum() + made.value_cache(0).float().ne(0).sum()
    assert int(touched) <= k.numel() + v.numel()


def test_elements_lie_where_the_libraries_read_them() -> None:
    slot, head = 2 * 16 + 9, 1
    page, row = slot // 16, slot % 16
    k, v = torch.arange(64.0).view(1, 2, 32), torch.arange(96.0).view(1, 2, 48)
    stored = {}
    for name in LAYOUTS:
        made = pool(name, torch.bfloat16)
        made.write(0, torch.tensor([slot]), k, v)
        stored[name] = made.key_cache(0).float(), made.value_cache(0).float()
    d, x = 21, 8  # 16 bytes of bfloat16
    want_k, want_v = k[0, head, d], v[0, head, d]
    key, value = stored["NHD"]
    assert (key[page, row, head, d], value[page, row, head, d]) == (want_k, want_v)
    key, value = stored["HND"]
    assert (key[page, head, row, d], value[page, head, row, d]) == (want_k, want_v)
    key, value = stored["VECTORISED_5D"]
    assert key[page, head, d // x, row, d % x] == want_k
    assert value[page, head, row // x, d, row % x] == want_v
    key, value = stored["PAGED_5D"]
    assert key[page, head, d // x, row, d % x] == want_k
    assert value[page, head, d, row] == want_v
    key, value = stored["NZ"]
    assert (key[page, head, d // 16, row, d % 16], value[page, head, d // 16, row, d % 16]) == (
        want_k,
        want_v,
    )


def test_sizes_that_do_not_split_are_refused() -> None:
    with pytest.raises(PoolError, match="whole chunks"):
        pool("VECTORISED_5D", torch.bfloat16, page=4)
    with pytest.raises(UnknownNameError, match="NHD"):
        layout_named("NDH")


def test_slots_of_split_layouts_can_not_be_moved() -> None:
    one = torch.tensor([16])
    with pytest.raises(PoolError, match="moved"):
        pool("NZ").move(one, one + 1)
