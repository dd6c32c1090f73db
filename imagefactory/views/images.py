"""Builds, transfers, targets and locks as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imagefactory.gpu.capability import can_emulate, parse_capability
from imagefactory.gpu.values import platform_of
from imagefactory.lock.changes import publisher_changes
from imagefactory.model import (
    CheckState,
    ImageProgress,
    Lock,
    LockedCondaPackage,
    LockedPackage,
    Report,
    Target,
)
from imagefactory.oci.manifests import Image
from imagefactory.progress import format_bytes
from imagefactory.recipes.values import channel_name
from imagefactory.views.text import CPUS, format_fields, format_table

if TYPE_CHECKING:
    from imagefactory.actions.build import BuildResult
    from imagefactory.actions.lock import LockResult
    from imagefactory.actions.store import PruneResult, RepositoryListing
    from imagefactory.actions.transfer import CopyResult, PullResult, PushResult, SifPullResult, SourcesPush
    from imagefactory.lock import OutdatedPackage
    from imagefactory.lock.files import UnsolvableTarget
    from imagefactory.oci.transfer import TransferResult


def format_report(report: Report) -> str:
    """Return the problems in a smoke test, one on each line, then the other checks by name."""
    failed = [check for check in report.checks if check.state is CheckState.FAILED]
    lines = []
    for check in failed:
        first, *others = check.detail.split("; ")
        lines += [f"{check.name}  FAILED  {first}".rstrip(), *(f"  {other}" for other in others)]
    for state, words in (
        (CheckState.PASSED, "passed"),
        (CheckState.NOT_APPLICABLE, "not applicable"),
        (CheckState.NOT_RUN, "not run"),
    ):
        names = [check.name for check in report.checks if check.state is state]
        lines += [f"{words}: {', '.join(names)}"] if names else []
    return "\n".join(lines)


def smoke_line(report: Report | None) -> str:
    if report is None:
        return "not run (--no-test)"
    if not report.passed:
        return f"FAILED: {report.failure}"
    count = sum(check.state is CheckState.PASSED for check in report.checks)
    earlier = ", kept from an earlier run" if report.from_record else ""
    return f"passed inside the image: {count} checks on the CPU{earlier}"


def format_built(built: BuildResult, store: str) -> str:
    """Return the built image, its location, and what is not verified yet."""
    image, target, report = built.image, built.target, built.report
    gpu = report.gpu.value if report is not None else "not-tested"
    times = ", ".join(f"{name} {seconds:.1f}s" for name, seconds in built.seconds)
    fields = [("image", f"{image.name} in {store}")]
    if isinstance(image, Image):
        size = f"{format_bytes(image.size)} in {len(image.layers)} layers"
        fields += [(name, f"{digest}\n{use}") for name, digest, use in _digests(image)]
        fields.append(("size", size))
    else:
        fields += [("digest", image.digest), ("file", str(image.path))]
        fields.append(("size", format_bytes(image.file.size)))
    fields.append(("built", ("now" if built.fresh else "nothing changed") + (f" ({times})" if times else "")))
    if not built.published_base:
        fields.append(("note", "the base has newer packages than locked: not the published digest"))
    how = ", emulated" if can_emulate(target.platform) and report is not None else ""
    fields.append(("smoke test", smoke_line(report) + how))
    if report is not None and not report.passed:
        fields.append(("", format_report(report)))
    if target.gpu:
        must = ", ".join(parse_capability(capability).sm for capability in target.capabilities)
        fields.append(("on a GPU", f"{gpu}; it must support {must}: imagefactory verify {target.name}"))
    fields += [
        (
            "try it",
            f"imagefactory run {target.name} -- python"
            if isinstance(image, Image)
            else f"apptainer exec {image.path} python",
        ),
    ]
    return f"{target.name}\n{format_fields(fields)}"


def _digests(image: Image) -> tuple[tuple[str, str, str], ...]:
    """Return each digest of an image with its purpose."""
    return (
        ("digest", image.digest, "for pull, run, verify and job files (index)"),
        ("manifest", image.manifest, "named by verdicts: the layers of this platform"),
        ("config", image.config, "Docker's image ID, the same for any compression"),
    )


# --- Transfers


def format_pushed(pushed: PushResult) -> str:
    """Return the address of a pushed candidate, as the registry confirmed it, and the transferred bytes."""
    reference = pushed.reference
    repository = f"{reference.registry}/{reference.repository}"
    fields = [
        ("candidate", f"{repository}:{reference.tag}"),
        ("digest", f"{reference.digest} (confirmed by the registry)"),
    ]
    fields += [("sent", _transfer_line(pushed.sent)), *_tag_lines(pushed.sent)]
    if pushed.file:
        fields += [("file", pushed.file), ("pull it", f"apptainer pull oras://{repository}:{reference.tag}")]
    else:
        fields.append(("pull it", f"docker pull {repository}@{reference.digest}"))
    if joined := pushed.joined:
        pushed_text = f"{repository}:{joined.reference.tag} ({', '.join(joined.platforms)})"
        fields += [("one index", pushed_text), ("digest", joined.reference.digest), *_tag_lines(joined.sent)]
    return f"{pushed.target.name}\n{format_fields(fields)}"


def format_pushed_sources(pushed: SourcesPush) -> str:
    """Return the address of the locked files in a registry, and who vouches for the Debian packages."""
    reference = pushed.reference
    fields = [
        ("packages", f"{reference.registry}/{reference.repository}:{reference.tag}"),
        ("files", f"{pushed.files} ({format_bytes(pushed.size)})"),
        ("sent", _transfer_line(pushed.sent)),
    ]
    if pushed.base:
        fields.append(("not there", f"the base {pushed.base}: keep a copy in a registry"))
    if pushed.signer:
        fields.append(("signed by", pushed.signer))
    elif pushed.debs:
        fields.append(("not signed", f"{pushed.debs} Debian packages count only while Debian lists them"))
    return format_fields(fields)


def format_pulled_sif(pulled: SifPullResult) -> str:
    fields = [
        ("file", f"{pulled.path} ({format_bytes(pulled.size)})"),
        ("sha256", pulled.sha256.removeprefix("sha256:")),
        ("came", pulled.how),
        ("try it", f"apptainer exec {pulled.path} python"),
    ]
    return f"{pulled.reference}\n{format_fields(fields)}"


def _transfer_line(sent: TransferResult) -> str:
    if sent.sent == sent.mounted == 0:
        return f"nothing: all {sent.present} blobs were there ({sent.seconds:.1f}s)"
    parts = [f"{sent.sent} blobs"]
    parts += [f"{sent.mounted} taken from other repositories"] if sent.mounted else []
    parts += [f"{sent.present} were there"] if sent.present else []
    return f"{format_bytes(sent.bytes_sent)}: {', '.join(parts)} ({sent.seconds:.1f}s)"


def _tag_lines(sent: TransferResult) -> list[tuple[str, str]]:
    """Return lines about other tags, including a tag that another process moved in the meantime."""
    moved = "{} now points to {}: moved by another"
    return [
        ("tag", tag if digest == sent.digest else moved.format(tag, digest or "nothing"))
        for tag, digest in sent.tags
    ]


def format_pulled(pulled: PullResult, store: str) -> str:
    """Return the pulled image, and whether it is the requested index."""
    which = (
        "as it is in the registry" if pulled.whole else f"the {pulled.alone} manifest of an index of several"
    )
    got = pulled.sent
    here = f", {got.present} blobs were here" if got.present else ""
    fields = [
        ("image", f"{pulled.name} in {store}"),
        ("digest", f"{pulled.digest}, {which}"),
        ("received", f"{format_bytes(got.bytes_sent)} in {got.sent} blobs{here} ({got.seconds:.1f}s)"),
    ]
    return f"{pulled.reference}\n{format_fields(fields)}"


def format_copied(copied: CopyResult, *, dry_run: bool = False) -> str:
    after, before = copied.destination.digest, copied.before
    fields = [("digest", after if dry_run else f"{after} (confirmed by the registry)")]
    fields += [("would send" if dry_run else "sent", _transfer_line(copied.sent))]
    if dry_run:
        tag = "stays" if before == after else f"would move from {before}" if before else "would be set"
        fields += [("tag", f"{copied.destination.tag} {tag}")]
    moved = [(name, text) for name, text in _tag_lines(copied.sent) if "moved by another" in text]
    text = f"{copied.source} -> {copied.destination}\n{format_fields(fields + moved)}"
    return "\n".join([text, *(format_copied(other, dry_run=dry_run) for other in copied.sources)])


def format_repositories(shelves: Sequence[RepositoryListing], width: int | None = None) -> str:
    """Return a table of repositories and their tags. Empty repositories are listed."""
    rows = [
        (f"{shelf.repository}:{tag.tag}", tag.kind, format_bytes(tag.size), tag.digest)
        for shelf in shelves
        for tag in shelf.tagged
    ]
    empty = [f"nothing in {shelf.registry}/{shelf.repository}" for shelf in shelves if not shelf.tagged]
    return "\n".join([format_table(("TAG", "TYPE", "SIZE", "DIGEST"), rows, width)] * bool(rows) + empty)


def format_pruned(pruned: PruneResult, *, dry_run: bool) -> str:
    """Return a line for each candidate: removed or kept, and why."""
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb if decision.remove else 'kept'} {pruned.repository}:{decision.candidate.tag} ({decision.why})"
        for decision in pruned.fates
    ]
    return "\n".join(lines or [f"no candidates in {pruned.registry}/{pruned.repository}"])


# --- Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """The lock of a target, its status, why there is none, and its image.

    `promised` is the digest of the image in the layer lock. `behind` are outdated packages in the lock,
    `left_out` the family's packages that are not in the lock.
    """

    lock: Lock | None
    state: str
    why: UnsolvableTarget | None
    image: Image | None
    promised: str = ""
    behind: tuple[OutdatedPackage, ...] = ()
    left_out: str = ""


def format_targets(rows: Sequence[tuple[Target, str, ImageProgress]], width: int | None = None) -> str:
    """Return a row for each target: its platform, the status of its lock, and the progress of its image."""
    header = ("TARGET", "FRAMEWORK", "CUDA", "PYTHON", "BASE", "LOCK", "BUILT", "PUSHED", "STATUS")
    table = [
        (
            target.name,
            f"{target.framework} {target.version}",
            target.cuda,
            target.python,
            target.base,
            state,
            "yes" if marks.built else "-",
            "yes" if marks.pushed else "-",
            f"verified {' '.join(marks.verified)}" if marks.verified else ("-" if target.gpu else CPUS),
        )
        for target, state, marks in rows
    ]
    return format_table(header, table, width, ("BASE", "FRAMEWORK", "PYTHON", "CUDA"))


def format_target(target: Target, now: TargetState, width: int | None = None) -> str:
    """Return all details of one target, for `show`."""
    of = f" of {channel_name(target.channels[0])}" if target.conda and target.source == "pypi" else ""
    fields = [
        ("description", target.description),
        ("framework", f"{target.framework} {target.version}, source {target.source}"),
        ("for", platform_of(target.cuda)),
        ("Python", f"{target.python}{of} on {target.base}, {target.platform}"),
        ("capabilities", ", ".join(target.capabilities) or "none: it is only for CPUs"),
        ("checks", ", ".join(target.checks)),
    ]
    if target.on:
        fields.append(("built on", target.on))
    if target.source == "conda":
        order = "the first that has a package" if target.priority == "strict" else "all alike"
        fields += [
            ("channels", "\n".join(target.channels)),
            ("priority", f"{target.priority}: {order}"),
            ("virtual", "\n".join(f"{name} {value}" for name, value in target.virtual)),
        ]
    fields.append(("requirements", "\n".join(target.requirements)))
    if target.pip:
        fields.append(("from PyPI", "\n".join(target.pip)))
    if target.origins:
        fields.append(("from", "\n".join(f"{name} from {origin}" for name, origin in target.origins)))
    if target.sources:
        fields.append(("to build", "\n".join(target.sources)))
    if target.constraints:
        fields.append(("constraints", "\n".join(target.constraints)))
    if target.environment:
        fields.append(("environment", "\n".join(f"{name}={value}" for name, value in target.environment)))
    fields.append(("recipe", str(target.where)))
    if now.left_out:
        fields.append(("skipped", now.left_out))
    fields += _lock_fields(target, now)
    if now.behind:
        fields.append(("outdated", "\n".join(map(str, now.behind))))
    if now.image is None:
        fields.append(("image", f"not in the store: imagefactory build {target.name}"))
    else:
        size = f"{format_bytes(now.image.size)} in {len(now.image.layers)} layers"
        fields += [("image", f"{now.image.name}, {size}"), ("digest", now.image.digest)]
    if now.promised and (now.image is None or now.image.digest != now.promised):
        fields.append(("layers locked", f"the digest is {now.promised} where they are made as locked"))
    return f"{target.name}\n{format_fields(fields, width=width)}"


def _lock_fields(target: Target, now: TargetState) -> list[tuple[str, str]]:
    lock, again = now.lock, f"imagefactory lock {target.name}"
    if now.why is not None:
        lines = (now.state, now.why.reason, now.why.hint, f"the solver's whole account: {again} --explain")
        fields = [("lock", "\n".join(line for line in lines if line))]
    elif lock is None:
        fields = [("lock", f"{now.state}: {again}{' --build' if target.sources else ''}")]
    else:
        kinds = ((lock.conda, "conda's archives"), (lock.wheels, "wheels"))
        parts = [
            f"{len(packages)} package{'s' if len(packages) > 1 else ''}, "
            f"{format_bytes(sum(package.size for package in packages))} of {kind}"
            for packages, kind in kinds
            if packages
        ]
        fields = [("lock", f"{now.state}, {' and '.join(parts)}, by {lock.solver}")]
    if lock is None:
        return fields
    if lock.cutoff:
        fields.append(("releases until", str(lock.cutoff)))
    if lock.note:
        fields.append(("note", lock.note))
    if lock.publishers:
        fields.append(("publishers", f"of {len(lock.publishers)} wheels; --json lists them"))
    brought = [
        f"{package.name} {package.version}"
        for package in lock.packages
        if package.name.startswith(("nvidia-", "cuda-", "cudatoolkit", "cudnn", "pytorch-cuda"))
    ]
    return [*fields, ("CUDA packages", "\n".join(brought))] if brought else fields


# --- Locks


_MAX_EXCLUDED = 10


def format_relock(relock: LockResult) -> str:
    """Return the changes of a lock, one package on each line, its publishers and the outdated packages.

    Of releases that the cutoff excluded, only the first are listed.
    """
    excluded = [row for row in relock.behind if row.uploaded]
    rows = [*(row for row in relock.behind if not row.uploaded), *excluded[:_MAX_EXCLUDED]]
    publishers = publisher_changes(relock.before, relock.after)
    lines = [_moves(relock), *(f"  ! {change}" for change in publishers)]
    lines += [f"  ! {row}" for row in rows]
    if more := len(excluded) - _MAX_EXCLUDED:
        lines += [f"  ! and {more} more releases that are too new (--json lists them)"] if more > 0 else []
    return "\n".join(lines)


def _moves(relock: LockResult) -> str:
    before, after, name = relock.before, relock.after, relock.target.name
    if before is after or before == after:
        return f"{name}: unchanged ({len(after.packages)} packages)"
    old = {} if before is None else _by_name(before)
    new = _by_name(after)
    total = format_bytes(sum(package.size for package in after.packages))
    if before is None:
        return f"{name}: locked {len(new)} packages, {total}"
    lines = [f"{name}: {len(new)} packages, {total}"]
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if was is None and now is not None:
            lines.append(f"  + {key[0]} {now.version}{_source(now)}")
        elif now is None and was is not None:
            lines.append(f"  - {key[0]} {was.version}{_source(was)}")
        elif was is not None and now is not None and was.sha256 != now.sha256:
            lines.append(f"  ~ {key[0]} {_changes(was, now)}")
    if len(lines) == 1:
        same = before.content_hash == after.content_hash
        lines.append(f"  the same packages{'' if same else ' for a changed recipe'}")
    if before.note != after.note:
        lines.append(f"  note: {after.note or 'none any more'}")
    return "\n".join(lines)


def _by_name(lock: Lock) -> dict[tuple[str, bool], LockedPackage]:
    """Return packages by name and type, since a package may change from conda to PyPI."""
    return {(package.name, isinstance(package, LockedCondaPackage)): package for package in lock.packages}


def _source(package: LockedPackage) -> str:
    return f" ({package.build})" if isinstance(package, LockedCondaPackage) else ""


def _changes(was: LockedPackage, now: LockedPackage) -> str:
    if was.version != now.version:
        return f"{was.version} -> {now.version}"
    if isinstance(was, LockedCondaPackage) and isinstance(now, LockedCondaPackage) and was.build != now.build:
        return f"{now.version}, {was.build} -> {now.build}"
    return f"{now.version}, new file"
