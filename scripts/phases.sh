# Sourced by run_tests.sh and scripts/check.sh: run commands as named phases, all of them even when
# one fails, one line per phase, and keep whether any failed. Needs $python; sets $failed_phases.

failed_phases=""

phase() {
    local name=$1 started=$SECONDS outcome=passed
    shift
    "$@" || outcome="FAILED (exit code $?)"
    if [ "$outcome" != passed ]; then failed_phases="$failed_phases $name"; fi
    echo "== $name: $outcome in $((SECONDS - started)) s"
}

lint_phases() {
    phase format "$python" -m ufmt check torchtitan tests scripts benchmarks
    phase lint "$python" -m flake8 torchtitan tests scripts benchmarks
    # Types of the packages come from the interpreter that has them.
    phase types "$python" -m pyrefly check --python-interpreter-path "$python"
}

finish() {
    if [ -n "$failed_phases" ]; then
        echo "== failed:$failed_phases"
        exit 1
    fi
    echo "== all phases passed"
}
