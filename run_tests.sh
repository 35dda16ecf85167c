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
# A change that took hours is not refused for one race between processes on a loaded machine: there a
# test that failed gets one more try. It is listed as RERUN with its failure, which is a bug to be looked for.
retry=()
if [ "${CI:-}" = true ]; then retry=(--reruns 1 -rR); fi
lint_phases
phase tests "$python" -m pytest ${retry[@]+"${retry[@]}"} "$@"
finish
