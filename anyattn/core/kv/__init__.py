"""KV storage: pools, the request table, the allocator, scales. Public as `anyattn.kv`."""

from anyattn.core.ids import VirtualIds
from anyattn.core.kv.factory import create_pool
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.kv.pools.packed import PackedFormat, PackedPool
from anyattn.core.kv.pools.unified import UnifiedPool
from anyattn.core.kv.pools.window import WindowPool, window_slots_for
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.kv.scales import KVScale
from anyattn.core.kv.translate import VirtualTable, bind_and_verify_backends
from anyattn.core.kv.window_allocator import WindowAllocator

__all__ = [
    "KVPool",
    "KVScale",
    "MHAPool",
    "MLAPool",
    "PackedFormat",
    "PackedPool",
    "RequestTable",
    "UnifiedPool",
    "VirtualIds",
    "VirtualTable",
    "WindowAllocator",
    "WindowPool",
    "bind_and_verify_backends",
    "create_pool",
    "window_slots_for",
]
