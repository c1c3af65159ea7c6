"""`trtllm_mha` on FlashInfer's stand-in: what each kernel is given, masks of drafts, memory, refusals."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.cuda.trtllm_layers import chain_mask
from anyattn.errors import BackendBuildError, SelectionError
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.emulators import emulating
from anyattn.testing.judge import judge, run_step
from anyattn.testing.world import World

_SHAPE: dict[str, Any] = {
    "page_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64,
    "dtype": "bfloat16", "kv_dtype": "bfloat16",
}  # fmt: skip
_FUNCTIONS = {
    "xqa_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_context_with_kv_cache": "prefill",
}
_HOSTS = {"xqa": "cuda:sm90", "gen": "cuda:sm100"}


class Watched:
    """Arguments of every call of the library's functions, by the function's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        for name, home in _FUNCTIONS.items():
            module = importlib.import_module(f"flashinfer.{home}")
            monkeypatch.setattr(module, name, self._watch(name, getattr(module, name)))

    def _watch(self, name: str, original: Any) -> Any:
        signature = inspect.signature(original)

        def watched(*args: Any, **keywords: Any) -> Any:
            self.calls.append((name, dict(signature.bind(*args, **keywords).arguments)))
            return original(*args, **keywords)

        watched.__signature__ = signature  # type: ignore[attr-defined]
        return watched


@pytest.fixture(name="watched", params=["xqa", "gen"])
def _watched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Watched]]:
    with emulating("trtllm_mha", _HOSTS[request.param]):
        yield request.param, Watched(monkeypatch)


@pytest.fixture(name="gen")
def _gen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with emulating("trtllm_mha", _HOSTS["gen"]):
        yield Watched(monkeypatch)


def _world(kernel: str, **fields: Any) -> World:
    base = {"mode": "decode", "prefix_lens": (70, 3), "extend_lens": (1, 1), "return_lse": False}
    return World(Case(**{**_SHAPE, **base, **fields}), backend="trtllm_mha", host=_HOSTS[kernel])


def _run(world: World) -> None:
    report = judge(run_step(build_step(world)))
    assert report.passed, str(report)


def test_decode_names_its_kernel_window_and_scale(watched: tuple[str, Watched]) -> None:
    kernel, calls = watched
    _run(_world(kernel, window=5, scale=0.3, layout="HND"))
    name, given = calls.calls[0]
    assert name == ("xqa" if kernel == "xqa" else "trtllm") + "_batch_decode_with_kv_cache"
    assert given["kv_layout"] == "HND"
    assert (given["window_left"], given["bmm1_scale"]) == (4, 0.3)
    # The table is trimmed: 71 keys begin at the page of key 66, so 7 are listed of it.
    assert given["seq_lens"].tolist() == [7, 4]
    assert given.get("backend", "xqa") == ("trtllm-gen" if kernel == "gen" else "xqa")


def test_bounds_are_all_that_the_host_must_know(watched: tuple[str, Watched]) -> None:
    kernel, calls = watched
    world = _world(kernel)
    step = build_step(world)
    batch = anyattn.ForwardBatch.decode(
        step.batch.req_pool_indices, step.batch.seq_lens, step.batch.out_cache_loc,
        host_lens=anyattn.UpperBound(71, 1),
    )  # fmt: skip
    step.batch = batch
    assert judge(run_step(step)).passed
    assert calls.calls[0][1]["max_seq_len"] == 71
    assert world.backend.traits(anyattn.ForwardMode.DECODE).host_lengths.name == "BOUND"


def test_chains_of_drafts_of_any_lengths(watched: tuple[str, Watched]) -> None:
    kernel, calls = watched
    _run(_world(kernel, mode="verify", prefix_lens=(40, 0, 9), extend_lens=(5, 3, 1), window=7))
    given = calls.calls[0][1]
    if kernel == "xqa":
        # Compiled for the largest number of drafts, not for that of the step.
        assert (given["q_len_per_req"], given["mask"].dtype, tuple(given["mask"].shape)) == (
            8,
            torch.uint16,
            (9, 2),
        )
        assert given["q_cu_seq_lens"].tolist() == [0, 5, 8, 9]
    else:
        assert (given["q_len_per_req"], given["max_q_len"]) == (None, 5)
        assert given["cum_seq_lens_q"].tolist() == [0, 5, 8, 9]


@pytest.mark.parametrize("drafts", [3, 16, 17, 40])
def test_bits_of_a_chain(drafts: int) -> None:
    lens = [drafts, 1, drafts - 1]
    offsets = torch.tensor([0, drafts, drafts + 1, 2 * drafts], dtype=torch.int32)
    words = -(-drafts // 32) * 2
    out = torch.full((2 * drafts + 2, words), 7, dtype=torch.int16)
    chain_mask(offsets, out)
    bits = ((out.view(torch.uint16).int()[:, :, None] >> torch.arange(16)) & 1).view(out.shape[0], -1)
    row = 0
    for length in lens:
        for index in range(length):
            assert bits[row].tolist() == [int(j <= index) for j in range(words * 16)]
            row += 1


def test_scales_where_the_kernel_reads_them(watched: tuple[str, Watched]) -> None:
    kernel, calls = watched
    _run(_world(kernel, k_scale=0.5, v_scale=2.0))
    _run(_world(kernel, k_scale=0.5, v_scale=2.0, kv_dtype="float8_e4m3fn"))
    _run(_world(kernel, k_scale=(0.5, 2.0), v_scale=(2.0, 0.25), kv_dtype="float8_e4m3fn"))
    factors = [given["bmm2_scale"] for _, given in calls.calls]
    # XQA has one scale, for 8-bit KV alone; scales of each head are nobody's.
    assert factors == ([1.0, 2.0, 1.0] if kernel == "xqa" else [2.0, 2.0, 1.0])
    assert [given["bmm1_scale"] for _, given in calls.calls] == [0.0625, 0.0625, 0.125]


def test_8_bit_kv_of_trtllm_gen_is_read_with_8_bit_queries(gen: Watched) -> None:
    world = _world("gen", kv_dtype="float8_e4m3fn", mode="extend", extend_lens=(9, 4))
    _run(world)
    assert gen.calls[0][1]["query"].dtype is torch.float8_e4m3fn
    assert gen.calls[0][1]["out"].dtype is torch.bfloat16
    assert world.backend.traits(anyattn.ForwardMode.EXTEND).rounds_queries


@pytest.mark.parametrize("lse", [False, True])
def test_sinks_are_counted_once(gen: Watched, lse: bool) -> None:
    for fields in ({}, {"mode": "extend", "extend_lens": (9, 4)}):
        _run(_world("gen", sinks=True, return_lse=lse, **fields))
    assert [given["sinks"] is None for _, given in gen.calls] == [lse, lse]


def test_extends_get_running_sums_of_listed_keys(gen: Watched) -> None:
    _run(_world("gen", mode="extend", prefix_lens=(70, 0), extend_lens=(3, 40), window=20, strided=True))
    given = gen.calls[0][1]
    assert given["cum_seq_lens_kv"].tolist() == [0, 73 - 48, 73 - 48 + 40]
    assert (given["max_q_len"], given["max_kv_len"], given["batch_size"]) == (40, 73, 2)


def test_memory_is_zero_private_and_stays_so(watched: tuple[str, Watched]) -> None:
    kernel, calls = watched
    worlds = [_world(kernel) for _ in range(2)]
    for world in (*worlds, worlds[0]):
        _run(world)
    first, second, again = (given["workspace_buffer"] for _, given in calls.calls)
    assert first.data_ptr() == again.data_ptr() != second.data_ptr()
    if kernel == "gen":
        counters = [given["multi_ctas_kv_counter_buffer"] for _, given in calls.calls]
        assert counters[0].data_ptr() == counters[2].data_ptr() != counters[1].data_ptr()
        assert not counters[0].any()
        return
    assert not first[: 8 << 20].any(), "XQA's semaphores"


def test_statistics_of_a_long_extend_fit(gen: Watched) -> None:
    world = _world("gen", num_q_heads=64, num_kv_heads=64)
    world.backend._memory.cover(600, 500, stable=False)
    assert world.backend._memory.workspace.numel() >= 8 * 64 * 600 * 512 + (64 << 20)
    assert not world.backend._memory.workspace[:1024].any()


def test_an_older_flashinfer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("trtllm_mha", "cuda:sm90"):
        decode = importlib.import_module("flashinfer.decode")
        original = decode.xqa_batch_decode_with_kv_cache
        with monkeypatch.context() as patch:
            patch.setattr(decode, "xqa_batch_decode_with_kv_cache", lambda query, mask=None: None)
            with pytest.raises(BackendBuildError, match="ragged drafts"):
                _world("xqa", mode="verify", extend_lens=(3, 2))
            patch.delattr(decode, "xqa_batch_decode_with_kv_cache")
            with pytest.raises(BackendBuildError, match="no xqa_batch_decode"):
                _world("xqa")
        assert decode.xqa_batch_decode_with_kv_cache is original


@pytest.mark.parametrize("group", [1, 8, 16, 32])
def test_drafts_of_several_tiles_have_their_heads_sinks(group: int) -> None:
    with emulating("trtllm_mha", _HOSTS["xqa"]):
        _run(_drafts(group))


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        *(
            (group, "asked sinks, allowed custom_scale, kv_scales, ragged_verify, window")
            for group in (3, 15, 31)
        ),
        (20, "asked 20 query heads per KV head, allowed 1, 2, 4, 8, 16, 32"),
    ],
)
def test_sinks_of_drafts_are_refused_where_tiles_begin_within_a_group(group: int, reason: str) -> None:
    with emulating("trtllm_mha", _HOSTS["xqa"]), pytest.raises(SelectionError, match=reason):
        _drafts(group)


def test_drafts_without_sinks_name_every_group_that_would_do() -> None:
    with (
        emulating("trtllm_mha", _HOSTS["xqa"]),
        pytest.raises(SelectionError, match="asked 20 query heads per KV head, allowed 1, 2, 3, 4, 5, "),
    ):
        _drafts(20, sinks=False)


@pytest.mark.parametrize("group", [3, 15])
def test_drafts_without_sinks_may_have_any_group(group: int) -> None:
    with emulating("trtllm_mha", _HOSTS["xqa"]):
        _run(_drafts(group, sinks=False))


def _drafts(group: int, *, sinks: bool = True) -> World:
    fields = {"prefix_lens": (59, 17), "extend_lens": (6, 5), "num_q_heads": group, "num_kv_heads": 1}
    return _world("xqa", mode="verify", sinks=sinks, seed=7, **fields)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("drafts", [(1, 1), (1, 0)])
def test_a_process_that_verifies_one_token_alone(drafts: tuple[int, int], dtype: str) -> None:
    """The kernel for one is decode's: it rounds queries over 8-bit keys, and takes no request without any."""
    with emulating("trtllm_mha", _HOSTS["xqa"]):
        world = _world("xqa", mode="verify", extend_lens=drafts, kv_dtype=dtype, seed=4)
        assert world.decision.request.limits is not None
        assert world.decision.request.limits.max_draft_tokens == 1
        _run(world)


def test_a_process_that_does_not_say_how_many_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may verify all its context: the kernel isn't compiled for that, nor masks made so wide."""
    limits = World._limits
    monkeypatch.setattr(World, "_limits", lambda self: replace(limits(self), max_draft_tokens=1 << 17))
    with emulating("trtllm_mha", _HOSTS["xqa"]):
        watched = Watched(monkeypatch)
        _run(_world("xqa", mode="verify", prefix_lens=(40, 0), extend_lens=(5, 3)))
    given = watched.calls[0][1]
    assert (given["q_len_per_req"], tuple(given["mask"].shape)) == (8, (8, 2))
