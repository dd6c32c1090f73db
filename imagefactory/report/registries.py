"""What went to registries and came from them, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from imagefactory.oci.transfer import Sent
from imagefactory.progress import format_bytes
from imagefactory.views.text import format_fields, format_table

if TYPE_CHECKING:
    from imagefactory.actions.attest import Attested
    from imagefactory.stages.copy import CopiedImage
    from imagefactory.stages.pull import Pulled, PulledSif
    from imagefactory.actions.transfer import Pushed
    from imagefactory.stages.registry import Pruned, Shelf


def format_pushed(pushed: Pushed) -> str:
    """Where a candidate is, by the registry's own word, and what it cost."""
    where = pushed.reference
    place = f"{where.registry}/{where.repository}"
    fields = [
        ("candidate", f"{place}:{where.tag}"),
        ("digest", f"{where.digest} (confirmed by the registry)"),
    ]
    fields += [("sent", _sent_line(pushed.sent)), *_tag_lines(pushed.sent)]
    if pushed.file:
        fields += [("file", pushed.file), ("pull it", f"apptainer pull oras://{place}:{where.tag}")]
    else:
        fields.append(("pull it", f"docker pull {place}@{where.digest}"))
    if joined := pushed.joined:
        what = f"{place}:{joined.reference.tag} ({', '.join(joined.platforms)})"
        fields += [("one index", what), ("digest", joined.reference.digest), *_tag_lines(joined.sent)]
    return f"{pushed.target.name}\n{format_fields(fields)}"


def format_attested(attested: Attested) -> str:
    fields = [("attached", kind) for kind, _ in attested.artifacts]
    return format_fields([*fields, ("provenance", attested.provenance)])


def format_pulled_sif(pulled: PulledSif) -> str:
    fields = [
        ("file", f"{pulled.path} ({format_bytes(pulled.size)})"),
        ("sha256", pulled.sha256.removeprefix("sha256:")),
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
    kept = (
        "as it is in the registry" if pulled.whole else f"the {pulled.alone} manifest of an index of several"
    )
    got = pulled.sent
    here = f", {got.present} blobs were here" if got.present else ""
    fields = [
        ("image", f"{pulled.name} in {store}"),
        ("digest", f"{pulled.digest}, {kept}"),
        ("received", f"{format_bytes(got.bytes_sent)} in {got.sent} blobs{here} ({got.seconds:.1f}s)"),
    ]
    return f"{pulled.reference}\n{format_fields(fields)}"


def format_copied(copied: CopiedImage) -> str:
    fields = [("digest", f"{copied.destination.digest} (confirmed by the registry)")]
    fields += [("sent", _sent_line(copied.sent))]
    moved = [(name, text) for name, text in _tag_lines(copied.sent) if "moved by another" in text]
    return f"{copied.source} -> {copied.destination}\n{format_fields(fields + moved)}"


def format_shelves(shelves: Sequence[Shelf], width: int | None = None) -> str:
    """The tags of repositories, one line each; a repository without any is said to be empty."""
    rows = [
        (f"{shelf.repository}:{one.tag}", one.kind, format_bytes(one.size), one.digest)
        for shelf in shelves
        for one in shelf.tagged
    ]
    empty = [f"nothing in {shelf.registry}/{shelf.repository}" for shelf in shelves if not shelf.tagged]
    return "\n".join([format_table(("TAG", "KIND", "SIZE", "DIGEST"), rows, width)] * bool(rows) + empty)


def format_pruned(pruned: Pruned, *, dry_run: bool) -> str:
    """One line a candidate: gone or kept, and why."""
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb if fate.remove else 'kept'} {pruned.repository}:{fate.candidate.tag} ({fate.why})"
        for fate in pruned.fates
    ]
    return "\n".join(lines or [f"no candidates in {pruned.registry}/{pruned.repository}"])
