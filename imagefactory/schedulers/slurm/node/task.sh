#!/bin/bash
# One job of a sweep, on the machine that Slurm gave it: task.sh BATCH NODE RETRIES MACHINES EXCLUDED,
# in the sweep's folder. MACHINES are those with a GPU that fits, EXCLUDED those that the job excludes, with blanks
# between.
#
# It runs the node's kit outside of the image, as a person would who carries it, and leaves in
# nodes/NODE/BATCH-RESTART/ what slurmctld says of the job's GPU (record), what the kit wrote (result) and said
# (out). What it prints itself is the job's log, in which slurmstepd tells beside it why a job was ended.
#
# A fault of the machine is a line in `faults`: the job is queued again without the machines that failed it. One
# on which two nodes failed runs no more of them, while another one of MACHINES is left.
#
# In a job on several nodes, srun starts this script once more on each, with STEP_OF=TRY. Each runs the kit, and the
# first fault of one ends the others. Such a job is never queued again by this script.
set -u
batch=$1 node=nodes/$2 retries=$3 machines=${4:-} excluded=${5:-}
restart=${SLURM_RESTART_COUNT:-0}
try=$node/$batch-$restart
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
several=${SLURM_JOB_NUM_NODES:-1} rank='' result=result
[ "$several" -gt 1 ] || several=
if [ -n "${STEP_OF:-}" ]; then
    try=$STEP_OF rank=$SLURM_NODEID
    [ "$rank" = 0 ] || result=result-$rank
fi

say() { printf 'imagefactory: %s\n' "$*"; }

# Machines on which two nodes failed, or with `$1` those on which that node did.
failed_on() {
    [ -f faults ] || return 0
    awk -F '\t' -v node="${1:-}" 'NF > 4 && (node == "" || $2 == node) && !seen[$1 FS $2]++ { count[$1]++ }
        END { for (name in count) if (node != "" || count[name] > 1) print name }' faults
}

# Those of MACHINES that are not among the words of `$1`.
others() {
    local name
    for name in $machines; do
        case " $1 " in *" $name "*) ;; *) printf '%s ' "$name" ;; esac
    done
}

# Into the queue again, without the machines of `$1` and EXCLUDED, which scontrol would forget. Slurm ends this
# script when it has the job back, and starts it nowhere before that, so there is time to say where not.
# SLURM_JOB_ID will not do: that of an array's last task is the array's own, and would queue all of its tasks again.
requeue() {
    trap '' TERM
    scontrol requeue "$job" || return 1
    [ -z "$1" ] || scontrol update "JobId=$job" "ExcNodeList=$(printf '%s' "$excluded $1" | xargs | tr -s ' ' ',')"
    exit 0
}

# Exit codes of a kit: 0 and 9 are answers, 2 is a kit that no machine can use; the rest is tried again, 8 is an
# image that cannot be had. A GPU that is not there is one of the machine, and an answer where all others failed.
finish() {
    local why='' avoid left tries
    if [ -n "$rank" ]; then
        case $1 in 0 | 9) ! grep -qs '"outcome": ""' "$try/$result/run.json" || exit 0 ;; esac
        echo "$1" >"$try/fault-$rank"
        exit "$1"
    fi
    if [ -n "$several" ]; then
        say end "$1" "$(date +%s)" done
        : >"$node/$batch-done"
        exit 0
    fi
    case $1 in
    0 | 9)
        grep -qs '"outcome": "\(no-gpu\|wrong-gpu\)"' "$try/result/run.json" "$try/result/report.json" &&
            why='no usable GPU'
        ;;
    2 | 8) ;;
    *) why="the suite was not started: exit code $1" ;;
    esac
    [ -z "$why" ] || printf '%s\t%s\t%s\t%s\t%s\n' "$SLURMD_NODENAME" "${node#nodes/}" "$job-$restart" \
        "$(date +%s)" "$why: $(grep -v '^bring \|: not-run - ' "$try/out" 2>/dev/null | tail -n 1 | tr -d '\t')" >>faults
    avoid=$(printf '%s\n' "$SLURMD_NODENAME" "$(failed_on "${node#nodes/}")" "$(failed_on)" | sort -u | xargs)
    left=$(others "$avoid")
    [ -n "$left" ] || avoid=
    tries=$(find "$node" -maxdepth 1 -type d -name "$batch-*" | wc -l)
    case $1 in
    0 | 9) [ -n "$why" ] && [ -n "$left" ] || tries=$((retries + 1)) ;;
    2) tries=$((retries + 1)) ;;
    esac
    if [ "$tries" -le "$retries" ]; then
        say end "$1" "$(date +%s)" again
        requeue "$avoid"
    fi
    say end "$1" "$(date +%s)" done
    : >"$node/$batch-done"
    exit 0
}

# The kit on each node, which find each other by the first one's address and a port below those that Linux takes.
on_nodes() {
    local names first address code fault
    names=$(scontrol show hostnames "$SLURM_JOB_NODELIST") first=$(printf '%s\n' "$names" | head -n 1)
    address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
    IMAGEFACTORY_NODES=$(printf '%s\n' "$names" | sed 's/.*/"&"/' | paste -sd ,)
    IMAGEFACTORY_ADDRESS="\"address\": \"$address\", \"port\": $((10000 + SLURM_JOB_ID % 20000))"
    export IMAGEFACTORY_NODES IMAGEFACTORY_ADDRESS STEP_OF=$try
    srun --nodes="$several" --ntasks="$several" --ntasks-per-node=1 --kill-on-bad-exit=1 \
        bash task.sh "$batch" "${node#nodes/}" 0 >&4 2>&1
    code=$?
    # srun tells the highest code, and those that a fault has ended have one too.
    for fault in "$try"/fault-*; do
        [ ! -f "$fault" ] || code=$(cat "$fault")
    done
    finish "$code"
}

# Queued again after its end, by a person or for a node that went away meanwhile: it has its answer.
[ ! -e "$node/$batch-done" ] || exit 0
bad=$(failed_on | xargs)
if [ -n "$rank" ]; then
    echo "$SLURMD_NODENAME" >"$try/machine-$rank"
    exec 3>&1 4>&1
else
    case " $bad " in
    *" $SLURMD_NODENAME "*) [ -n "$several" ] || [ -z "$(others "$bad")" ] || requeue "$bad" ;;
    esac
    say start "$job" "$restart" "$SLURMD_NODENAME" "$(date +%s)"
    mkdir -p "$try" || exit 1
    scontrol show job --detail --oneliner "$SLURM_JOB_ID" >"$try/record"
    exec 3>&1 4>"$try/out"
    [ -z "$several" ] || on_nodes
fi

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
[ -z "$rank" ] || export IMAGEFACTORY_MEETING="{\"rank\": $rank, \"nodes\": [$IMAGEFACTORY_NODES], $IMAGEFACTORY_ADDRESS}"
cp -R run.py kit suite "$node/kit.json" "$node/expectations.json" "$scratch" 2>&4 || finish 6
"$python" -I -B "$scratch/run.py" --runner "$(cat runner)" --image "$image" >&4 2>&1 &
child=$!
wait "$child"
code=$?
child=
if [ -d "$scratch/result" ]; then
    # Whole or not at all: run.json tells that a result is there.
    cp -R "$scratch/result" "$try/.$result" 2>&4 && mv "$try/.$result" "$try/$result" 2>&4 || finish 6
fi
finish "$code"
