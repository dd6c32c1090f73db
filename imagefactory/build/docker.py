"""The docker engine: BuildKit builds the rendered Dockerfile, and the result goes to the store.

Only `docker buildx build` runs as a command; everything else uses the SDK (docker_daemon.py). The store's
base image is loaded into the daemon. The result is a stream of `docker save`: layers of the store stay
unchanged, new ones are packed by the codec. The image keeps its name in the daemon, so that `docker run
pytorch:2.3-cu121` works.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from imagefactory.access import Access
from imagefactory.build.base.image import BuiltBase, write_manifest
from imagefactory.build.folders import copied_files, render, write_definitions
from imagefactory.build.layer_lock import image_annotations
from imagefactory.build.protocol import BuildInputs, recorded_image, require_image_space, tag_image
from imagefactory.build.secrets import AskSecrets, BuildSecrets, build_secrets_of, linker_failure
from imagefactory.build.steps import CERTIFICATES, CHANNELS, PIP_CONF
from imagefactory.errors import BuildError, StoreError, ToolError
from imagefactory.fs import explain_full_disk
from imagefactory.model import BuildSpec
from imagefactory.oci.archive import ImageImport, take_docker
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout, reference
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    Image,
    SifArtifact,
    canonical_json,
)
from imagefactory.progress import Progress, format_seconds
from imagefactory.runtime.docker_daemon import DockerDaemon

# The output of `--progress=plain` is lines `#7 [build 2/3] RUN ...` (a step begins or continues), `#7 0.345
# text` (its output, seconds first), `#7 DONE 1.2s`, `#7 CACHED`, `#7 ERROR: ...`, and at the end lines
# without a number that repeat the failure. Source: BuildKit's util/progress/progressui.


TAIL_LINES = 40
LONGEST_LINE = 400
LONGEST_NAME = 80

_NUMBERED = re.compile(r"#(\d+) (.*)")
_OUTPUT = re.compile(r"(\d+\.\d+) ?(.*)")
_STEP_DONE = re.compile(r"DONE (\d+(?:\.\d+)?)s")
_PLACE = re.compile(r"\[(?:(\S+) +)?(\d+)/(\d+)\] ")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-_])")
_PREAMBLE = re.compile(r"--[a-z]+=\S+ |set -eu; |if test -e \S+; then export \S+; fi; ")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildxRequest:
    """A build by buildx. Paths of `context` and secrets are relative to the command's directory.

    `secrets` are (id, source): `env=NAME` or `src=FILE`. `epoch` is the timestamp of config and history, in
    seconds since 1970. With `host_network` the build uses this machine's own network. `builder` is the name
    of docker's context, which is also the name of the daemon's own BuildKit.
    """

    context: str
    base: str
    tag: str
    platform: str
    epoch: int
    secrets: tuple[tuple[str, str], ...]
    host_network: bool
    builder: str = "default"


def command(build: BuildxRequest) -> tuple[str, ...]:
    """Return the command that builds with the daemon's own BuildKit and stores the image in that daemon."""
    return (
        *("docker", "buildx", "build", "--builder", build.builder, "--progress=plain", "--load"),
        # An attestation would turn the image into an index, which a daemon cannot store.
        "--provenance=false",
        *("--platform", build.platform, "--tag", build.tag),
        *("--build-arg", f"BASE={build.base}", "--build-arg", f"SOURCE_DATE_EPOCH={build.epoch}"),
        *(word for name, source in build.secrets for word in ("--secret", f"id={name},{source}")),
        *(("--network", "host") if build.host_network else ()),
        build.context,
    )


class BuildEventKind(StrEnum):
    BEGAN = "began"
    OUTPUT = "output"
    DONE = "done"
    CACHED = "cached"
    FAILED = "failed"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvent:
    """A line of the build's output. `step` is None outside of all steps.

    `text` is the step's name at its start, its output, or the reason of its failure. `seconds` is the time
    of a finished step.
    """

    kind: BuildEventKind
    step: int | None
    text: str
    seconds: float = 0.0


def parse_line(line: str) -> BuildEvent:
    """Return the event of a line. `text` has no escape sequences and control characters."""
    numbered = _NUMBERED.fullmatch(line.rstrip("\r\n"))
    if not numbered:
        return BuildEvent(kind=BuildEventKind.OTHER, step=None, text=clean(line))
    step, rest = int(numbered[1]), numbered[2]
    printed, step_done = _OUTPUT.fullmatch(rest), _STEP_DONE.fullmatch(rest)
    if printed:
        return BuildEvent(kind=BuildEventKind.OUTPUT, step=step, text=clean(printed[2]))
    if step_done:
        return BuildEvent(kind=BuildEventKind.DONE, step=step, text="", seconds=float(step_done[1]))
    if rest == "CACHED":
        return BuildEvent(kind=BuildEventKind.CACHED, step=step, text="")
    if rest.startswith("ERROR: "):
        # In full: the command comes first, its end last.
        return BuildEvent(
            kind=BuildEventKind.FAILED, step=step, text=clean(rest.removeprefix("ERROR: "), longest=len(rest))
        )
    if rest.startswith(("[", "exporting to ")):
        return BuildEvent(kind=BuildEventKind.BEGAN, step=step, text=clean(rest))
    return BuildEvent(kind=BuildEventKind.OTHER, step=step, text=clean(rest))  # transfers, `...`, CANCELED


def clean(line: str, *, longest: int = LONGEST_LINE) -> str:
    """Return `line` as a terminal finally shows it, without colors and control characters."""
    text = _ESCAPES.sub("", line.rstrip("\r\n")).rpartition("\r")[2]
    text = "".join(c if c.isprintable() else " " for c in text).rstrip()
    return text if len(text) <= longest else text[:longest] + " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailure:
    """The failure of a build: the step's short name (empty outside of steps), the reason, the last lines."""

    step: str
    reason: str
    tail: tuple[str, ...]


class BuildLog:
    """The output of a build so far."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._tails: dict[int | None, deque[str]] = {}
        self._failed: BuildEvent | None = None
        self._finished: set[tuple[str, str]] = set()
        self._stages: dict[str, int] = {}

    def feed(self, line: str) -> BuildEvent:
        """Add one line and return its event."""
        event = parse_line(line)
        if event.kind is BuildEventKind.BEGAN and event.step is not None:
            self._names[event.step] = event.text
            match = _PLACE.match(event.text)
            if match:
                self._stages[match[1] or ""] = int(match[3])
        elif event.kind is BuildEventKind.FAILED:
            self._failed = event
        elif event.kind in (BuildEventKind.DONE, BuildEventKind.CACHED) and event.step is not None:
            match = _PLACE.match(self._names.get(event.step, ""))
            if match:
                self._finished.add((match[1] or "", match[2]))
        elif event.text and event.kind in (BuildEventKind.OUTPUT, BuildEventKind.OTHER):
            self._tails.setdefault(event.step, deque(maxlen=TAIL_LINES)).append(event.text)
        return event

    @property
    def finished(self) -> int:
        """The number of finished instructions of the Dockerfile."""
        return len(self._finished)

    @property
    def total(self) -> int:
        """The number of instructions in all stages that have begun."""
        return sum(self._stages.values())

    def counts(self, step: int | None) -> bool:
        """Return whether a step is an instruction of the Dockerfile."""
        return step is not None and _PLACE.match(self._names.get(step, "")) is not None

    def name(self, step: int | None) -> str:
        """Return a step's short name: `build 3/3: RUN pip install ...`."""
        text = self._names.get(step, "") if step is not None else ""
        match = _PLACE.match(text)
        if match:
            stage = f"{match[1]} " if match[1] else ""
            text = f"{stage}{match[2]}/{match[3]}: {_PREAMBLE.sub('', ' '.join(text[match.end() :].split()))}"
        return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + " ..."

    def failure(self) -> BuildFailure:
        """Return the reason for the failed build."""
        outside = tuple(self._tails.get(None, ()))
        if self._failed is not None:
            tail = tuple(self._tails.get(self._failed.step, ()))
            return BuildFailure(
                step=self.name(self._failed.step), reason=_reason(self._failed.text), tail=tail
            )
        errors = [text.removeprefix("ERROR: ") for text in outside if text.startswith("ERROR: ")]
        return BuildFailure(step="", reason=errors[-1] if errors else "it gave no reason", tail=outside)


def _reason(text: str) -> str:
    """Return a failure without the command, which BuildKit repeats before the exit code."""
    return f"exit code {text.rpartition(' ')[2]}" if re.search(r"exit code: \d+$", text) else clean(text)


_COLLECTED = re.compile(r"Installing collected packages: (.+)")
_FETCHING = re.compile(r"\s*Downloading (\S+?)(?:-\S*)? \((\d{3,}(?:\.\d+)? MB|[\d.]+ GB)\)")


def pip_note(text: str) -> str:
    """Return pip's large downloads and its installation in short, empty for other lines."""
    collected, fetching = _COLLECTED.match(text), _FETCHING.match(text)
    if collected:
        return f"installing {count(collected[1].split(', '))}"
    return f"downloading {fetching[1]}, {fetching[2]}" if fetching else ""


def count(names: Iterable[str]) -> str:
    number = len(list(names))
    return f"{number} package{'' if number == 1 else 's'}"


OLDEST_DOCKER = (23, 0)
"""The first Docker whose BuildKit (0.11) supports SOURCE_DATE_EPOCH."""
OLDEST_BUILDX = (0, 10)
"""The first buildx with --provenance."""
VERSION = 1
"""The version of this engine's output. Another number rebuilds every image."""
PIP_CONF_VARIABLE = "IMAGEFACTORY_PIP_CONF"
CHANNELS_VARIABLE = "IMAGEFACTORY_CHANNELS_JSON"
NOTED_SECONDS = 5.0


def make_engine(access: Access) -> DockerEngine:
    return DockerEngine(
        access.layout,
        DockerDaemon(access.environ),
        codec=access.settings.codec.value,
        secrets=partial(build_secrets_of, access),
    )


class DockerEngine:
    """Builds with `daemon` and stores images in `layout`. `codec` packs new layers.

    `secrets` is called once for each build, for this machine's access to packages.
    """

    def __init__(self, layout: Layout, daemon: DockerDaemon, *, codec: str, secrets: AskSecrets) -> None:
        self.layout, self.daemon, self.codec, self.secrets = layout, daemon, codec, secrets

    def require(self) -> str:
        """Return `docker 26.1.5, buildx 0.13.1`. Raises ToolError with a fix."""
        facts = self.daemon.facts()
        if facts.podman:
            raise ToolError(
                "docker-is-podman",
                f"podman {facts.version} answers at {self.daemon.place}; buildx needs docker's own BuildKit",
                hint="set DOCKER_HOST to a dockerd, or build with --engine assemble, which needs neither",
            )
        if parse_version(facts.version) < OLDEST_DOCKER:
            raise ToolError(
                "docker-too-old",
                f"docker {facts.version} is too old: {_dotted(OLDEST_DOCKER)} is needed",
                hint="install a newer docker, or build with `--engine assemble`",
            )
        buildx = self._buildx()
        self.secrets(None)  # reports an index that no build can reach
        return f"docker {facts.version.partition('+')[0]}, buildx {buildx}"

    def _buildx(self) -> str:
        if shutil.which("docker", path=self.daemon.environ.get("PATH")) is None:
            raise ToolError(
                "tool-missing", "the docker command is not installed", hint="apt-get install docker-cli"
            )
        result = self._docker("buildx", "version")
        version = re.search(r"\bv?(\d+\.\d+(?:\.\d+)?)", result.stdout)
        if result.returncode != 0 or version is None:
            raise ToolError(
                "tool-missing",
                "docker has no buildx plugin",
                hint="apt-get install docker-buildx (package of Debian) or docker-buildx-plugin (of Docker)",
            )
        if parse_version(version[1]) < OLDEST_BUILDX:
            raise ToolError(
                "docker-too-old",
                f"docker's buildx {version[1]} is too old: {_dotted(OLDEST_BUILDX)} is needed",
                hint="install a newer docker-buildx",
            )
        return version[1]

    def find(self, definition: BuildSpec, base: BuiltBase) -> Image | None:
        """Return the image of this definition on this base, None if the store lacks a part of it."""
        return recorded_image(self.layout, self._key(render(definition), base), definition.target)

    def build(self, definition: BuildSpec, inputs: BuildInputs, progress: Progress) -> Image:
        """Build the image in the daemon, store it, and tag it in both.

        Packages come from the index inside the build. Raises BuildError with the last lines of the failed
        step. The caller holds the layout's `in_use`.
        """
        base = inputs.base().get()
        image = self.find(definition, base)
        if image is None:
            require_image_space(self.layout.path, definition)
            files, secrets = render(definition), self.secrets(definition.lock)
            key, name = self._key(files, base), definition.target.name
            temporary = f"imagefactory/build:{key[:12]}"
            job = _DockerBuild(definition=definition, base=base, files=files, tag=temporary)
            with self.layout.locked(f"docker-{key}"), self._removed(temporary):
                base_name = f"imagefactory/base:{base.image.config.removeprefix('sha256:')[:12]}"
                with progress.stage(f"{name}: docker build"):
                    # By name: BuildKit would look for a bare id in a registry.
                    known = self.daemon.ensure(self.layout, base.image, base_name, progress)
                    self.daemon.tag(known, base_name)
                    self._build(replace(job, base_name=base_name), secrets, progress)
                with progress.stage(f"{name}: from docker into the store"):
                    image = self._bring_in(job, progress)
                size = self.layout.blob_path(image.digest).stat().st_size
                self.layout.record("images", key, {"digest": image.digest, "size": size})
                self.daemon.tag(temporary, reference(definition.target))
        self.tag(definition, image)
        return image

    def toolchain(self, definition: BuildSpec) -> str:  # noqa: ARG002
        return ""

    def tag(self, definition: BuildSpec, image: Image | SifArtifact) -> None:
        """Point the target's tag at the image in the store, and in the daemon if it has the image."""
        name = reference(definition.target)
        tag_image(self.layout, definition.target, image)
        if isinstance(image, Image):
            tagged = self.daemon.find(image, name)
            if tagged:
                self.daemon.tag(tagged, name)
            elif self.daemon.inspect(name):  # another image's: `docker run` must not take it for this one
                self.daemon.untag(name)

    def _build(self, job: _DockerBuild, secrets: BuildSecrets, progress: Progress) -> None:
        secret_sources = [(PIP_CONF, f"env={PIP_CONF_VARIABLE}")]
        # Only this user can read the environment, and nothing of it remains after a kill.
        environment = {**self._environment(), PIP_CONF_VARIABLE: secrets.pip_conf}
        if secrets.channels:
            secret_sources.append((CHANNELS, f"env={CHANNELS_VARIABLE}"))
            environment[CHANNELS_VARIABLE] = secrets.channels
        if secrets.loopback:
            progress.note("  the packages are on this machine's loopback: the build shares its network")
        with explain_full_disk(self.layout.path):
            self.layout.tmp.mkdir(parents=True, exist_ok=True)
            directory = tempfile.TemporaryDirectory(dir=self.layout.tmp, prefix="docker-")
        with directory as folder:
            write_definitions(Path(folder, "context"), job.files, copied_files(job.definition))
            if secrets.certificates is not None:
                Path(folder, CERTIFICATES).write_bytes(secrets.certificates)
                secret_sources.append((CERTIFICATES, f"src={CERTIFICATES}"))
            build = BuildxRequest(
                context="context",
                base=job.base_name,
                tag=job.tag,
                platform=job.definition.target.platform,
                epoch=job.base.epoch,
                secrets=tuple(secret_sources),
                host_network=secrets.loopback,
                builder=self._context(),
            )
            transcript = BuildLog()
            with _started(command(build), folder, environment) as process:
                assert process.stderr is not None
                lines = (secrets.hide(line.decode(errors="replace")) for line in process.stderr)
                _watch(lines, transcript, progress)
                code = process.wait()
        if code != 0:
            raise _failed(job.definition.target.name, transcript, code)

    def _context(self) -> str:
        """Return the docker command's context, which the SDK uses too; `default` with DOCKER_HOST."""
        return self._docker("context", "show").stdout.strip() or "default"

    def _docker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", *arguments],
            capture_output=True,
            text=True,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
        )

    def _environment(self) -> dict[str, str]:
        """Return the caller's environment, without variables that point buildx to another daemon."""
        excluded = ("BUILDX_BUILDER", "BUILDKIT_HOST", "BUILDKIT_PROGRESS", "DOCKER_DEFAULT_PLATFORM")
        return {name: value for name, value in self.daemon.environ.items() if name not in excluded}

    @contextmanager
    def _removed(self, temporary: str) -> Iterator[None]:
        """Remove a name in the daemon at the end, and before that the name of a killed build."""
        self.daemon.untag(temporary)
        try:
            yield
        finally:
            with suppress(ToolError):  # the daemon is gone; the first error is reported
                self.daemon.untag(temporary)

    def _bring_in(self, job: _DockerBuild, progress: Progress) -> Image:
        packer, definition = codec(self.codec), job.definition
        built = self.daemon.inspect(job.tag)
        if built is None:
            raise BuildError(
                "docker-image-missing",
                f"{definition.target.name}: the image is missing in docker after its build",
                hint="build again, and do not delete images in docker meanwhile",
            )
        diff_ids = [str(diff_id) for diff_id in built["RootFS"]["Layers"]]
        known = {layer.diff_id: layer for layer in job.base.image.layers}
        for diff_id in diff_ids:
            if stored := self.layout.recall_layer(_layer_key(diff_id, packer.identity)):
                known.setdefault(diff_id, stored)
        with (
            progress.task("layers out of docker", total=int(built["Size"])) as task,
            self.daemon.saved(job.tag) as stream,
        ):
            imported = take_docker(
                self.layout, stream, ImageImport(codec=packer, known=known, report=task.advance)
            )
        if [layer.diff_id for layer in imported.layers] != diff_ids:
            raise StoreError(
                "docker-image-mismatch",
                f"{definition.target.name}: docker saved a different image than it built",
                hint="build again: another build may have replaced the image in docker",
            )
        base_layers = len(job.base.image.layers)
        layers = []
        for number, layer in enumerate(imported.layers):
            titled = layer if number < base_layers else replace(layer, title=f"docker {number - base_layers}")
            if layer.diff_id not in known:
                self.layout.record_layer(_layer_key(layer.diff_id, packer.identity), titled)
            layers.append(titled)
        # The config's own bytes: its digest is the image's id in the daemon.
        config, annotations = (
            self.layout.add(imported.config, CONFIG_TYPE),
            image_annotations(definition, job.base),
        )
        platform = definition.target.platform
        index = write_manifest(self.layout, config, layers, platform, annotations)
        return self.layout.load(reference(definition.target), index)

    def _key(self, files: Mapping[str, str], base: BuiltBase) -> str:
        """Return the hash of all inputs of a build."""
        parts = ["docker", VERSION, codec(self.codec).identity, base.image.manifest, base.epoch]
        return hashlib.sha256(canonical_json([*parts, sorted(files.items())])).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _DockerBuild:
    definition: BuildSpec
    base: BuiltBase
    files: Mapping[str, str]
    tag: str
    base_name: str = ""


def _layer_key(diff_id: str, identity: str) -> str:
    return hashlib.sha256(canonical_json(["plain layer", diff_id, identity])).hexdigest()


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (26, 1, 5) of `26.1.5+dfsg1`."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@contextmanager
def _started(
    argv: Sequence[str], directory: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in its own session until the end of the block, which cancels the build."""
    process = subprocess.Popen(
        argv,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _watch(lines: Iterator[str], transcript: BuildLog, progress: Progress) -> None:
    """Report the build's output. There is no total, because one step takes nearly all of the time."""
    reported: set[int | None] = set()
    with progress.task("docker build", unit="steps") as task:
        for line in lines:
            before = transcript.finished
            event = transcript.feed(line)
            task.advance(transcript.finished - before)
            name = transcript.name(event.step)
            if (
                event.kind in (BuildEventKind.OUTPUT, BuildEventKind.DONE)
                and name
                and event.step not in reported
            ):
                reported.add(event.step)  # steps that BuildKit had in its cache are not worth a line
                if transcript.counts(event.step):
                    progress.note(f"  step {before + 1} of {transcript.total}, {name}")
            if event.kind is BuildEventKind.OUTPUT and (note := pip_note(event.text)):
                progress.note(f"    {note}")
            if event.kind is BuildEventKind.DONE and event.seconds >= NOTED_SECONDS:
                progress.note(f"    {name.partition(':')[0]}: {format_seconds(event.seconds)}")


def _failed(target: str, transcript: BuildLog, code: int) -> BuildError:
    failure = transcript.failure()
    if problem := linker_failure("\n".join(failure.tail)):
        return BuildError(
            "docker-build-failed", f"{target}: docker build failed: {problem[0]}", hint=problem[1]
        )
    location = f" at {failure.step}" if failure.step else ""
    lines = "".join(f"\n  | {line}" for line in failure.tail)
    text = " ".join((failure.reason, *failure.tail))
    if code < 0:
        return BuildError(
            "docker-build-failed", f"{target}: docker build was killed by signal {-code}", hint="run it again"
        )
    if re.search(r"no space left on device", text):
        hint = "free space in docker's directory: docker builder prune, docker image prune"
    elif re.search(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed", text):
        hint = "set `certificates` to your site's CA bundle (imagefactory.toml)"
    elif re.search(r"No matching distribution|Temporary failure in name resolution|Connection", text):
        hint = "check that containers can reach the package index, which imagefactory doctor shows"
    else:
        hint = f"to see all output, run docker build definitions/{target}"
    return BuildError(
        "docker-build-failed", f"{target}: docker build failed{location}: {failure.reason}{lines}", hint=hint
    )
