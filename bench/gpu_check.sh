#!/usr/bin/env bash
# Build for this machine's GPU, then test and measure everything that needs one. See bench/gpu_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" bench/gpu_check.py "$@"
