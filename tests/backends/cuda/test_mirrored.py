"""Host arrays with a twin on the device: what a library is handed, whatever it does with one."""

from __future__ import annotations

import torch

from anyattn.backends.cuda.mirrored import Mirrored


def _pair() -> tuple[torch.Tensor, torch.Tensor, Mirrored]:
    host = torch.arange(5, dtype=torch.int32)
    twin = torch.empty(5, dtype=torch.int32, device="meta")
    return host, twin, Mirrored.of(host, twin)


def test_nothing_is_copied_to_where_the_twin_is() -> None:
    host, twin, both = _pair()
    assert both.to(torch.device("meta"), non_blocking=True) is twin
    assert both.to("cpu") is host, "planners are given plain tensors"
    assert both.to(torch.device("meta"), torch.int64).dtype is torch.int64, "a real conversion"
    assert both.to(device="meta") is not twin


def test_anything_else_is_done_with_the_hosts_values() -> None:
    host, _, both = _pair()
    assert isinstance(both, torch.Tensor)
    assert (len(both), both.dtype, both.device.type, both.shape) == (5, torch.int32, "cpu", host.shape)
    assert type(both[1:] - both[:-1]) is torch.Tensor
    assert (both[1:] - both[:-1]).tolist() == [1, 1, 1, 1]
    assert both.cpu().tolist() == host.tolist()
    assert torch.zeros(5, dtype=torch.int32).copy_(both).tolist() == host.tolist()
    assert int(both.max()) == 4
    assert both.data_ptr() == host.data_ptr()
