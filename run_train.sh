#!/usr/bin/env bash
# Train. Sets up the environment when needed, checks the settings, then starts all ranks.
#
#   ./run_train.sh [--flag value ...]      --help lists every flag
#
# Environment:
#   MODULE, CONFIG   recipe (default: llama3, llama3_jargon); --module and --config win over them, and
#                    a module without a config is an error that names its recipes
#   NGPU             ranks on this machine (default: its GPUs, else 2 ranks on the CPU)
#   NNODES           machines (default: 1), each with NGPU ranks; start the same command on all of
#                    them, with a place to meet on one, see docs/many_machines.md:
#                    TORCHRUN_ARGS="--rdzv_endpoint=first-host:29500 --rdzv_id=my-run"
#   LOG_RANK         ranks whose output is shown, comma separated (default: 0)
#   COMM_MODE        fake_backend: one step in one process that plays one of NGPU ranks
#   TORCHRUN_ARGS    further options of torchrun, for example "--max-restarts 3"
#   PYTHON           interpreter to start from (default: the first Python >= 3.11 on PATH)
#   TORCHTITAN_DRY_RUN=1   print the two commands instead of running them
set -euo pipefail
# Ctrl-C or SIGTERM before the ranks start: the exit code of a run that it ended, and no traceback.
checking=""
stop() {
    if [ -n "$checking" ]; then kill "$checking" 2>/dev/null; fi
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

# What the user typed; the last line of a run says how to go on with it.
typed=()
for name in MODULE CONFIG NGPU NNODES LOG_RANK COMM_MODE TORCHRUN_ARGS PYTHON; do
    if [ -n "${!name:-}" ]; then typed+=("$name=${!name}"); fi
done
TORCHTITAN_COMMAND=""
for word in ${typed[@]+"${typed[@]}"} "$0" "$@"; do
    # Quoted as every POSIX shell and Python's shlex read it, unlike the output of printf %q.
    quote="'\\''"
    TORCHTITAN_COMMAND+="'${word//\'/"$quote"}' "
done
export TORCHTITAN_COMMAND="${TORCHTITAN_COMMAND% }"
# Recipes name files relative to the repository, so every path on the command line is relative to
# it as well, wherever this script is called from.
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

python=$(scripts/setup_env.sh runtime)
# This clone, also in an environment that has another one installed.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

recipe_module=(--module "${MODULE:-llama3}")
default_config=llama3_jargon
# Another module may import the default recipe: it must not be trained by mistake.
if [ -n "${MODULE:-}" ]; then default_config=""; fi
wants_help=false
has_config=false
for argument in "$@"; do
    case "$argument" in
        --module | --module=*) recipe_module=() default_config="" ;;
        --config | --config=*) has_config=true ;;
        -h | --help) wants_help=true ;;
    esac
done
recipe_config=()
if ! $has_config && [ -n "${CONFIG:-$default_config}" ]; then
    recipe_config=(--config "${CONFIG:-$default_config}")
fi
# Behind a subcommand such as activation-checkpoint:full only its own flags are understood.
arguments=("$@")
position=0
while [ "$position" -lt $# ] && ! [[ "${arguments[position]}" =~ ^[a-z][a-z_-]*:[A-Za-z_-]+$ ]]; do
    position=$((position + 1))
done
forced=()
if [ -n "${COMM_MODE:-}" ]; then
    # Of a repeated flag the last one counts.
    forced=("--comm.mode=$COMM_MODE" --training.steps 1)
fi
# ${a[@]+...}: an empty array is an unset variable to older bash.
settings=(
    ${recipe_module[@]+"${recipe_module[@]}"} ${recipe_config[@]+"${recipe_config[@]}"}
    "${@:1:position}" ${forced[@]+"${forced[@]}"} "${@:position+1}"
)

count_gpus() {
    # Asking torch takes seconds, so only where some accelerator's device file exists.
    if compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -e /dev/kfd ] || [ -e /dev/dxg ] ||
        compgen -G "/dev/dri/renderD*" >/dev/null; then
        "$python" -c 'import torch; print(torch.accelerator.device_count())'
    else
        echo 0
    fi
}

gpus=$(count_gpus)
if [ "$gpus" -gt 0 ]; then default_ranks=$gpus; else default_ranks=2; fi
export NGPU="${NGPU:-$default_ranks}"
export NNODES="${NNODES:-1}"
export LOG_RANK="${LOG_RANK:-0}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# With the store shared between torchrun and the ranks, a restart after a killed rank can hang.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
if [ "$gpus" -eq 0 ]; then
    # Several ranks with several threads each on few cores slow every step down many times.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi

if [ -n "${COMM_MODE:-}" ]; then
    export LOCAL_RANK=0
    run=("$python" -m torchtitan.train "${settings[@]}")
else
    read -r -a torchrun_extra <<<"${TORCHRUN_ARGS:-}"
    # While the ranks close, a save may be in flight; torchrun's own limit is 30 s.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
    run=("$python" -m torchtitan.launch "--nnodes=$NNODES" "--nproc_per_node=$NGPU" --rdzv_backend c10d
        --rdzv_endpoint=localhost:0 --local-ranks-filter "$LOG_RANK" --role rank --tee 3
        ${torchrun_extra[@]+"${torchrun_extra[@]}"} -m torchtitan.train "${settings[@]}")
fi
# What a scheduler or another launcher set counts ranks of theirs; torchrun sets it anew.
preflight=(env -u WORLD_SIZE "$python" -m torchtitan.preflight "${settings[@]}")

if [ -n "${TORCHTITAN_DRY_RUN:-}" ]; then
    printf '%q ' "${preflight[@]}" && echo
    printf '%q ' "${run[@]}" && echo
    exit 0
fi

# One process finds settings that cannot be used, before the ranks start and each says the same.
if "$wants_help"; then exec "${preflight[@]}"; fi
# In the background, where Python sees no Ctrl-C and the traps above act at once.
"${preflight[@]}" &
checking=$!
wait "$checking"
# exec: Ctrl-C reaches the launcher itself, and the exit code of the run is the exit code of this script.
exec "${run[@]}"
