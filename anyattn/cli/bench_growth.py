"""`anyattn bench --growth`: what preparing a step costs as the batch and the context grow."""

from __future__ import annotations

import argparse
import json

__all__ = ["run_growth"]


def run_growth(args: argparse.Namespace) -> int:
    """Measure, print the slopes, and write JSON where asked."""
    from anyattn.bench.growth import measure_growth, text
    from anyattn.bench.run import to_stderr
    from anyattn.cli.bench import device_of
    from anyattn.cli.bench_checks import check_skipped, check_somebody
    from anyattn.core.plan import TableKind

    device = device_of(args)
    check_skipped(args.skip, {kind.name.lower() for kind in TableKind}, to_stderr)
    rounds = {} if args.rounds is None else {"rounds": args.rounds}
    found = measure_growth(device, only=args.only, skip=args.skip, **rounds)
    check_somebody(args, {"cells": [{"results": found["rows"], "skipped": found["skipped"]}]})
    if args.json == "-":
        print(json.dumps(found, indent=1))
        return 0
    print(text(found))
    if args.json:
        from anyattn.bench.document import save

        save(found, args.json)
    return 0
