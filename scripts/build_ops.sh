#!/usr/bin/env bash
# Builds the native copy operators into the package: scripts/build_ops.sh [ARCHITECTURES] [core] [cuda] [paddle]
#   scripts/build_ops.sh                 what this machine can, CUDA for 80,90,100
#   scripts/build_ops.sh 80,90           other CUDA architectures
#   scripts/build_ops.sh 90 core cuda    and only these parts
# PYTHON names the interpreter, whose Paddle the Paddle operators are for; CXX and NVCC name the compilers.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
[ -n "${PYTHON:-}" ] || [ ! -x "${FASTDEPLOY_KVCACHE_VENV:-$root/.venv}/bin/python" ] ||
    python="${FASTDEPLOY_KVCACHE_VENV:-$root/.venv}/bin/python"
if [[ "${1:-}" =~ ^[0-9] ]]; then
    export FASTDEPLOY_KVCACHE_CUDA_ARCHS="$1"
    shift
fi
exec "$python" "$root/custom_ops/build.py" "$@"
