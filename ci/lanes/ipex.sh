#!/usr/bin/env bash
# `intel_amx` on IPEX 2.8, for hosts that stay on torch 2.8: an environment of its own and the kit, in worker
# processes, since a wrong call crashes. torch 2.8's default build brings 7 GB of CUDA libraries along.
#
#     ci/lanes/ipex.sh [FOLDER]      FOLDER holds the environment (default: a new one under $TMPDIR)
set -euo pipefail

root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="${1:-$(mktemp -d)/ipex}"
python="$folder/bin/python"

if [ ! -x "$python" ]; then
    python3 -m venv "$folder"
    "$python" -m pip install --quiet "torch==2.8.0" "intel-extension-for-pytorch==2.8.0" \
        numpy packaging psutil pytest
fi

cd "$root"
export PYTHONPATH="$root"
"$python" -m anyattn.cli.main doctor
"$python" -m anyattn.cli.main verify intel_amx --device cpu --quick --workers 2
"$python" -m pytest -q -p no:cacheprovider tests/backends/intel/test_ipex.py
