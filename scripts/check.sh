#!/usr/bin/env bash
# Formatting, lint and types: what ./run_tests.sh does before the tests.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=$(scripts/setup_env.sh dev)
source scripts/phases.sh
lint_phases
finish
