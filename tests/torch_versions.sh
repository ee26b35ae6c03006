#!/usr/bin/env bash
# Tests the supported range of torch: tests/torch_versions.sh [VERSION ...], default 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0.
# Each has an environment of its own with the CPU wheels, kept below $TORCH_VERSIONS_DIR (default build-torch): about
# 1 GB and a few minutes each. TORCH_VERSIONS_INDEX names another package index than torch's own (one without CPU wheels
# brings several GB of CUDA libraries). Ends with 0 if all passed.
set -euo pipefail

root=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
cd "$root"
folder=${TORCH_VERSIONS_DIR:-$root/build-torch}
index=${TORCH_VERSIONS_INDEX:-https://download.pytorch.org/whl/cpu}
smoke=(
  tests/zcomm/test_collectives.py tests/zcomm/test_kernels.py tests/zcomm/test_residual.py tests/zcomm/test_functional.py
  tests/zcomm/test_install_fsdp2.py tests/zcomm/test_install_ddp.py tests/zero/test_exactness.py tests/zero/test_layout.py
  tests/zero/test_checkpoint_failures.py tests/zero/test_golden_checkpoints.py tests/zero/test_initialize.py
)
[ $# -gt 0 ] || set -- 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0

failed=()
for version in "$@"; do
  printf '\n== torch %s\n' "$version"
  venv=$folder/$version
  if [ ! -e "$venv/ready" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet "torch==$version" --index-url "$index"
    "$venv/bin/pip" install --quiet numpy "pytest>=8" pytest-timeout hypothesis scikit-build-core nanobind cmake
    touch "$venv/ready"
  fi
  ZCOMM_CUDA=OFF "$venv/bin/pip" install --quiet --no-build-isolation --no-deps .
  # the installed package, not the one of the checkout: the tests alone are taken from there
  tests=$(mktemp -d)
  ln -s "$root/tests" "$tests/tests"
  cp pyproject.toml "$tests"
  (cd "$tests" && "$venv/bin/python" -m pytest -q -p no:cacheprovider "${smoke[@]}") || failed+=("$version")
  rm -rf "$tests"
done
printf '\n%s\n' "${failed[*]:+failed: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]
