"""What is wrong with a batch script by itself: one function a rule, a table of them. Pure.

Sources: Slurm's manual, sbatch(1); Apptainer's user guide, "GPU Support" and "Environment and Metadata" (the
machine's LD_LIBRARY_PATH is left out, APPTAINERENV_LD_LIBRARY_PATH is not).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imagefactory.gpu.builds import rocm_of
from imagefactory.recipes.shell_words import Word
from imagefactory.extras.lint.batch_job import GPU_OPTIONS, MEMORY_OPTIONS, BatchAsk, memory_in_mb
from imagefactory.extras.lint.batch_reader import BatchScript
from imagefactory.submit.check.batch.starts import APPTAINER, DOCKER, PYXIS, Start
from imagefactory.submit.check.findings import SubmitFinding, advice, wrong
from imagefactory.extras.lint.image import KnownImage

_TOLD_ONCE = (*GPU_OPTIONS, *MEMORY_OPTIONS, "constraint", "time", "nodelist", "exclude", "nodes", "array")
_MODULE = re.compile(
    r"(?:.*/)?(?:cuda|cudatoolkit|cuda-toolkit|cudnn|nccl|nvhpc)(?:[/_-].*|[0-9.]*)", re.IGNORECASE
)
_LEAST_MB = 256
_HOURS = ("12", "24", "36", "48", "72", "96")
_STARTERS = re.compile(
    r"^(?!\s*#).*\b(?:apptainer|singularity|docker|podman|container-image)\b", re.MULTILINE
)
_ENV = ("APPTAINERENV_", "SINGULARITYENV_")
_CONTAINED = ("--no-home", "--contain", "-c", "-C", "--containall")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCase:
    """A script with all that is known of it: `known` is the image of a catalogue, None where it is none."""

    script: BatchScript
    asked: BatchAsk
    starts: tuple[Start, ...]
    known: KnownImage | None

    @property
    def asks_gpus(self) -> bool:
        """Whether it asks for GPUs, perhaps in words that cannot be read, or when it is submitted."""
        given = any(name in self.script.options for name in GPU_OPTIONS)
        return self.asked.at is not None or given or bool(self.script.promised.intersection(GPU_OPTIONS))

    @property
    def wants_gpus(self) -> bool:
        return self.known.image.gpu if self.known else any(_opens_gpus(one, self) for one in self.starts)

    def sets(self, start: Start, *names: str) -> Word | None:
        """A variable that the script gives one start."""
        own = start.command.sets if start.command else {}
        every = self.script.shell.sets if self.script.shell else {}
        return next((found for name in names if (found := own.get(name) or every.get(name))), None)


def script_findings(case: BatchCase) -> Iterator[SubmitFinding]:
    """All that the table of rules has to say."""
    yield from case.script.findings
    for at, what, hint in case.asked.faults:
        yield wrong(at.line, "unreadable", what, hint, column=at.column)
    for rule in RULES:
        yield from rule(case)


# --- options -------------------------------------------------------------------------------------


def _overwritten(case: BatchCase) -> Iterator[SubmitFinding]:
    for name in _TOLD_ONCE:
        option = case.script.options.get(name)
        if option and option.before is not None and option.before != option.value:
            text = f"{option.written} is set again, which overrides {option.before[:40]}"
            yield wrong(option.at.line, "overwritten", text, "remove one of them", column=option.at.column)


def _amounts(case: BatchCase) -> Iterator[SubmitFinding]:
    """Numbers that only make sense in another unit, and three ways of asking for memory at once."""
    given = [case.script.options[name] for name in MEMORY_OPTIONS if name in case.script.options]
    if len(given) > 1:
        names = " and ".join(f"--{one.name}" for one in given)
        last = given[-1]
        text = f"{names} exclude each other, so sbatch rejects the script"
        yield wrong(last.at.line, "exclusive", text, "remove one of them", column=last.at.column)
    for option in given:
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
    line = min((one.at.line for one in script.options.values()), default=1)
    if not script.option(*MEMORY_OPTIONS) and not script.promised.intersection(MEMORY_OPTIONS):
        text = "no memory is requested: Slurm kills the job if it exceeds the default of the partition"
        yield advice(line, "missing", text, "write #SBATCH --mem=16G, or what the job needs")
    if "time" not in script.options and "time" not in script.promised:
        text = "no time is requested: the job ends at the default of the partition, and may start later"
        yield advice(line, "missing", text, "write #SBATCH --time=12:00:00, or what the job needs")


def _no_gpu(case: BatchCase) -> Iterator[SubmitFinding]:
    if case.asks_gpus or not case.starts or (case.known and not case.known.image.gpu):
        return
    first = case.starts[0]
    if case.wants_gpus:
        what = f"{case.known.image.target} is for GPUs" if case.known else "the image is started with GPUs"
        text = f"{what}, but the job requests none"
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
    elif found := _STARTERS.search(case.script.text):
        line = case.script.text.count("\n", 0, found.start()) + 1
        text = "an image seems to be started in a way that is not checked (a function, a here-document)"
        yield advice(line, "unread", text, "write it as apptainer exec --nv IMAGE PROGRAM")
    elif case.asks_gpus:
        text = "the job uses no image, so no verdict applies to it"
        hint = "write a script with an image: imagefactory submit TARGET --site slurm"
        yield advice(1, "no-image", text, hint)


def _unread(case: BatchCase) -> Iterator[SubmitFinding]:
    for start in case.starts:
        if start.image is None:
            text = f"{start.program} {start.verb} names no image"
            yield advice(start.at.line, "unread", text, column=start.at.column)
        elif not start.image.known:
            text = f"the image '{start.image.text[:60]}' is known only at run time, so it is not checked"
            hint = "write the image, or set the variable once, above, to the image"
            yield advice(start.image.where.line, "unread", text, hint, column=start.image.where.column)


def _opens_gpus(start: Start, case: BatchCase) -> bool:
    """Whether that start brings GPUs into the image."""
    if start.verb == PYXIS:
        return True
    if start.program in DOCKER:
        devices = any("nvidia.com/gpu" in one or "/dev/kfd" in one for one in start.given)
        return devices or start.has("--gpus") or "--runtime=nvidia" in start.given or "nvidia" in start.given
    names = [f"{who}_{what}" for who in ("APPTAINER", "SINGULARITY") for what in ("NV", "NVCCLI", "ROCM")]
    return start.has("--nv", "--nvccli", "--rocm") or case.sets(start, *names) is not None


def _without_gpus(case: BatchCase) -> Iterator[SubmitFinding]:
    if not (case.asks_gpus or (case.known and case.known.image.gpu)):
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
            option = "--gpus all" if start.program == "docker" else "--device nvidia.com/gpu=all"
            text = f"without {option}, the program in the image sees no GPU"
            yield wrong(
                start.at.line, "nv", text, f"write {start.program} run {option}", column=start.at.column
            )


def _docker(case: BatchCase) -> Iterator[SubmitFinding]:
    for start in case.starts:
        if start.program == "docker":
            text = (
                "the Docker daemon starts it outside the job, where the limits and GPUs of Slurm do not apply"
            )
            hint = "write apptainer exec --nv docker://IMAGE PROGRAM"
            yield advice(start.at.line, "docker", text, hint, column=start.at.column)


def _user_site(case: BatchCase) -> Iterator[SubmitFinding]:
    """Apptainer shows the home of the user, and Python takes packages from there before the image's."""
    for start in case.starts:
        if start.program not in APPTAINER or start.has(*_CONTAINED):
            continue
        told = any("PYTHONNOUSERSITE" in one for one in start.given)
        names = [f"{before}PYTHONNOUSERSITE" for before in (*_ENV, "")]
        if not told and case.sets(start, *names) is None:
            text = "Python prefers packages in ~/.local to those of the image"
            hint = f"write {start.program} {start.verb} --env PYTHONNOUSERSITE=1"
            yield advice(start.at.line, "user-site", text, hint, column=start.at.column)


# --- what fights the image -----------------------------------------------------------------------


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
    told = set()
    for start in case.starts:
        for before in _ENV:
            word = case.sets(start, before + name)
            if word and word not in told:
                told.add(word)
                text = f"{before}{name} puts libraries of the machine before those of the image"
                yield wrong(word.where.line, "libraries", text, hint, column=word.where.column)
        if any(one.removeprefix("--env=").startswith(f"{name}=") for one in start.given):
            text = f"--env {name} puts libraries of the machine before those of the image"
            yield wrong(start.at.line, "libraries", text, hint, column=start.at.column)
        word = case.sets(start, name)
        if word and word not in told:
            told.add(word)
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


def _commands(case: BatchCase) -> Iterator[tuple[Word, ...]]:
    """The commands of a script that starts an image."""
    if case.starts and case.script.shell:
        yield from (command.words for command in case.script.shell.commands)


RULES: tuple[Callable[[BatchCase], Iterator[SubmitFinding]], ...] = (
    _overwritten,
    _amounts,
    _missing,
    _no_gpu,
    _no_image,
    _unread,
    _without_gpus,
    _docker,
    _user_site,
    _modules,
    _libraries,
    _environments,
)
