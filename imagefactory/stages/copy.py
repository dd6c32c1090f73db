"""From registry to registry; nothing lies on this machine in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.access import Access, open_registry
from imagefactory.errors import UsageError
from imagefactory.oci.candidates import CANDIDATE, pushed_record
from imagefactory.oci.graph import Place, read_graph
from imagefactory.oci.mirrors import resolve
from imagefactory.oci.store import Reference
from imagefactory.oci.transfer import Brake, Sending, Sent, no_origins, send
from imagefactory.progress import Progress
from imagefactory.settings.load import read_ledger_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """What to copy where, and when. With `referrers`, verdicts and other artifacts of the image come too."""

    now: datetime
    source: Reference
    destination: Reference
    referrers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedImage:
    """One copy; `destination` has the digest that its registry confirmed."""

    source: Reference
    destination: Reference
    sent: Sent


def copy_image(access: Access, copying: Copying, progress: Progress) -> CopiedImage:
    """From registry to registry; blobs stream through, within one registry they are mounted."""
    source, destination = copying.source, copying.destination
    if not destination.tag or destination.digest:
        raise UsageError(
            "reference-invalid",
            f"the destination '{destination}' must have a tag, and no digest",
            hint="use HOST/NAME:TAG; the digest is copied with the image",
        )
    asked = resolve(source, access.settings.mirror_map)
    with progress.stage(f"copy {asked} to {destination}"):
        brake = Brake()
        registry = open_registry(access, asked.registry, brake)
        place = Place(store=registry, repository=asked.repository)
        same = asked.registry == destination.registry
        graph = read_graph(place, asked.wanted, referrers=copying.referrers)
        immutable = CANDIDATE.fullmatch(destination.tag) is not None
        record = pushed_record(graph.root.descriptor, copying.now, key=read_ledger_key(access.environ))
        sending = Sending(
            graph=graph,
            repository=destination.repository,
            candidate=destination.tag if immutable else "",
            tags=() if immutable else (destination.tag,),
            # A candidate's age counts from when it came to this registry.
            attach=(record,) if immutable else (),
            origins=(lambda _: (asked.repository,)) if same else no_origins,
            brake=brake,
        )
        target = registry if same else open_registry(access, destination.registry, brake)
        sent = send(place, target, sending, progress)
    return CopiedImage(source=source, destination=replace(destination, digest=sent.digest), sent=sent)
