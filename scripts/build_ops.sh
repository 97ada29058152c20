#!/usr/bin/env bash
# Builds the native copies into the package: scripts/build_ops.sh [cpu] [paddle] [ptx] (default: what this machine can)
# PYTHON names the interpreter, whose Paddle the Paddle operators are for; CC, CXX and NVCC name the compilers.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
[ -n "${PYTHON:-}" ] || [ ! -x "${FASTDEPLOY_KVCACHE_VENV:-$root/.venv}/bin/python" ] ||
    python="${FASTDEPLOY_KVCACHE_VENV:-$root/.venv}/bin/python"
exec "$python" "$root/custom_ops/build.py" "$@"
