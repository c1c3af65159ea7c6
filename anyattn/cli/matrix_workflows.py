"""Pipelines for three forges from the lanes. YAML by hand: strings are JSON, which YAML contains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from anyattn.cli.matrix_lanes import Lane

__all__ = ["FORMATS", "buildkite", "github", "gitlab"]

_HEAD = (
    "# Written by `anyattn matrix update` from ci/lanes.toml (`anyattn matrix --format {name}` prints it).",
    "# Lanes on machines of one's own run where the variable ANYATTN_LANES, a JSON list, names them.",
)


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _block(lines: Sequence[str], indent: int) -> list[str]:
    return [f"{' ' * indent}{line}" for line in lines]


def github(lanes: Sequence[Lane]) -> str:
    """A workflow for GitHub Actions, one job a lane."""
    lines = [*(line.format(name="github") for line in _HEAD), "name: lanes", "on:", "  push:"]
    lines += ["    branches: [main]", "  pull_request:", "  workflow_dispatch:"]
    lines += ["permissions:", "  contents: read", "jobs:"]
    for lane in lanes:
        lines += [f"  {lane.name}:", f"    name: {_quoted(lane.title)}"]
        if not lane.hosted:
            wanted = f"contains(fromJSON(vars.ANYATTN_LANES || '[]'), '{lane.name}')"
            lines.append(f"    if: ${{{{ {wanted} }}}}")
        lines += [f"    runs-on: {_quoted(list(lane.runner))}", "    timeout-minutes: 90"]
        lines += [f"    container: {_quoted(lane.image)}"] if lane.image else []
        lines += ["    steps:", "      - uses: actions/checkout@v4"]
        if not lane.image:
            lines += [
                "      - uses: actions/setup-python@v5",
                "        with:",
                '          python-version: "3.11"',
            ]
        for name, script in (("install", lane.install), ("run", lane.script())):
            if script:
                lines += [
                    f"      - name: {name}",
                    "        shell: bash",
                    "        run: |",
                    *_block(script, 10),
                ]
        if lane.records:
            lines += ["      - uses: actions/upload-artifact@v4", "        if: always()", "        with:"]
            lines += [f"          name: {lane.name}", "          path: |"]
            lines += _block(("results/*.json", "ci/results/*.json"), 12)
    return "\n".join([*lines, ""])


def gitlab(lanes: Sequence[Lane]) -> str:
    """A pipeline for GitLab CI; runner labels become tags."""
    lines = [*(line.format(name="gitlab") for line in _HEAD), "stages: [lanes]"]
    for lane in lanes:
        lines += ["", f"{lane.name}:", "  stage: lanes", f"  tags: {_quoted(list(lane.runner))}"]
        lines += [f"  image: {_quoted(lane.image or 'python:3.11')}", "  timeout: 90 minutes"]
        if not lane.hosted:
            named = f'$ANYATTN_LANES =~ /"{lane.name}"/'
            lines += ["  rules:", f"    - if: {_quoted(named)}"]
        lines += ["  script:", "    - |", *_block(("set -e", *lane.install, *lane.script()), 6)]
        if lane.records:
            lines += ["  artifacts:", "    when: always", "    paths: [results/, ci/results/]"]
    return "\n".join([*lines, ""])


def buildkite(lanes: Sequence[Lane]) -> str:
    """A pipeline for Buildkite; the last label names the queue. `$` is doubled: the agent fills in others."""
    lines = [*(line.format(name="buildkite") for line in _HEAD), "steps:"]
    for lane in lanes:
        script = [line.replace("$", "$$") for line in (*lane.install, *lane.script())]
        lines += [f"  - label: {_quoted(lane.title)}", f"    key: {_quoted(lane.name)}"]
        lines += ["    agents:", f"      queue: {_quoted(lane.runner[-1])}", "    timeout_in_minutes: 90"]
        if not lane.hosted:
            named = f'build.env("ANYATTN_LANES") =~ /"{lane.name}"/'
            lines.append(f"    if: {_quoted(named)}")
        if lane.image:
            lines += ["    plugins:", "      - docker#v5.13.0:", f"          image: {_quoted(lane.image)}"]
        lines += ["    command: |", *_block(script, 6)]
        if lane.records:
            lines.append('    artifact_paths: ["results/*.json", "ci/results/*.json"]')
    return "\n".join([*lines, ""])


FORMATS: Mapping[str, Callable[[Sequence[Lane]], str]] = {
    "github": github,
    "gitlab": gitlab,
    "buildkite": buildkite,
}
"""Forge -> writer."""
