"""Registries mended: they list again what was attached to them from here, or is known here."""

from __future__ import annotations

from datetime import datetime

from imagefactory.access import open_registry, registry_place, repository_of
from imagefactory.project import Factory
from imagefactory.oci.graph import Place
from imagefactory.progress import Progress
from imagefactory.trust.attached import Journal
from imagefactory.verdicts.reconcile import Reconciled, known_statements, reconcile


def reconcile_all(
    factory: Factory, registry: str, now: datetime, progress: Progress
) -> tuple[Reconciled, ...]:
    """Lets every repository of a registry list what was attached to it from here, or is known here.

    Those of the families, and those of that host that the journal knows. Raises RegistryError.
    """
    host, path = registry_place(factory, registry)
    journal, store = Journal(factory.layout.path), open_registry(factory, host)
    repositories = {repository_of(path, target.family) for target in factory.targets}
    repositories |= {repository for known, repository in journal.places() if known == host}
    with factory.layout.in_use(progress), journal.alone(progress):
        local = known_statements(factory.layout)
        done = []
        for repository in sorted(repositories):
            with progress.stage(f"reconcile {host}/{repository}"):
                done.append(reconcile(Place(store=store, repository=repository), journal, local, now))
    return tuple(done)
