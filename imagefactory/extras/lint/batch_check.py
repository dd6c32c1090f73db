"""Check a batch script for a Slurm cluster against an inventory and a catalog. Pure functions.

    BatchScript + CheckContext -> check_batch() -> SubmitCheckResult

The rules for images are the same as in HTCondor files. Slurm reports GPU types but no drivers. So this check
assumes a new enough driver; scripts from `job write` check the driver at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from imagefactory.extras.lint.batch_job import (
    APPTAINER,
    DOCKER,
    EDF_OPTIONS,
    GPU_OPTIONS,
    MEMORY_OPTIONS,
    PYXIS,
    BatchRequest,
    ImageStart,
    as_pyxis,
    capability_of,
    find_batch_reach,
    find_starts,
    memory_in_mb,
    misread_by_pyxis,
    probe_answer,
    read_batch_request,
)
from imagefactory.extras.lint.batch_reader import BatchScript
from imagefactory.extras.lint.findings import (
    PREDICTED,
    REVOKED,
    UNUSABLE,
    VERIFIED,
    CheckContext,
    FileLocation,
    QueueCheckResult,
    SubmitCheckResult,
    SubmitFinding,
    advice,
    join_causes,
    wrong,
)
from imagefactory.extras.lint.image import (
    KnownImage,
    MutableNames,
    catalog_findings,
    find_catalog_image,
    grounds_of,
    image_status_on,
    moving,
    narrow,
    nowhere,
    reached_by,
    unused_gpu_request,
    unverified,
)
from imagefactory.extras.lint.reach import JobReachability
from imagefactory.gpu.values import mig_profile, rocm_of
from imagefactory.jobs.offer import ImageEvidence
from imagefactory.recipes.shell_words import RunWord
from imagefactory.schedulers.pool import PoolGpu

# --- Rules for the script itself: one function for each rule, and a table of them. Pure
# Sources: Slurm's manual, sbatch(1); Apptainer's user guide, "GPU Support" and "Environment and Metadata"
# (Apptainer drops the machine's LD_LIBRARY_PATH, but not APPTAINERENV_LD_LIBRARY_PATH).


_SINGLE_OPTIONS = (
    *GPU_OPTIONS,
    *MEMORY_OPTIONS,
    "constraint",
    "time",
    "nodelist",
    "exclude",
    "nodes",
    "array",
)
_MODULE = re.compile(
    r"(?:.*/)?(?:cuda|cudatoolkit|cuda-toolkit|cudnn|nccl|nvhpc)(?:[/_-].*|[0-9.]*)", re.IGNORECASE
)
_LEAST_MB = 256
_HOURS = ("12", "24", "36", "48", "72", "96")
_STARTERS = re.compile(
    r"^(?!\s*#).*(?:\b(?:apptainer|singularity|docker|podman|container-image)\b|--(?:environment|edf)\b)",
    re.MULTILINE,
)
_ENV = ("APPTAINERENV_", "SINGULARITYENV_")
BY_PODMAN = "pass the GPUs of the job: imagefactory job write TARGET --site slurm --container podman"
_CONTAINED = ("--no-home", "--contain", "-c", "-C", "--containall")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCase:
    """A script and the facts about it. `known` is its image in the catalog, or None."""

    script: BatchScript
    request: BatchRequest
    starts: tuple[ImageStart, ...]
    known: KnownImage | None

    @property
    def requests_gpus(self) -> bool:
        """Return whether the script requests GPUs, also if that option is unreadable or only in a comment."""
        has_option = any(name in self.script.options for name in GPU_OPTIONS)
        return (
            self.request.at is not None or has_option or bool(self.script.promised.intersection(GPU_OPTIONS))
        )

    @property
    def wants_gpus(self) -> bool:
        return self.known.image.gpu if self.known else any(_opens_gpus(start, self) for start in self.starts)

    def sets(self, start: ImageStart, *names: str) -> RunWord | None:
        """Return the first of these variables that the script sets for an image start."""
        variables = start.command.sets if start.command else {}
        every = self.script.shell.sets if self.script.shell else {}
        return next((word for name in names if (word := variables.get(name) or every.get(name))), None)


def script_findings(case: BatchCase) -> Iterator[SubmitFinding]:
    """Yield the findings of all rules."""
    yield from case.script.findings
    for location, message, hint in case.request.faults:
        yield wrong(location.line, "unreadable", message, hint, column=location.column)
    for rule in RULES:
        yield from rule(case)


# --- options -------------------------------------------------------------------------------------


def _overwritten(case: BatchCase) -> Iterator[SubmitFinding]:
    for name in _SINGLE_OPTIONS:
        option = case.script.options.get(name)
        if option and option.before is not None and option.before != option.value:
            text = f"{option.written} is set again, which overrides {option.before[:40]}"
            yield wrong(option.at.line, "overwritten", text, "remove one of them", column=option.at.column)


def _amounts(case: BatchCase) -> Iterator[SubmitFinding]:
    """Report numbers that need a unit, and memory options that exclude each other."""
    options = [case.script.options[name] for name in MEMORY_OPTIONS if name in case.script.options]
    if len(options) > 1:
        names = " and ".join(f"--{item.name}" for item in options)
        last = options[-1]
        text = f"{names} exclude each other, so sbatch rejects the script"
        yield wrong(last.at.line, "exclusive", text, "remove one of them", column=last.at.column)
    for option in options:
        if 0 < memory_in_mb(option) < _LEAST_MB:
            text = f"--{option.name}={option.value} is {option.value} MB"
            hint = f"write the unit: --{option.name}={option.value}G"
            yield wrong(option.at.line, "unit", text, hint, column=option.at.column)
    time = case.script.options.get("time")
    if time and time.value in _HOURS:
        text = f"--time={time.value} is {time.value} minutes"
        yield advice(time.at.line, "unit", text, f"hours: --time={time.value}:00:00", column=time.at.column)


def _missing(case: BatchCase) -> Iterator[SubmitFinding]:
    script = case.script
    line = min((option.at.line for option in script.options.values()), default=1)
    if not script.option(*MEMORY_OPTIONS) and not script.promised.intersection(MEMORY_OPTIONS):
        text = "no memory is requested: Slurm kills the job if it exceeds the default of the partition"
        yield advice(line, "missing", text, "write #SBATCH --mem=16G, or what the job needs")
    if "time" not in script.options and "time" not in script.promised:
        text = "no time is requested: the job ends at the default of the partition, and may start later"
        yield advice(line, "missing", text, "write #SBATCH --time=12:00:00, or what the job needs")


def _no_gpu(case: BatchCase) -> Iterator[SubmitFinding]:
    if case.requests_gpus or not case.starts or (case.known and not case.known.image.gpu):
        return
    first = case.starts[0]
    if case.wants_gpus:
        message = f"{case.known.image.target} is for GPUs" if case.known else "the image is started with GPUs"
        text = f"{message}, but the job requests none"
        yield wrong(first.at.line, "no-gpu", text, "write #SBATCH --gres=gpu:TYPE:1", column=first.at.column)
    else:
        text = "the job requests no GPU, so the program in the image sees none"
        hint = "request one: #SBATCH --gres=gpu:TYPE:1"
        yield advice(first.at.line, "no-gpu", text, hint, column=first.at.column)


# --- how the image is started --------------------------------------------------------------------


def _no_image(case: BatchCase) -> Iterator[SubmitFinding]:
    if case.starts:
        return
    if case.script.shell is None:
        text = "its first line names no shell, so only its #SBATCH lines are checked"
        yield advice(1, "unread", text)
    elif match := _STARTERS.search(case.script.text):
        line = case.script.text.count("\n", 0, match.start()) + 1
        text = "an image seems to be started in a way that is not checked (a function, a here-document)"
        yield advice(line, "unread", text, "write it as apptainer exec --nv IMAGE PROGRAM")
    elif case.requests_gpus:
        text = "the job uses no image, so no verdict applies to it"
        hint = "write a script with an image: imagefactory job write TARGET --site slurm"
        yield advice(1, "no-image", text, hint)


def _edf(case: BatchCase) -> Iterator[SubmitFinding]:
    option = case.script.option(*EDF_OPTIONS)
    if option:
        text = f"{option.written} puts the whole script into the image, where srun often fails"
        yield advice(option.at.line, "edf", text, f"write srun {option.written}=...", column=option.at.column)
    for start in case.starts:
        for message, hint in start.faults:
            yield wrong(start.at.line, "edf", message, hint, column=start.at.column)


def _unread(case: BatchCase) -> Iterator[SubmitFinding]:
    for start in case.starts:
        if start.faults:
            continue
        if start.image is None:
            text = f"{start.program} {start.verb} names no image"
            yield advice(start.at.line, "unread", text, column=start.at.column)
        elif start.lost:
            text = f"the EDF '{start.lost[:60]}' is not here, so its image is not checked"
            yield advice(
                start.at.line, "unread", text, "check the script where that file is", column=start.at.column
            )
        elif not start.image.known:
            text = f"the image '{start.image.text[:60]}' is known only at run time, so it is not checked"
            hint = "write the image, or set the variable once, above, to the image"
            yield advice(start.image.where.line, "unread", text, hint, column=start.image.where.column)


def _opens_gpus(start: ImageStart, case: BatchCase) -> bool:
    """Return whether this start makes GPUs visible in the image."""
    if start.verb == PYXIS:
        return True
    if start.program in DOCKER:
        # An array may have the devices: "${devices[@]}".
        words = ("nvidia.com/gpu", "/dev/kfd", "[@]}")
        devices = any(word in option for option in start.options for word in words)
        return (
            devices or start.has("--gpus") or "--runtime=nvidia" in start.options or "nvidia" in start.options
        )
    names = [f"{who}_{suffix}" for who in ("APPTAINER", "SINGULARITY") for suffix in ("NV", "NVCCLI", "ROCM")]
    return start.has("--nv", "--nvccli", "--rocm") or case.sets(start, *names) is not None


def _without_gpus(case: BatchCase) -> Iterator[SubmitFinding]:
    if not (case.requests_gpus or (case.known and case.known.image.gpu)):
        return
    if case.known and not case.known.image.gpu:
        return
    amd = bool(case.known and rocm_of(case.known.image.cuda))
    for start in case.starts:
        if start.program in APPTAINER:
            option = "--rocm" if amd else "--nv"
            if not _opens_gpus(start, case):
                text = f"without {option}, the program in the image sees no GPU"
                hint = f"write {start.program} {start.verb} {option}"
                yield wrong(start.at.line, "nv", text, hint, column=start.at.column)
            elif amd and start.has("--nv"):
                text = "--nv is for NVIDIA GPUs, but the image is for AMD GPUs"
                yield wrong(start.at.line, "nv", text, "write --rocm", column=start.at.column)
        elif start.program in DOCKER and not _opens_gpus(start, case):
            docker = start.program == "docker"
            option = "--gpus all" if docker else "--device nvidia.com/gpu=NAME"
            text = f"without {option}, the program in the image sees no GPU"
            hint = f"write docker run {option}" if docker else BY_PODMAN
            yield wrong(start.at.line, "nv", text, hint, column=start.at.column)


def _all_gpus(case: BatchCase) -> Iterator[SubmitFinding]:
    for start in case.starts:
        if start.program == "podman" and any("nvidia.com/gpu=all" in option for option in start.options):
            text = "nvidia.com/gpu=all names all GPUs of the node, also those of other jobs"
            yield advice(start.at.line, "all-gpus", text, BY_PODMAN, column=start.at.column)


def _docker(case: BatchCase) -> Iterator[SubmitFinding]:
    for start in case.starts:
        if start.program == "docker":
            text = (
                "the Docker daemon starts it outside the job, where the limits and GPUs of Slurm do not apply"
            )
            hint = "write apptainer exec --nv docker://IMAGE PROGRAM"
            yield advice(start.at.line, "docker", text, hint, column=start.at.column)


def _user_site(case: BatchCase) -> Iterator[SubmitFinding]:
    """Report visible packages in the user's home.

    Apptainer mounts the home directory, and Python prefers packages there to those in the image.
    """
    for start in case.starts:
        if start.program not in APPTAINER or start.has(*_CONTAINED):
            continue
        is_set = any("PYTHONNOUSERSITE" in option for option in start.options)
        names = [f"{before}PYTHONNOUSERSITE" for before in (*_ENV, "")]
        if not is_set and case.sets(start, *names) is None:
            text = "Python prefers packages in ~/.local to those of the image"
            hint = f"write {start.program} {start.verb} --env PYTHONNOUSERSITE=1"
            yield advice(start.at.line, "user-site", text, hint, column=start.at.column)


# --- conflicts with the image --------------------------------------------------------------------


def _modules(case: BatchCase) -> Iterator[SubmitFinding]:
    for words in _commands(case):
        loads = words[0].text == "ml" or (
            words[0].text == "module" and words[1:2] and words[1].text in ("load", "add", "switch", "swap")
        )
        for word in words[1:] if loads else ():
            if word.text not in ("load", "add") and _MODULE.fullmatch(word.text):
                text = f"the image has its own CUDA libraries: {word.text} only adds variables such as"
                text += " CUDA_HOME, which name paths of the machine"
                yield advice(word.where.line, "module", text, "remove it", column=word.where.column)


def _libraries(case: BatchCase) -> Iterator[SubmitFinding]:
    name = "LD_LIBRARY_PATH"
    hint = "remove it: the image and --nv provide what is needed"
    reported = set()
    for start in case.starts:
        for before in _ENV:
            word = case.sets(start, before + name)
            if word and word not in reported:
                reported.add(word)
                text = f"{before}{name} puts libraries of the machine before those of the image"
                yield wrong(word.where.line, "libraries", text, hint, column=word.where.column)
        if any(option.removeprefix("--env=").startswith(f"{name}=") for option in start.options):
            text = f"--env {name} puts libraries of the machine before those of the image"
            yield wrong(start.at.line, "libraries", text, hint, column=start.at.column)
        word = case.sets(start, name)
        if word and word not in reported:
            reported.add(word)
            text = (
                f"{name} is for the machine: apptainer removes it, and elsewhere it conflicts with the image"
            )
            yield advice(word.where.line, "libraries", text, hint, column=word.where.column)


def _environments(case: BatchCase) -> Iterator[SubmitFinding]:
    for words in _commands(case):
        texts = [word.text for word in words[:2]]
        conda = texts[0].rpartition("/")[2] in ("conda", "mamba", "micromamba") and texts[1:] == ["activate"]
        source = texts[0] in ("source", ".") and len(words) > 1 and texts[1].endswith("activate")
        if conda or source:
            text = "the image has its own Python and packages, and uses none of this environment"
            yield advice(words[0].where.line, "environment", text, "remove it", column=words[0].where.column)


def _commands(case: BatchCase) -> Iterator[tuple[RunWord, ...]]:
    """Yield the commands of a script that starts an image."""
    if case.starts and case.script.shell:
        yield from (command.words for command in case.script.shell.commands)


RULES: tuple[Callable[[BatchCase], Iterator[SubmitFinding]], ...] = (
    _overwritten,
    _amounts,
    _missing,
    _no_gpu,
    _no_image,
    _edf,
    _unread,
    _without_gpus,
    _all_gpus,
    _docker,
    _user_site,
    _modules,
    _libraries,
    _environments,
)


SITE = " --site slurm"
_FEW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobReachability:
    """The GPUs that the job can get, if known. `reach` is None without an inventory."""

    grounds: ImageEvidence | None
    reach: JobReachability | None
    around: CheckContext


def check_batch(script: BatchScript, around: CheckContext) -> SubmitCheckResult:
    """Return the findings and the reachable GPUs of a script."""
    starts, request = find_starts(script, around.edf), read_batch_request(script)
    images = around.catalog.images if around.catalog else ()
    named = [start.named for start in starts if start.named]
    known = next((image_ for image in named if (image_ := find_catalog_image(image, images))), None)
    case = BatchCase(script=script, request=request, starts=starts, known=known)
    inventory = around.inventory
    reach = find_batch_reach(script, request, inventory) if inventory is not None else None
    reachability = _JobReachability(
        grounds=_ignore_drivers(grounds_of(known, around), inventory is None or _no_drivers(inventory.gpus)),
        reach=reach,
        around=around,
    )
    reached = tuple(reached_by(reach.reached if reach else (), reachability.grounds))
    findings = [*script_findings(case), *_image_findings(case, around), *_gpu_findings(case, reachability)]
    jobs = QueueCheckResult(
        line=request.at.at.line if request.at else 1,
        count=request.jobs,
        image=named[0].address if named else "",
        target=known.image.target if known else "",
        known=reach is not None,
        total=len(reach.places) if reach else 0,
        reached=reached,
        causes=tuple(reach.causes.items()) if reach else (),
        gpu=case.requests_gpus,
        findings=tuple(findings),
        title="the script, in any partition" if script.option("partition") else "the script",
    )
    return SubmitCheckResult(name=script.name, jobs=(jobs,), findings=())


def _no_drivers(gpus: tuple[PoolGpu, ...]) -> bool:
    return not any(gpu.cuda for gpu in gpus)


def _ignore_drivers(grounds: ImageEvidence | None, no_drivers: bool) -> ImageEvidence | None:
    if grounds is None or not no_drivers:
        return grounds
    return replace(grounds, classes=tuple(replace(row, cuda="") for row in grounds.classes))


# --- the image -----------------------------------------------------------------------------------


def _image_findings(case: BatchCase, around: CheckContext) -> Iterator[SubmitFinding]:
    images = around.catalog.images if around.catalog else ()
    reported: set[str] = set()
    for start in case.starts:
        image, word = start.named, start.image
        if image is None or word is None or image.address in reported:
            continue
        reported.add(image.address)
        location = FileLocation(word.where.line, word.where.column)
        misread = misread_by_pyxis(word.text) if start.verb == PYXIS else None
        if misread:
            yield wrong(location.line, "pyxis", *misread, column=location.column)
        elif (
            image.kind is not None
            and not image.hexes
            and not image.repository
            and image.address[-4:] != ".sif"
        ):
            text = f"'{image.address[:60]}' is not an image reference"
            yield wrong(
                location.line, "reference", text, "write HOST/NAME@sha256:...", column=location.column
            )
        elif image.kind is None and "://" in image.address:
            text = f"no verdict can apply to '{image.address[:60]}'"
            hint = "write docker:// or oras://HOST/NAME@sha256:..., or a .sif"
            yield advice(location.line, "reference", text, hint, column=location.column)
        elif image.kind is None:
            text = f"the name of the file or directory '{image.address[:60]}' does not identify its content"
            suffix = ".sqsh" if start.verb == PYXIS else ".sif"
            hint = f"use a {suffix} with digits of its sha256 in its name"
            if suffix not in image.address or not re.search(r"[0-9a-f]{12}", image.address):
                yield advice(location.line, "sandbox", text, hint, column=location.column)
        elif image.pinned:
            known = find_catalog_image(image, images)
            yield from catalog_findings(image, known, around.catalog, location, SITE)
        else:
            written = as_pyxis if start.verb == PYXIS else None
            around_name = MutableNames(site=around.site, images=images, digest=around.digest)
            yield from moving(image, location, around_name, written)


# --- the GPUs ------------------------------------------------------------------------------------


def _gpu_findings(case: BatchCase, reachability: _JobReachability) -> Iterator[SubmitFinding]:
    request, known, grounds = case.request, case.known, reachability.grounds
    if request.at is None:
        return
    location = request.at.at
    if known is not None and not known.image.gpu:
        yield unused_gpu_request(known, location, request.at.written)
        return
    if reachability.reach is None:
        if known is not None and grounds is not None:
            yield from _by_names(case, known, grounds)
        return
    if not reachability.reach.reached:
        yield _no_match(reachability, request, location)
    if known is not None:
        yield from unverified(known, tuple(reached_by(reachability.reach.reached, grounds)), location, SITE)
        yield from narrow(known, grounds, reachability.reach.places, location, SITE)


def _no_match(reachability: _JobReachability, request: BatchRequest, location: FileLocation) -> SubmitFinding:
    assert reachability.reach is not None
    reason = join_causes(reachability.reach.causes.items()) or "the inventory has none"
    types = sorted({row.gpu.name for row in reachability.reach.places if row.gpu.name})
    unknown = [kind for kind in request.kinds if kind not in types]
    text = f"none of {len(reachability.reach.places)} GPUs matches, so the job never starts: {reason}"
    if unknown:
        there = ", ".join(types[:_FEW]) or "no type"
        text = f"no node has a GPU of type {unknown[0][:40]}, only {there}"
    return wrong(
        location.line,
        "no-match",
        text,
        "list the GPUs of the cluster: imagefactory gpus",
        column=location.column,
    )


def _by_names(case: BatchCase, known: KnownImage, grounds: ImageEvidence) -> Iterator[SubmitFinding]:
    """Check the requested GPU names.

    Without an inventory, only the names show which GPUs a script requests.
    """
    request, target = case.request, known.image.target
    assert request.at is not None
    at, written = request.at.at, request.at.written
    names = request.kinds
    if not names and request.alternatives and all(capability_of(name) for name in request.alternatives):
        names, option = request.alternatives, case.script.options["constraint"]
        at, written = option.at, option.written
    hint = f"write a script that requests only verified GPUs: imagefactory job write {target}{SITE}"
    if not grounds.verified:
        yield nowhere(known, grounds, at)
    elif not names and probe_answer(case.script) is None:
        proven = ", ".join(str(row.capability) for row in grounds.classes if row.verified)
        text = f"Slurm may assign any GPU of the cluster, but {target} is verified only on {proven}"
        yield advice(at.line, "any-gpu", text, hint, column=at.column)
    for name in names if grounds.verified else ():
        capability = capability_of(name)
        if not capability:
            text = f"no GPU is known by the name '{name[:40]}'"
            location = "run this on a login node or with --inventory FILE; see imagefactory gpus"
            yield advice(at.line, "type", text, location, column=at.column)
            continue
        word, reason = image_status_on(
            _named(name, capability, part=request.part or bool(mig_profile(name))), grounds
        )
        if word != VERIFIED:
            says = f"fails on {name}" if word == UNUSABLE else f"is not verified on {name}"
            says = f"was revoked on {name}" if word == REVOKED else says
            reason = f"predicted: {reason}" if word == PREDICTED else reason
            text = f"{target} {says} ({capability}), which {written} requests: {reason}"
            rule = word if word in (UNUSABLE, REVOKED) else "unverified"
            yield wrong(at.line, rule, text, hint, column=at.column)


def _named(name: str, capability: str, *, part: bool) -> PoolGpu:
    return PoolGpu(
        id="", uuid="", name=name, capability=capability, memory=0, driver="", cuda="", mig=part, free=True
    )  # fmt: skip
