"""The wave-lang stand-in against the oracle: compiled constants, splits, prefixes, launches that misread."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import EmulationError, emulating

LENGTHS, SPLITS = [7, 33, 2], 4
BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = 8e-3


class _Wave:
    """The library, compiled as an engine does."""

    def __init__(self) -> None:
        root = "wave_lang.kernel.wave"
        self.decoding = importlib.import_module(f"{root}.templates.paged_decode_attention")
        self.extending = importlib.import_module(f"{root}.templates.extend_attention")
        self.compiling = importlib.import_module(f"{root}.compile")
        self.running = importlib.import_module(f"{root}.utils.run_utils")
        self.kinds = importlib.import_module(f"{root}.constraints")

    def compiled(self, kernel: Any, values: Any, dynamic: Any, **more: Any) -> Any:
        given = {"subs": values, "dynamic_symbols": dynamic, "wave_runtime": True, **more}
        options = self.running.set_default_run_config(self.compiling.WaveCompileOptions(**given))
        return self.compiling.wave_compile(options, kernel)

    def decode(self, heads: int = 8, dim: int = 64, **more: Any) -> tuple[Any, Any]:
        shape = self.decoding.paged_decode_attention_shape(heads, 2, dim, dim, 1, 3)
        kind = self.kinds.MMAType.F32_16x16x16_F16
        given = {"input_dtype": BF16, "output_dtype": BF16, **more}
        made = self.decoding.get_paged_decode_attention_kernels(shape, (kind, kind), SPLITS, **given)
        first, second, *values = made
        return self.compiled(first, values[0], values[2]), self.compiled(second, values[1], values[3])

    def extend(self, longest: int = 40, **more: Any) -> Any:
        shape = self.extending.AttentionShape(8, 2, 64, 64, max_seq_len=longest)
        kind = self.kinds.MMAType
        given = {"input_dtype": BF16, "output_dtype": BF16, "is_causal": True, **more}
        made = self.extending.get_extend_attention_kernel(
            shape, (kind.F32_16x16x32_K8_F16, kind.F32_16x16x16_F16), *[(1, 8, 64)] * 6, **given
        )
        return self.compiled(*made)


@pytest.fixture(name="wave")
def _wave() -> Iterator[_Wave]:
    with emulating("wave"):
        yield _Wave()


def _world(dtype: torch.dtype = BF16) -> Pages:
    return pages(LENGTHS, page=1, heads=2, dim=64, dtype=dtype)


def _indices(slots: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    flat = [s for own in slots for s in own]
    return offsets_of([len(own) for own in slots]), torch.tensor(flat, dtype=torch.int32)


def _decoded(wave: _Wave, world: Pages, q: torch.Tensor, *, batch: int = 3, **more: Any) -> torch.Tensor:
    phase_0, phase_1 = wave.decode(**more)
    shape = wave.decoding.paged_decode_attention_shape(8, 2, 64, 64, 1, batch)
    sizes = wave.decoding.get_paged_decode_intermediate_arrays_shapes(shape, SPLITS)
    logits, largest = (torch.zeros(size) for size in sizes)
    indptr, indices = _indices(world.slots)
    out = torch.zeros(batch, 8, 64, dtype=BF16)
    assert isinstance(phase_0(q, world.keys[:, 0], world.values[:, 0], indptr, indices, logits, largest), str)
    phase_1(logits, largest, indptr, out)
    return out


def test_decode_in_two_phases(wave: _Wave) -> None:
    world, q = _world(), queries(3, 8, 64, BF16)
    rows = [1, 1, 1]
    assert close(_decoded(wave, world, q), world.expected(q, rows)[0], TOLERANCE)
    given = _decoded(wave, world, q, layer_scaling=0.3, logit_cap=2.0)
    assert close(given, world.expected(q, rows, scale=0.3, logit_cap=2.0)[0], TOLERANCE)


def test_splits_hold_base_two_sums(wave: _Wave) -> None:
    world, q = _world(), queries(3, 8, 64, BF16)
    phase_0, _ = wave.decode()
    logits, largest = torch.zeros(SPLITS, 3, 8, 64), torch.zeros(SPLITS, 3, 8)
    phase_0(q, world.keys[:, 0], world.values[:, 0], *_indices(world.slots), logits, largest)
    sums = torch.logsumexp(largest[:, 0].double() * math.log(2), 0)
    assert close(sums, world.expected(q, [1, 1, 1])[1][0], 1e-5)
    assert (largest[2:, 2] == -1e6).all()  # two keys in four splits
    assert (logits[2:, 2] == 0).all()


def test_launches_misread_silently(wave: _Wave) -> None:
    world, q = _world(), queries(3, 8, 64, BF16)
    assert torch.isnan(_decoded(wave, world, q, batch=2)).all()  # workspaces of another batch
    with pytest.raises(RuntimeError, match="indptr"):
        _decoded(wave, world, q, batch=4)
    assert torch.isnan(_decoded(wave, world, q, input_dtype=F16)).all()
    world.slots[2] = []
    assert torch.isnan(_decoded(wave, world, q)[2]).all()  # 0 / 0
    with pytest.raises(RuntimeError, match="illegal"):
        _decoded(wave, world, queries(3, 4, 64, BF16))


def test_an_output_with_gaps_is_lost(wave: _Wave) -> None:
    phase_1 = wave.decode()[1]
    logits, largest = torch.ones(SPLITS, 3, 8, 64), torch.zeros(SPLITS, 3, 8)
    wide = torch.zeros(3, 16, 64, dtype=BF16)
    phase_1(logits, largest, offsets_of(LENGTHS), wide[:, :8])
    assert not wide.any()
    dense = torch.zeros(3, 8, 64, dtype=BF16)
    phase_1(logits, largest, offsets_of(LENGTHS), dense)
    assert (dense == 1).all()


def _extended(
    wave: _Wave, world: Pages, q: torch.Tensor, rows: list[int], *more: Any, longest: int = 40, **how: Any
) -> torch.Tensor:
    kernel = wave.extend(longest, **how)
    new = [s for own, n in zip(world.slots, rows, strict=True) for s in own[len(own) - n :]]
    prefix = _indices([own[: len(own) - n] for own, n in zip(world.slots, rows, strict=True)])
    keys, values = world.keys[:, 0], world.values[:, 0]
    out = torch.full((q.shape[0], 8, 64), torch.nan, dtype=BF16)
    kernel(q, keys[new], values[new], keys, values, offsets_of(rows), *prefix, *more, longest, out)
    return out


def test_extend_reads_the_prefix_from_the_cache(wave: _Wave) -> None:
    world, rows = _world(), [3, 20, 2]
    q = queries(25, 8, 64, BF16)
    assert close(_extended(wave, world, q, rows), world.expected(q, rows)[0], TOLERANCE)
    given = _extended(wave, world, q, rows, layer_scaling=0.3, logit_cap=2.0)
    assert close(given, world.expected(q, rows, scale=0.3, logit_cap=2.0)[0], TOLERANCE)
    free = _extended(wave, world, q, rows, is_causal=False)
    assert close(free, world.expected(q, rows, kind="bidirectional")[0], TOLERANCE)


def test_rows_behind_the_longest_are_launched_by_nobody(wave: _Wave) -> None:
    world = pages([100], page=1, heads=2, dim=64, dtype=BF16)
    q = queries(100, 8, 64, BF16)
    out = _extended(wave, world, q, [100], longest=10)
    assert close(out[:64], world.expected(q, [100])[0][:64], TOLERANCE)
    assert torch.isnan(out[64:]).all()


def test_masks_of_ones_own(wave: _Wave) -> None:
    world, rows = _world(), [1, 1, 1]
    q = queries(3, 8, 64, BF16)
    mask = torch.ones(sum(LENGTHS), dtype=torch.int8)
    mask[1] = 0
    offsets = torch.tensor([0, 7, 40], dtype=torch.int32)
    how = {"is_causal": False, "use_custom_mask": True}
    out = _extended(wave, world, q, rows, mask, offsets, **how)
    del world.slots[0][1]
    assert close(out, world.expected(q, rows)[0], TOLERANCE)
    with pytest.raises(AssertionError, match="both causal and custom"):
        wave.extend(use_custom_mask=True)


def test_what_does_not_compile(wave: _Wave) -> None:
    with pytest.raises(AssertionError, match="Unsupported input"):
        wave.extend(input_dtype=torch.float8_e4m3fnuz)
    with pytest.raises(EmulationError, match="never compiled"):
        wave.decode(heads=4)
    with pytest.raises(EmulationError, match="never compiled"):
        wave.decode(dim=96)
    with pytest.raises(TypeError, match="use_buffer"):
        wave.compiling.WaveCompileOptions(use_buffer_load_ops=True)
    kernel, *rest = wave.decoding.get_paged_decode_attention_kernels(
        wave.decoding.paged_decode_attention_shape(8, 2, 64, 64, 1, 3),
        (wave.kinds.MMAType.F32_16x16x16_F16,) * 2, SPLITS,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="dynamic symbols"):
        wave.compiled(kernel, rest[1], ["S"])
    with pytest.raises(RuntimeError, match="without a value"):
        wave.compiled(kernel, {}, ["K2", "N_KV", "S"])
    with emulating("wave", "rocm:gfx1100"), pytest.raises(RuntimeError, match="gfx1100"):
        _Wave().decode()
