#!/usr/bin/env bash
# Check everything: formatting, lint, types, all tests. Sets up the environment when needed.
#
#   ./run_tests.sh [pytest arguments]      for example tests/unit_tests/config -x
#
# scripts/check.sh runs all but the tests.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
python=$(scripts/setup_env.sh dev)
# This clone, also in an environment that has another one installed; tests start processes elsewhere.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Tests start several ranks on few cores; more threads than cores slow all of them down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
source scripts/phases.sh
lint_phases
phase tests "$python" -m pytest "$@"
finish
