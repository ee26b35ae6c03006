#!/usr/bin/env bash
# Build for this machine's GPU, test and measure everything that needs one; ends with a table. See bench/gpu_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" bench/gpu_check.py "$@"
