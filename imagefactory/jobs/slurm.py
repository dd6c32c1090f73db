"""Write the batch script of a job for Slurm. Pure functions.

Slurm can select a type of GPU, features of nodes, and exclude nodes. It cannot select GPUs by capability. So
the script requests what the nodes of this cluster allow, and checks its GPU before the program starts. No
files are transferred, because the nodes share the directory of the script. Source: Slurm manual, sbatch(1)
and "Generic Resource (GRES) Scheduling".
"""

from __future__ import annotations

import shlex
from datetime import timedelta

from imagefactory.build.definition import PREFIX
from imagefactory.errors import CheckFailedError, UnknownAnswerError, UsageError
from imagefactory.jobs.offer import ResourceRequest, fits
from imagefactory.jobs.spec import (
    CHECKPOINTED,
    JobSpec,
    format_run_argument,
    gather_job,
    header,
    value_arrays,
)
from imagefactory.runtime.hardware import MAKE_CDI
from imagefactory.schedulers.pool import PoolGpu
from imagefactory.schedulers.sizes import MB
from imagefactory.schedulers.slurm.batch import request_gpu_count
from imagefactory.settings.choices import EDF, PODMAN, PYXIS
from imagefactory.settings.own_commands import TIME

SUFFIX, EDF_SUFFIX = ".sbatch", ".toml"
INDEX = "SLURM_ARRAY_TASK_ID"
NOTICE = 120
"""Seconds before the time limit of a job at which its program may save its state."""
GPU_CHECK = """\
# Slurm knows only the names of GPUs, so this checks that the image is verified on the GPUs of the job.
# They are the entries of CUDA_VISIBLE_DEVICES up to an invalid one: indices, prefixes of UUIDs or MIG slices.
gpus=$({ nvidia-smi -L; nvidia-smi --query-gpu=uuid,compute_cap --format=csv,noheader; } |
    awk -v visible="${CUDA_VISIBLE_DEVICES-}" '
    /UUID: / {
        uuid = $0
        sub(/.*UUID: /, "", uuid)
        sub(/[)].*/, "", uuid)
        if ($1 == "GPU") { whole = uuid; at[$2 + 0] = uuid }
        of[uuid] = whole
        next
    }
    split($0, pair, ", ") == 2 { gsub(/ /, "-", pair[2]); can[pair[1]] = pair[2] }
    END {
        count = split(visible, entry, ",")
        for (place = 1; place <= count; place++) {
            one = entry[place]
            device = uuid = ""
            fitting = 0
            if (one ~ /^ *[0-9]/) device = uuid = at[one + 0]
            else if (one ~ /^MIG-GPU-/) {
                device = one
                sub(/^MIG-/, "", one)
                sub(/[/].*/, "", one)
                uuid = of[one]
            } else if (one ~ /^(GPU|MIG)-/)
                for (name in of) if (index(name, one) == 1) { device = name; uuid = of[name]; fitting++ }
            if (fitting > 1 || entry[place] in had) { found = ""; break }
            if (uuid == "") break
            had[entry[place]]
            found = found device "=" ((uuid in can) ? can[uuid] : "unknown") " "
        }
        printf "%%s", found
    }')
if [ -z "$gpus" ]; then
    echo "$(hostname): Slurm assigned no GPU: CUDA_VISIBLE_DEVICES is '${CUDA_VISIBLE_DEVICES-}'" >&2
    exit 9
fi
takes=$(nvidia-smi | sed -n 's/.*CUDA Version: *\\([0-9.]*\\).*/\\1/p')
for gpu in $gpus; do
    case ${gpu#*=} in
%s
    *)
        echo "$(hostname): this GPU has compute capability ${gpu#*=}, but the image is verified on %s" >&2
        exit 9
        ;;
    esac
    if [ "$(printf '%%s\\n' "$needs" "${takes:-0}" | sort -V | head -n 1)" != "$needs" ]; then
        echo "$(hostname): this driver supports CUDA ${takes:-(unknown)}, but the image requires $needs" >&2
        exit 9
    fi
done"""

ENROOT_CHECK = """\
sha256=  # of the image, if it is a file that you exported
case $image in
*@sha256:*)
    # An enroot older than 4.0 gets images only by tag, which may name another image tomorrow.
    if enroot=$(enroot version 2>/dev/null) &&
        [ "$(printf '%s\\n' 4.0 "$enroot" | sort -V | head -n 1)" != 4.0 ]; then
        echo "$(hostname): enroot $enroot gets no image by digest, which takes enroot 4.0 or newer." >&2
        echo "Export the image (imagefactory image export --format sqsh) and name that file instead." >&2
        exit 9
    fi
    ;;
*)
    if [ "$(sha256sum <"$image")" != "$sha256  -" ]; then
        echo "$(hostname): the sha256 of $image is not '$sha256', as this script says" >&2
        exit 9
    fi
    ;;
esac"""
PODMAN_GPUS = f"""\
# podman passes GPUs by CDI: a specification of the node names them by UUID, or by their order on the PCI bus.
if ! grep -qs nvidia.com/gpu /etc/cdi/* /var/run/cdi/*; then
    echo "$(hostname): no CDI specification describes the GPUs to podman:" \\
        "{MAKE_CDI}" >&2
    exit 9
fi
devices=()
visible=
for gpu in $gpus; do
    name=${{gpu%%=*}}
    visible=${{visible:+$visible,}}$name
    grep -qsF "$name" /etc/cdi/* /var/run/cdi/* || name=$(cat /proc/driver/nvidia/gpus/*/information |
        awk -v uuid="$name" '/^GPU UUID:/ {{ if ($3 == uuid) print place + 0; place++ }}')
    if [ -z "$name" ]; then
        echo "$(hostname): the CDI specification does not name ${{gpu%%=*}}:" \\
            "{MAKE_CDI} --device-name-strategy=uuid" >&2
        exit 9
    fi
    devices+=(--device "nvidia.com/gpu=$name")
done"""
PODMAN_USER = """\
# The login's directory is often missing on a node. Without it, podman uses /tmp.
[ -w "${XDG_RUNTIME_DIR:-/nowhere}" ] || unset XDG_RUNTIME_DIR
# The program has your user and group. podman of root has them anyway.
options=(--user "$(id -u):$(id -g)")
[ "$(id -u)" = 0 ] || options+=(--userns=keep-id)
# crun can leave the program in the job's cgroup, where Slurm's limits apply, and in all your groups.
if [ "$(podman info --format '{{.Host.OCIRuntime.Name}}')" = crun ]; then
    options+=(--cgroups=disabled)
    [ "$(id -u)" = 0 ] || options+=(--group-add=keep-groups)
fi"""
IMAGE_PATH = f"""sh -c 'export PATH="{PREFIX}/bin:$PATH"; exec "$@"' sh"""
"""Starts a program after enroot's login shell, in which Debian's /etc/profile resets the image's PATH."""

RESUMED = f"""\
# Before its time limit, or when Slurm preempts the job, the program gets a signal to save its state.
trap 'kill -TERM "${{!:-}}" 2>/dev/null || :' TERM
%s &
program=$!
while kill -0 "$program" 2>/dev/null; do sleep 1 || :; done  # bash may miss a signal as it begins to wait
code=0
wait "$program" || code=$?
# With this exit code, the program has saved its state and must be started again.
[ "$code" != {CHECKPOINTED} ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code\""""


def request_gpus(spec: JobSpec) -> tuple[tuple[str, ...], tuple[PoolGpu, ...]]:
    """Return the #SBATCH options that request only GPUs of the job's classes, and the GPUs that they can get.

    Without an inventory, the options request any GPU. Raises CheckFailedError if the cluster has no such GPU,
    UnknownAnswerError if some of its GPUs are not known, UsageError if Slurm cannot select it.
    """
    inventory = spec.inventory
    if inventory is None or not spec.gpus:
        return ((f"--gres=gpu:{spec.gpus}",) if spec.gpus else ()), ()
    names = {str(gpu_class.capability) for gpu_class in spec.classes}
    resources = ResourceRequest(platform=spec.platform, mig=spec.mig)

    def matches(gpu: PoolGpu) -> bool:
        return gpu.capability in names and fits(gpu, resources)

    request = request_gpu_count(inventory, matches, spec.gpus)
    if request is None:
        types = sorted({f"{gpu.name or 'of no type'} ({gpu.capability or '?'})" for gpu in inventory.gpus})
        message = (
            f"the image is verified on {', '.join(sorted(names))}, but this cluster has {', '.join(types)}"
        )
        if (
            request_gpu_count(inventory, lambda gpu: not gpu.capability or matches(gpu), spec.gpus)
            is not None
        ):
            hint = "find out what the types with (?) are: imagefactory gpus --probe 5m"
            raise UnknownAnswerError("gpu-match-unknown", message, hint=hint)
        raise CheckFailedError("no-matching-gpu", message, hint="choose another image: imagefactory search")
    if not request[0]:
        types = sorted({gpu.name for gpu in inventory.gpus if matches(gpu)})
        raise UsageError(
            "gpu-type-ambiguous",
            f"every node with {' or '.join(types)} also has other GPUs, and Slurm may assign any of them",
            hint=f"write the type into the script yourself: --gres=gpu:{types[0]}:{spec.gpus}",
        )
    return request


def format_reach(spec: JobSpec) -> str:
    """Return `GPUs that match: 12 of 40, 3 free now`, empty without an inventory."""
    if spec.inventory is None or not spec.gpus:
        return ""
    _, gpus = request_gpus(spec)
    free, total = sum(gpu.free for gpu in gpus), len(spec.inventory.gpus)
    return f"GPUs that match: {len(gpus)} of {total}, {free} free now; Slurm does not report their drivers"


def write_slurm(spec: JobSpec) -> dict[str, str]:
    """Return the texts by file name: the script, the finalizing script of a sweep, and their EDF.

    Raises like `request_gpus`.
    """
    jobs = [spec, gather_job(spec)] if spec.gather else [spec]
    files = {f"{job.name}{SUFFIX}": _format_script(job, spec.name) for job in jobs}
    return files | ({f"{spec.name}{EDF_SUFFIX}": _format_edf(spec)} if spec.site.container == EDF else {})


def _format_script(spec: JobSpec, edf: str) -> str:
    resumes = ["--requeue", "--open-mode=append", f"--signal=B:TERM@{NOTICE}"] if spec.checkpoint else []
    options = [
        f"--job-name={spec.name}",
        f"--output=%x_{'%A_%a' if spec.columns else '%j'}.out",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={spec.cpus}",
        f"--mem={-(-spec.requested_memory // MB)}M",
        *([f"--time={_format_time(spec.time)}"] if spec.time else []),
        *request_gpus(spec)[0],
        *([f"--array=1-{len(spec.rows)}"] if spec.columns else []),
        *resumes,
        *(option for option in spec.site.own if not (spec.time and option.startswith(f"{TIME}="))),
    ]
    advice = []
    if spec.gpus and spec.inventory is None:
        advice.append(
            "# No cluster was available: add the type of GPU, --gres=gpu:TYPE:1, or the job may stop."
        )
    if not spec.site.own:
        time = "" if spec.time else " --time=12:00:00"
        advice.append(f"# What else the site wants: sbatch --account=NAME --partition=NAME{time} FILE")
    cases = "\n".join(f"    {row.capability}) needs={row.cuda or 0} ;;" for row in spec.classes)
    names = ", ".join(str(row.capability) for row in spec.classes)
    groups = [
        ["#!/bin/bash", *header(spec)],
        [*(f"#SBATCH {option}" for option in options), *advice],
        ["set -eu"],
        [GPU_CHECK % (cases, names)] if spec.gpus else [],
        list(value_arrays(spec)),
        _program(spec, edf),
    ]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _program(spec: JobSpec, edf: str) -> list[str]:
    """Return the lines that start the program. `edf` is the name of the EDF, without its suffix."""
    parent = "../" if spec.columns else ""
    program = spec.executable
    if not spec.in_image and not program.startswith("/"):
        program = f"{parent or './'}{program.removeprefix('./')}"
    words = [shlex.quote(program), *(format_run_argument(word, spec, INDEX) for word in spec.arguments)]
    if spec.site.container == PODMAN:
        before, start = [*([PODMAN_GPUS] if spec.gpus else []), PODMAN_USER], _podman_options(spec)
        words = [
            f"--entrypoint {words[0]}",
            shlex.quote(spec.image.address.removeprefix("docker://")),
            *words[1:],
        ]
    elif spec.site.container == PYXIS:
        image = f"image={shlex.quote(f'docker://{_enroot_image(spec)}')}"
        before, start = [image, ENROOT_CHECK, "export PYTHONNOUSERSITE=1"], _pyxis_options(spec)
    elif spec.site.container == EDF:
        image = f"""image=$(sed -n 's/^image = "\\(.*\\)"$/\\1/p' {_edf_path(spec, edf)})"""
        before, start = [image, ENROOT_CHECK, "export PWD  # the EDF names it"], _edf_options(spec, edf)
    else:
        before, start = ["# where apptainer is a module: module load apptainer"], _apptainer_options(spec)
    command = " \\\n    ".join([*start, " ".join(words)])
    return [
        *([f'mkdir -p "run-${INDEX}"', f'cd "run-${INDEX}"'] if spec.columns else []),
        *before,
        RESUMED % command if spec.checkpoint else f"exec {command}",
    ]


def _apptainer_options(spec: JobSpec) -> list[str]:
    image = spec.image.address
    if spec.columns and "://" not in image and not image.startswith("/"):
        image = f"../{image}"
    return [
        f"apptainer exec{' --nv' if spec.gpus else ''} --env PYTHONNOUSERSITE=1 "
        '--bind "$SLURM_SUBMIT_DIR" --pwd "$PWD"',
        *(f"--bind {mount}:ro" for mount in spec.site.mounts),
        shlex.quote(image),
    ]


def _podman_options(spec: JobSpec) -> list[str]:
    """Return the words before the program's for podman 4.1 or newer: podman-run(1).

    CUDA gets the GPUs by UUID, since their numbers change in the container. A wrong device has another one,
    and is not used. The container has the network and shared memory of the node, as with Apptainer.
    """
    gpus = ['"${devices[@]}" --env CUDA_VISIBLE_DEVICES="$visible"'] if spec.gpus else []
    return [
        'podman run --rm --init "${options[@]}"',
        *gpus,
        "--network=host --ipc=host --security-opt=label=disable",
        "--env 'SLURM_*' --env PYTHONNOUSERSITE=1 --env HOME=/tmp",
        '--volume "$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR" --workdir "$PWD"',
        *(f"--volume {mount}:ro" for mount in spec.site.mounts),
    ]


def _enroot_image(spec: JobSpec) -> str:
    """Return `HOST#PATH@DIGEST`, as enroot writes an image of a registry."""
    host, _, path = spec.image.address.removeprefix("docker://").partition("/")
    return f"{host}#{path}"


def _step(spec: JobSpec) -> str:
    """Return the start of a step, which gets the cores of its job only if it requests them (srun(1))."""
    return f"srun --ntasks=1 --cpus-per-task={spec.cpus}"


def _pyxis_options(spec: JobSpec) -> list[str]:
    """Return the words before the program for NVIDIA's pyxis, as the README of release 0.24 documents them.

    pyxis adds the GPUs of the step.
    """
    folder = "$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"
    mounts = ",".join([folder, *(f"{mount}:ro" for mount in spec.site.mounts)])
    return [
        _step(spec),
        '--container-image="$image"',
        f'--container-mounts="{mounts}" --container-workdir="$PWD"',
        "--no-container-mount-home --no-container-entrypoint",
        IMAGE_PATH,
    ]


def _edf_path(spec: JobSpec, edf: str) -> str:
    """Return the path of an EDF as a word of the script. A relative one would be relative to $PWD."""
    path = shlex.quote(f"{spec.directory}/{edf}{EDF_SUFFIX}" if spec.directory else f"{edf}{EDF_SUFFIX}")
    return path if spec.directory.startswith("/") else f'"$SLURM_SUBMIT_DIR"/{path}'


def _edf_options(spec: JobSpec, edf: str) -> list[str]:
    """Return the words before the program for the Container Engine of CSCS, which reads an EDF.

    Its documentation advises against `#SBATCH --environment`.
    """
    return [f"{_step(spec)} --environment={_edf_path(spec, edf)}", IMAGE_PATH]


def _format_edf(spec: JobSpec) -> str:
    """Return the EDF (TOML) of a job. Its variables are those of the script.

    Source: "EDF reference" of docs.cscs.ch (2026-08), and the schema of sarus-suite/raster, where the image's
    entrypoint is on by default.
    """
    folder = "${SLURM_SUBMIT_DIR}:${SLURM_SUBMIT_DIR}"
    mounts = ", ".join(f'"{mount}"' for mount in (folder, *(f"{mount}:ro" for mount in spec.site.mounts)))
    return "\n".join(
        [
            header(spec)[0],
            "# The image is named by digest, which the Container Engine passes to enroot (4.0 or newer).",
            f'image = "{_enroot_image(spec)}"',
            f"mounts = [{mounts}]",
            'workdir = "${PWD}"',
            "entrypoint = false",
            "",
            "[env]",
            'PYTHONNOUSERSITE = "1"',
            "",
        ]
    )


def _format_time(time: timedelta) -> str:
    """Return a time in the format of sbatch, `2-03:00:00`, rounded up to seconds."""
    seconds = -(-int(time.total_seconds() * 10) // 10)
    days, rest = divmod(seconds, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
