"""What would be chosen on machines that aren't here, for a few kinds of models.

python examples/other_machines.py
"""

from __future__ import annotations

import anyattn

HOSTS = ("cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942", "ascend:910b", "cpu:amx", "cpu:arm")
MODELS = {
    "dense": anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128),
    "window 1024": anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, sliding_window=1024),
    "sinks, D 64": anyattn.AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=64, sinks=True),
}


def main() -> None:
    """One line for each machine and model: prefill, decode, page size."""
    for host in HOSTS:
        for name, spec in MODELS.items():
            decision = anyattn.select(spec, dtype="bfloat16", host=host)
            pair = [f"{c.backend}{'' if c.built else '*'}" for c in (decision.prefill, decision.decode)]
            print(f"{host:12} {name:12} {pair[0]:15} {pair[1]:15} pages of {decision.kv.page_size}")
    print("* no adapter in this version: a real machine would get the next one that has one")


if __name__ == "__main__":
    main()
