"""Checks of graphs: waits for the device, allocations, addresses, and who keeps memory alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from anyattn.core.graph.recorder import RecorderGraph
from anyattn.core.graph.runner import Captured
from anyattn.core.metadata import upload
from anyattn.core.metadata.upload import Uploader
from anyattn.core.streams import EventRecorder
from anyattn.testing.checks import Skip
from anyattn.testing.graph_checks import Labs, whole_buckets
from anyattn.testing.graph_device import DeviceUse, pretending_device
from anyattn.testing.graph_lab import GraphLab, GraphStep
from anyattn.testing.graph_probe import addresses, counting_allocations, rebound, watching_host_syncs

__all__ = ["addresses_stay", "allocations", "host_syncs", "keeps_alive", "staging"]

_STEPS = 9  # more than there are staging buffers


def host_syncs(labs: Labs) -> list[str]:
    """Preparing and replaying a step waits for nothing. On a CPU: preparing it."""
    step = _warm(labs)
    if labs.on_cuda:
        with watching_host_syncs(labs.lab.device) as found:
            labs.runner.replay(step.batch, **step.inputs)
        return [f"host sync: {sync}" for sync in found]
    return [f"host sync: {sync}" for sync in _pretended(labs, step).syncs]


def allocations(labs: Labs) -> list[str]:
    """A step in steady state allocates nothing on the device; neither does filling tables, in one launch."""
    step = _warm(labs)
    if labs.on_cuda:
        device = labs.lab.device
        with counting_allocations(device) as at_replay:
            labs.runner.replay(step.batch, **step.inputs)
        found = _counted("at replay", at_replay.count, at_replay.nbytes)
        if _fused(labs.lab):
            plan = labs.runner.entry(step.batch).plan
            with counting_allocations(device) as inside:
                labs.lab.backend.init_forward_metadata_in_graph(plan)
            found += _counted("in the graph", inside.count, inside.nbytes)
        provider = labs.lab.serving.config.provider
        if found and provider is not None:
            # Planners of vendors return fresh tensors (FA3's and FlashMLA's schedules), which are copied into
            # ours. What our own code allocates shows on the stand-ins, where this is judged.
            raise Skip(f"{'; '.join(found)}: calls of {provider.distribution} may")
        return found
    found = [f"allocation at replay: {line}" for line in _pretended(labs, step).allocations]
    return found + [f"allocation in the graph: {line}" for line in _recorded_tables(labs)]


def _counted(when: str, count: int, nbytes: int) -> list[str]:
    return [f"allocation {when}: {count} on the device, {nbytes} bytes"] if count else []


def _warm(labs: Labs) -> GraphStep:
    """A step of a shape that has been replayed before, as in steady state."""
    lab, count = labs.lab, max(whole_buckets(labs.lab)) - 1
    for _ in range(3):
        step = lab.draw(count)
        lab.fill_mask(step)
        labs.runner.replay(step.batch, **step.inputs)
        lab.expected(step)
    return step


def _fused(lab: GraphLab) -> bool:
    """Tables are filled by a kernel; plain torch needs temporaries, which a graph's own memory holds."""
    return lab.serving.compiler.filler is not None and lab.mask is None


def _pretended(labs: Labs, step: GraphStep) -> DeviceUse:
    entry = labs.runner.entry(step.batch)
    with pretending_device(_on_device(labs)) as use:
        labs.runner.prepare(entry, step.batch, step.inputs)
    return use


def _on_device(labs: Labs) -> Iterator[torch.Tensor]:
    lab = labs.lab
    yield from labs.runner.inputs.values()
    yield lab.table.req_to_token
    yield from (cache for i in range(2) for cache in lab.caches(i))
    buffers = lab.serving._buffers
    yield from (buffers._slab, *buffers._memory.values())
    if lab.mask is not None:
        yield lab.mask.buffer


def _recorded_tables(labs: Labs) -> list[str]:
    """Operations that a recording of the tables' part makes room for."""
    if not _fused(labs.lab):
        return []
    plan = labs.runner.entry(labs.lab.draw(1).batch).plan
    graph = labs.hooks.inner.new_graph()
    graph.capture(lambda: labs.lab.backend.init_forward_metadata_in_graph(plan))
    assert isinstance(graph, RecorderGraph)
    return [name for name in graph.operations if not name.startswith("triton kernel") and _makes(name)]


def _makes(name: str) -> bool:
    """Neither in place nor into a tensor that was given."""
    plain = name.removeprefix("aten.").partition(".")[0]
    return not plain.endswith("_") and ".out" not in name


def addresses_stay(labs: Labs) -> list[str]:
    """Replays of every bucket move nothing that graphs read: plan, tables, inputs, outputs, private parts."""
    lab, runner, found = labs.lab, labs.runner, []
    entries = [runner.entry(lab.draw(size).batch) for size in whole_buckets(lab)]
    before = [addresses(_roots(entry)) for entry in entries]
    for count in (*whole_buckets(lab), *reversed(whole_buckets(lab))):
        step = lab.draw(count, on_device=True)
        lab.fill_mask(step)
        runner.replay(step.batch, **step.inputs)
        lab.expected(step)
    for entry, was in zip(entries, before, strict=True):
        found += [f"rebinding in {entry.key}: {line}" for line in rebound(was, addresses(_roots(entry)))]
        found += [f"in {entry.key}, {line}" for line in _unnamed(labs, entry)]
    return found


def _roots(entry: Captured) -> dict[str, Any]:
    plan = entry.plan
    tables = {
        str(number): [getattr(table, name) for name in _TABLE if getattr(table, name) is not None]
        for number, table in enumerate(plan.tables.values())
    }
    return {
        "inputs": dict(entry.inputs), "outputs": entry.outputs, "tables": tables,
        **{name: getattr(plan, name) for name in _PLAN},
        "write_locs": list(plan.write_locs.values()), "window_locs": list(plan.window_locs.values()),
    }  # fmt: skip


_PLAN = (
    "req_pool_indices", "seq_lens", "prefix_lens", "extend_lens", "query_offsets", "positions",
    "mask_cells", "mask_indptr", "listed_loc",
)  # fmt: skip
_TABLE = ("kv_start", "kv_lens", "indptr", "indices", "block_table", "last_page_len")


def _unnamed(labs: Labs, entry: Captured) -> list[str]:
    """Memory that the recorded graph uses and nobody names any more: a tensor was bound anew."""
    inner = getattr(entry.graph, "inner", None)
    if not isinstance(inner, RecorderGraph):
        return []
    lab = labs.lab
    owners = [entry.plan, labs.runner.inputs, lab.backend, lab.layers, lab.pool, lab.table, entry.inputs]
    named: set[int] = set()
    for address in addresses(owners).values():
        named.add(address.pointer)
    storages = _storages(owners)
    return [
        f"the graph uses memory that nobody names now: {outside.first_use}"
        for outside in inner.outside
        if outside.nbytes and outside.address not in named and outside.address not in storages
    ]


def _storages(root: Any) -> set[int]:
    """First bytes of all storages under `root`."""
    found: set[int] = set()
    seen: set[int] = set()
    open_ = [root]
    while open_:
        value = open_.pop()
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif id(value) not in seen and not isinstance(value, (str, bytes, int, float, type)):
            seen.add(id(value))
            if isinstance(value, dict):
                open_ += [*value.keys(), *value.values()]
            elif isinstance(value, (tuple, list, set, frozenset)):
                open_ += list(value)
            elif type(value).__module__.startswith(("anyattn", "torch.nn")):
                slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
                open_ += [*getattr(value, "__dict__", {}).values(), *slots]
    return found


def keeps_alive(labs: Labs) -> list[str]:
    """A graph keeps nothing alive: the runner does, whatever else is dropped after the capture.

    On CUDA all free memory is filled with NaN in between, and must be as it was afterwards.
    """
    lab = labs.make()
    runner = lab.runner()
    gc.collect()
    junk = _fill_free_memory(lab.device) if lab.device.type == "cuda" else []
    found = []
    for count in whole_buckets(lab):
        step = lab.draw(count)
        lab.fill_mask(step)
        error = lab.error(step, runner.replay(step.batch, **step.inputs))
        if not error <= lab.tolerance:
            found.append(f"error {error:.3g} once freed memory was used again")
    if any(not bool(torch.isnan(part).all()) for part in junk):
        found.append("the graph wrote to freed memory")
    return found


def _fill_free_memory(device: torch.device) -> list[torch.Tensor]:
    torch.cuda.synchronize(device)
    free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sizes = [1 << 22] * (free >> 22) + [1 << 14] * 256 + [512] * 1024
    return [torch.full((size // 4,), torch.nan, device=device) for size in sizes]


class _Marked:
    """Stands for the event of a staging buffer's last copy."""

    def __init__(self) -> None:
        self.pending, self.early = False, 0

    def record(self) -> None:
        self.early += self.pending
        self.pending = True

    def synchronize(self) -> None:
        self.pending = False


def staging(labs: Labs) -> list[str]:
    """A staging buffer isn't written again before its copy has ended, however far ahead the host is."""
    device = labs.lab.device
    if labs.on_cuda:
        return _staging_on_cuda(device)
    if device.type != "cpu":
        raise Skip(f"nothing to delay copies with on {device.type}")
    uploader = Uploader(torch.device("cuda"))  # its device is never touched: the ring is filled here
    uploader._events = EventRecorder(device)
    events = [_Marked() for _ in uploader._ring]
    memory = [torch.zeros(64, dtype=torch.uint8) for _ in events]
    uploader._ring = [
        upload._Staging(m, e)  # type: ignore[arg-type]
        for m, e in zip(memory, events, strict=True)
    ]
    for value in range(_STEPS):
        uploader.send(torch.zeros(64, dtype=torch.uint8), [(0, torch.full((8,), value), torch.int64)])
    early = sum(event.early for event in events)
    return [f"a staging buffer was reused early, {early} times, before its copy ended"] if early else []


def _staging_on_cuda(device: torch.device) -> list[str]:
    uploader = Uploader(device)
    regions = [torch.zeros(1 << 16, dtype=torch.uint8, device=device) for _ in range(_STEPS)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    for value, region in enumerate(regions):
        uploader.send(region, [(0, torch.full((1 << 13,), value), torch.int64)])
    torch.cuda.synchronize(device)
    wrong = [i for i, region in enumerate(regions) if not bool((region.view(torch.int64) == i).all())]
    return [f"a staging buffer was reused early: uploads {wrong} hold later values"] if wrong else []
