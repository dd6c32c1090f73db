"""Results as a person reads them: pure functions from values to text. The command line prints them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imagefactory.locking import Relock
from imagefactory.model import CheckState, Lock, LockedConda, LockedPackage, Report, Target
from imagefactory.oci.model import Image
from imagefactory.oci.transfer import Sent
from imagefactory.progress import format_bytes
from imagefactory.publish import Copied, Pruned, Pulled, PulledSif, Pushed, Shelf
from imagefactory.workflow import Built

if TYPE_CHECKING:
    from imagefactory.lock.files import Unsolvable

MIN_FOLDED = 40
"""A folded column is not narrower: it goes below its row instead."""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns as wide as their widest cell, two blanks between, no blanks at line ends.

    With a `width` the last column is folded to fit, beside the others or, where that is no room, below them.
    """
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        return "\n".join(_columns(row, widths) for row in table)
    *others, _ = widths
    left = sum(others) + 2 * len(others)
    beside = width - left >= MIN_FOLDED
    lines = []
    for row in table:
        text = wrap(row[-1], (width - left) if beside else max(width - 4, MIN_FOLDED))
        first, more = (text[:1] or [""], text[1:]) if beside else ([], text)
        lines.append(_columns([*row[:-1], *first], [*others, 0][: len(others) + len(first)]))
        lines += [" " * (left if beside else 4) + line for line in more]
    return "\n".join(lines)


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at blanks alone; a longer word stays whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def format_fields(fields: Sequence[tuple[str, str]], *, indent: str = "  ") -> str:
    """`name  value` lines; a value's further lines stand under its first."""
    width = max(len(name) for name, _ in fields) + 2
    lines = []
    for name, value in fields:
        first, *more = value.splitlines() or [""]
        lines.append(f"{indent}{name.ljust(width)}{first}".rstrip())
        lines += [f"{indent}{' ' * width}{line}" for line in more]
    return "\n".join(lines)


def format_report(report: Report) -> str:
    """The smoke test's checks, one line each, and what is not proven."""
    mark = {
        CheckState.PASSED: "passed",
        CheckState.FAILED: "FAILED",
        CheckState.NOT_APPLICABLE: "not applicable",
        CheckState.NOT_RUN: "not run",
    }
    width = max(len(check.name) for check in report.checks) if report.checks else 0
    lines = [
        f"{check.name.ljust(width)}  {mark[check.state]:14}  {check.detail}".rstrip()
        for check in report.checks
    ]
    return "\n".join(lines)


def smoke_line(report: Report | None) -> str:
    if report is None:
        return "not run (--no-smoke)"
    if not report.passed:
        return f"FAILED: {report.failure}"
    count = sum(check.state is CheckState.PASSED for check in report.checks)
    kept = ", kept from an earlier run" if report.from_record else ""
    return f"passed inside the image: {count} checks on the CPU{kept}"


def format_built(built: Built, store: str) -> str:
    """What a build made, where it is, and what is not yet proven."""
    image, target, report = built.image, built.target, built.report
    gpu = report.gpu.value if report is not None else "not-tested"
    times = ", ".join(f"{name} {seconds:.1f}s" for name, seconds in built.seconds)
    fields = [("image", f"{image.name} in {store}"), ("digest", image.digest)]
    if isinstance(image, Image):
        size = f"{format_bytes(image.size)} in {len(image.layers)} layers"
        fields += [("manifest", image.manifest), ("size", size)]
    else:
        fields += [("file", str(image.path)), ("size", format_bytes(image.file.size))]
    fields += [
        ("built", ("now" if built.fresh else "nothing changed") + f" ({times})"),
    ]
    if not built.published_base:
        fields.append(("note", "the base has newer packages than locked: not the published digest"))
    fields.append(("smoke test", smoke_line(report)))
    if report is not None and not report.passed:
        fields.append(("", format_report(report)))
    fields += [
        ("on a GPU", f"{gpu}; it must support {_capabilities(target)}: imagefactory verify {target.name}"),
        (
            "try it",
            f"imagefactory run {target.name} -- python"
            if isinstance(image, Image)
            else f"apptainer exec {image.path} python",
        ),
    ]
    return f"{target.name}\n{format_fields(fields)}"


def _capabilities(target: Target) -> str:
    return ", ".join(f"sm_{capability.replace('.', '')}" for capability in target.capabilities)


def format_relock(relock: Relock) -> str:
    """What moved: one line for an unchanged lock, else one line a package."""
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
            lines.append(f"  ~ {key[0]} {_moved(was, now)}")
    if len(lines) == 1:
        same = before.content_hash == after.content_hash
        lines.append(f"  the same packages{'' if same else ' for a changed recipe'}")
    if before.note != after.note:
        lines.append(f"  note: {after.note or 'none any more'}")
    return "\n".join(lines)


def _by_name(lock: Lock) -> dict[tuple[str, bool], LockedPackage]:
    """A package may stand there from conda before and from PyPI after, so the kind is a part of the key."""
    return {(package.name, isinstance(package, LockedConda)): package for package in lock.packages}


def _source(package: LockedPackage) -> str:
    return f" ({package.build})" if isinstance(package, LockedConda) else ""


def _moved(was: LockedPackage, now: LockedPackage) -> str:
    if was.version != now.version:
        return f"{was.version} -> {now.version}"
    if isinstance(was, LockedConda) and isinstance(now, LockedConda) and was.build != now.build:
        return f"{now.version}, {was.build} -> {now.build}"
    return f"{now.version}, new file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """What there is of a target: its lock and the word for that, why it has none, its image."""

    lock: Lock | None
    state: str
    why: Unsolvable | None
    image: Image | None


def format_target(target: Target, now: TargetState) -> str:
    """All about one target, for `show`."""
    fields = [
        ("description", target.description),
        ("framework", f"{target.framework} {target.version}, source {target.source}"),
        ("CUDA", target.cuda),
        ("Python", f"{target.python} on {target.base}, {target.platform}"),
        ("capabilities", ", ".join(target.capabilities)),
        ("checks", ", ".join(target.checks)),
    ]
    if target.on:
        fields.append(("built on", target.on))
    if target.channels:
        order = "the first that has a package" if target.priority == "strict" else "all alike"
        fields += [
            ("channels", "\n".join(target.channels)),
            ("priority", f"{target.priority}: {order}"),
            ("system", "\n".join(f"{name} {value}" for name, value in target.system)),
        ]
    fields.append(("requirements", "\n".join(target.requirements)))
    if target.pip:
        fields.append(("from PyPI", "\n".join(target.pip)))
    if target.constraints:
        fields.append(("constraints", "\n".join(target.constraints)))
    if target.environment:
        fields.append(("environment", "\n".join(f"{name}={value}" for name, value in target.environment)))
    fields += [("recipe", str(target.where)), *_lock_fields(target, now)]
    if now.image is None:
        fields.append(("image", f"not in the store: imagefactory build {target.name}"))
    else:
        size = f"{format_bytes(now.image.size)} in {len(now.image.layers)} layers"
        fields += [("image", f"{now.image.name}, {size}"), ("digest", now.image.digest)]
    return f"{target.name}\n{format_fields(fields)}"


def _lock_fields(target: Target, now: TargetState) -> list[tuple[str, str]]:
    lock, again = now.lock, f"imagefactory lock {target.name}"
    if now.why is not None:
        told = (now.state, now.why.reason, now.why.hint, f"the solver's whole account: {again} --explain")
        fields = [("lock", "\n".join(line for line in told if line))]
    elif lock is None:
        fields = [("lock", f"{now.state}: {again}")]
    else:
        kinds = ((lock.conda, "conda's archives"), (lock.wheels, "wheels"))
        parts = [
            f"{len(packages)} package{'s' if len(packages) > 1 else ''}, "
            f"{format_bytes(sum(one.size for one in packages))} of {kind}"
            for packages, kind in kinds
            if packages
        ]
        fields = [("lock", f"{now.state}, {' and '.join(parts)}, by {lock.solver}")]
    if lock is None:
        return fields
    if lock.note:
        fields.append(("note", lock.note))
    brought = [
        f"{package.name} {package.version}"
        for package in lock.packages
        if package.name.startswith(("nvidia-", "cuda-", "cudatoolkit", "cudnn", "pytorch-cuda"))
    ]
    return [*fields, ("CUDA packages", "\n".join(brought))] if brought else fields


# --- registries ----------------------------------------------------------------------------------


def format_pushed(pushed: Pushed) -> str:
    """Where a candidate is, by the registry's own word, and what it cost."""
    where = pushed.reference
    place = f"{where.registry}/{where.repository}"
    fields = [
        ("candidate", f"{place}:{where.tag}"),
        ("digest", f"{where.digest} (confirmed by the registry)"),
    ]
    if pushed.sent is None:
        fields.append(("sent", "by docker, which compressed it anew"))
    else:
        fields += [("sent", _sent_line(pushed.sent)), *_tag_lines(pushed.sent)]
    if pushed.file:
        fields += [("file", pushed.file), ("pull it", f"apptainer pull oras://{place}:{where.tag}")]
    else:
        fields.append(("pull it", f"docker pull {place}@{where.digest}"))
    return f"{pushed.target.name}\n{format_fields(fields)}"


def format_pulled_sif(pulled: PulledSif) -> str:
    fields = [
        ("file", f"{pulled.path} ({format_bytes(pulled.size)})"),
        ("sha256", pulled.digest.removeprefix("sha256:")),
        ("came", pulled.how),
        ("try it", f"apptainer exec {pulled.path} python"),
    ]
    return f"{pulled.reference}\n{format_fields(fields)}"


def _sent_line(sent: Sent) -> str:
    if sent.sent == sent.mounted == 0:
        return f"nothing: all {sent.present} blobs were there ({sent.seconds:.1f}s)"
    parts = [f"{sent.sent} blobs"]
    parts += [f"{sent.mounted} taken from other repositories"] if sent.mounted else []
    parts += [f"{sent.present} were there"] if sent.present else []
    return f"{format_bytes(sent.bytes_sent)}: {', '.join(parts)} ({sent.seconds:.1f}s)"


def _tag_lines(sent: Sent) -> list[tuple[str, str]]:
    """Further tags, and what became of one that somebody else moved at the same time."""
    moved = "{} now points to {}: moved by another"
    return [
        ("tag", tag if digest == sent.digest else moved.format(tag, digest or "nothing"))
        for tag, digest in sent.tags
    ]


def format_pulled(pulled: Pulled, store: str) -> str:
    """What a pull brought, and whether it is the very index that was asked for."""
    kept = "as it is in the registry" if pulled.whole else "the linux/amd64 manifest of an index of several"
    got = pulled.sent
    here = f", {got.present} blobs were here" if got.present else ""
    fields = [
        ("image", f"{pulled.name} in {store}"),
        ("digest", f"{pulled.digest}, {kept}"),
        ("received", f"{format_bytes(got.bytes_sent)} in {got.sent} blobs{here} ({got.seconds:.1f}s)"),
    ]
    return f"{pulled.reference}\n{format_fields(fields)}"


def format_copied(copied: Copied) -> str:
    fields = [("digest", f"{copied.destination.digest} (confirmed by the registry)")]
    fields += [("sent", _sent_line(copied.sent))]
    moved = [(name, text) for name, text in _tag_lines(copied.sent) if "moved by another" in text]
    return f"{copied.source} -> {copied.destination}\n{format_fields(fields + moved)}"


def format_shelves(shelves: Sequence[Shelf]) -> str:
    """The tags of repositories, one line each; a repository without any is said to be empty."""
    rows = [
        (f"{shelf.repository}:{one.tag}", one.kind, format_bytes(one.size), one.digest)
        for shelf in shelves
        for one in shelf.tagged
    ]
    empty = [f"nothing in {shelf.registry}/{shelf.repository}" for shelf in shelves if not shelf.tagged]
    return "\n".join([format_table(("TAG", "KIND", "SIZE", "DIGEST"), rows)] * bool(rows) + empty)


def format_pruned(pruned: Pruned, *, dry_run: bool) -> str:
    """One line a candidate: gone or kept, and why."""
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb if fate.remove else 'kept'} {pruned.repository}:{fate.candidate.tag} ({fate.why})"
        for fate in pruned.fates
    ]
    return "\n".join(lines or [f"no candidates in {pruned.registry}/{pruned.repository}"])
