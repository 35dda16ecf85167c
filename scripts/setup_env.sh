#!/usr/bin/env bash
# Find a Python and let setup_env.py choose or make the environment.
#
#   scripts/setup_env.sh [runtime|dev]    prints the interpreter to use; progress goes to stderr
#
# PYTHON=/path/to/python names the interpreter instead of the search below.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
# By running it: a shim on PATH may exist without the version behind it.
suits() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
else
    candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
fi

seen=""
for candidate in "${candidates[@]}"; do
    if suits "$candidate"; then
        # -P: nothing in scripts/ may shadow the standard library.
        exec "$candidate" -P "$here/setup_env.py" "$@"
    fi
    if version=$(version_of "$candidate"); then seen="$seen $candidate=$version"; fi
done
echo "[set-up] Python 3.11 or newer is needed; looked for: ${candidates[*]}; found:${seen:- none}." \
    "Install it, or name one with PYTHON=/path/to/python." >&2
exit 2
