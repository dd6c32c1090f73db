#!/bin/bash
# One job of a sweep, on the machine that Slurm gave it: task.sh BATCH NODE RETRIES, in the sweep's folder.
#
# It runs the node's kit outside of the image, as a person would who carries it, and leaves in
# nodes/NODE/BATCH-RESTART/ what slurmctld says of the job's GPU (record), what the kit wrote (result) and said
# (out). What it prints itself is the job's log, in which slurmstepd tells beside it why a job was ended.
set -u
batch=$1 node=nodes/$2 retries=$3
restart=${SLURM_RESTART_COUNT:-0}
try=$node/$batch-$restart

say() { printf 'imagefactory: %s\n' "$*"; }

# Exit codes of a kit: 0 and 9 are answers, 2 is a kit that no machine can use; the rest is tried again, 8 is an
# image that cannot be had.
finish() {
    case $1 in
    0 | 2 | 9) ;;
    *)
        if [ "$restart" -lt "$retries" ]; then
            say end "$1" "$(date +%s)" again
            scontrol requeue "$SLURM_JOB_ID" && exit 0
        fi
        ;;
    esac
    say end "$1" "$(date +%s)" done
    exit 0
}

job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
say start "$job" "$restart" "$SLURMD_NODENAME" "$(date +%s)"
mkdir -p "$try" || exit 1
scontrol show job --detail --oneliner "$SLURM_JOB_ID" >"$try/record"
exec 3>&1 4>"$try/out"

python=
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>&4; then
        python=$name
        break
    fi
done
if [ -z "$python" ]; then
    echo "there is no Python 3.9 on this machine" >&4
    finish 6
fi

image=$(cat "$node/image")
case $image in
/*) [ -f "$image" ] || { echo "this machine does not see $image" >&4; finish 8; } ;;
esac
scratch=$(mktemp -d "${TMPDIR:-/tmp}/imagefactory-XXXXXX" 2>&4) || finish 6
child=
trap 'rm -rf "$scratch"' EXIT
trap '[ -z "$child" ] || kill "$child"; wait; exit 143' TERM
cp -R run.py kit suite "$node/kit.json" "$node/expectations.json" "$scratch" 2>&4 || finish 6
"$python" -I -B "$scratch/run.py" --runner apptainer --image "$image" >&4 2>&1 &
child=$!
wait "$child"
code=$?
child=
if [ -d "$scratch/result" ]; then
    # Whole or not at all: run.json tells that a result is there.
    cp -R "$scratch/result" "$try/.result" 2>&4 && mv "$try/.result" "$try/result" 2>&4 || finish 6
fi
finish "$code"
