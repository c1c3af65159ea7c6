"""`anyattn select`: the decision for a model on this host or on one that isn't there. Builds nothing."""

from __future__ import annotations

import argparse
import json
import math

from anyattn.core.capabilities import Feature, ModelKind
from anyattn.core.measure.bucket import Workload
from anyattn.core.spec import AttentionKind, AttentionSpec, Limits, MLASpec
from anyattn.errors import ConfigError

__all__ = ["add_arguments", "add_host_arguments", "add_model_arguments", "model_given", "run", "spec_of",
           "workload_of"]  # fmt: skip

_DENSE = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
_SHAPE = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "kv_dtype", "window", "logit_cap", "mla")
_ASKED = ("page_size", "layout", "deterministic", "kind", "scale", "attention")
_PHASES = ("backend", "prefill", "decode", "verify", "draft")
_MLA_SIZES = "512,64,128,128"


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Which machine the answer is for."""
    group = parser.add_argument_group("machine (default: this one)")
    group.add_argument(
        "--assume",
        metavar="HOST",
        help="simulated: cuda:sm90, rocm:gfx942, ascend:910b, cpu:avx2, …; add +library==version or -library",
    )
    group.add_argument("--device", help="torch device of this machine: cuda:1, cpu, npu, …")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What the model and its KV pool look like."""
    model = parser.add_argument_group("model (default: 32 query heads, 8 KV heads of size 128, bfloat16)")
    model.add_argument("--q-heads", type=int, metavar="N", help="query heads of one rank")
    model.add_argument("--kv-heads", type=int, metavar="N", help="KV heads of one rank")
    model.add_argument("--head-dim", type=int, metavar="N", help="size of a query-key head")
    model.add_argument(
        "--v-head-dim", type=int, metavar="N", help="size of a value head (default: --head-dim)"
    )
    model.add_argument("--dtype", help="of the model: bfloat16, float16, float32")
    model.add_argument("--kv-dtype", help="of the KV pool (default: --dtype): float8_e4m3fn, …")
    model.add_argument("--window", type=int, metavar="W", help="sliding window in keys, the own one included")
    model.add_argument("--logit-cap", type=float, metavar="C", help="c * tanh(logits / c)")
    model.add_argument("--scale", type=float, help="softmax scale (default: 1/sqrt(head size))")
    model.add_argument("--sinks", action="store_true", help="one sink logit per query head")
    model.add_argument(
        "--attention",
        choices=("causal", "bidirectional", "encoder_only", "cross"),
        help="which keys a query may see (default: causal)",
    )
    model.add_argument(
        "--mla",
        nargs="?",
        const=_MLA_SIZES,
        metavar="LATENT,ROPE,NOPE,V",
        help=f"multi-head latent attention (sizes default to DeepSeek's {_MLA_SIZES})",
    )
    model.add_argument("--kind", choices=("sparse", "linear"), help="layers that sizes can't tell apart")
    pool = parser.add_argument_group("wishes")
    pool.add_argument("--page-size", type=int, metavar="P", help="tokens in a KV page")
    pool.add_argument("--layout", help="of the KV pool: NHD, HND, …")
    pool.add_argument("--deterministic", metavar="LEVEL", help="run-to-run or batch-invariant")
    pool.add_argument("--feature", nargs="+", action="extend", default=[], metavar="NAME", help=_features())


def _features() -> str:
    return "what calls will ask for: " + ", ".join(sorted(f.value for f in Feature))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `anyattn select`."""
    add_host_arguments(parser)
    add_model_arguments(parser)
    group = parser.add_argument_group("explicit choices (honoured or refused, never replaced)")
    group.add_argument("--backend", metavar="NAME", help="for every phase without one of its own")
    for phase in _PHASES[1:]:
        group.add_argument(f"--{phase}", metavar="NAME", help=f"for {phase}")
    usual = parser.add_argument_group("usual step (which measured times count; default: all alike)")
    usual.add_argument("--requests", type=int, metavar="N", help="requests of a decode step")
    usual.add_argument("--kv-len", type=int, metavar="N", help="KV tokens of a request in a decode step")
    usual.add_argument("--new-tokens", type=int, metavar="N", help="new tokens of a request in prefill")
    usual.add_argument(
        "--route",
        nargs="*",
        metavar="NAME",
        help="choose the backend of each step by its measured shape, among these (default: all)",
    )
    group.add_argument("--draft-tokens", type=int, default=0, metavar="N", help="tokens verified at once")
    parser.add_argument("--json", action="store_true", help="print the whole decision as JSON")


def model_given(args: argparse.Namespace) -> bool:
    """True if any option describes a model or a wish."""
    given = any(getattr(args, name) is not None for name in (*_SHAPE, *_ASKED))
    return given or args.sinks or bool(args.feature)


def _mla(text: str) -> MLASpec:
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError("--mla", asked=text, allowed=f"four sizes, as in {_MLA_SIZES}, or nothing")
    latent, rope, nope, value = map(int, parts)
    return MLASpec(kv_lora_rank=latent, qk_rope_head_dim=rope, qk_nope_head_dim=nope, v_head_dim=value)


def _mla_sizes(args: argparse.Namespace, mla: MLASpec) -> dict[str, float]:
    """Heads of the absorbed form, unless given; scale of the materialised one (nope + rope)."""
    materialised = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    absorbed = mla.kv_lora_rank + mla.qk_rope_head_dim
    allowed = {absorbed: mla.kv_lora_rank, materialised: mla.v_head_dim, mla.qk_nope_head_dim: mla.v_head_dim}
    head_dim = absorbed if args.head_dim is None else args.head_dim
    if head_dim not in allowed:
        hint = "leave --head-dim out, or give the sizes to --mla"
        raise ConfigError("--head-dim of MLA", asked=head_dim, allowed=[*allowed], hint=hint)
    return {"head_dim": head_dim, "v_head_dim": allowed[head_dim], "scale": 1 / math.sqrt(materialised)}


def spec_of(args: argparse.Namespace) -> AttentionSpec:
    """The one layer that the options describe."""
    if args.scale == 0:
        hint = "leave --scale out for 1/sqrt(head size)"
        raise ConfigError("--scale", asked="0", allowed="any other number", hint=hint)
    mla = None if args.mla is None else _mla(args.mla)
    sizes: dict[str, float] = dict(_DENSE)
    if mla is not None:
        sizes |= {"q_heads": 128, "kv_heads": 1, **_mla_sizes(args, mla)}
    for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim", "scale"):
        value = getattr(args, name)
        sizes |= {} if value is None else {name: value}
    return AttentionSpec(
        num_q_heads=int(sizes["q_heads"]),
        num_kv_heads=int(sizes["kv_heads"]),
        head_dim=int(sizes["head_dim"]),
        v_head_dim=int(sizes.get("v_head_dim", 0)),
        scale=sizes.get("scale", 0.0),
        sliding_window=args.window,
        logit_cap=args.logit_cap,
        sinks=args.sinks,
        kind=AttentionKind(args.attention or "causal"),
        mla=mla,
    )


def workload_of(args: argparse.Namespace) -> Workload | None:
    """The usual step, if any option describes it."""
    counts = {name: getattr(args, name) for name in ("requests", "kv_len", "new_tokens")}
    return Workload(**counts) if any(value is not None for value in counts.values()) else None


def run(args: argparse.Namespace) -> int:
    """Print the decision. Errors are raised: the caller shows them."""
    from anyattn.api import select

    tokens = args.draft_tokens
    decision = select(
        spec_of(args),
        dtype=args.dtype or "bfloat16",
        kv_dtype=args.kv_dtype,
        device=args.device,
        limits=Limits(256, 8192, 131072, max_draft_tokens=tokens) if tokens else None,
        page_size=args.page_size,
        layout=args.layout,
        deterministic=args.deterministic,
        features=args.feature,
        kind=None if args.kind is None else ModelKind(args.kind),
        workload=workload_of(args),
        route=False if args.route is None else args.route or True,
        host=args.assume,
        **{name: getattr(args, name) for name in _PHASES},
    )
    print(json.dumps(decision.to_json(), indent=2) if args.json else decision)
    return 0
