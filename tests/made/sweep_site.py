"""A factory with an image and a trusted key, a registry, and a pool of two GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagefactory.actions.collect import SweepResult, collect_sweep
from imagefactory.actions.sweep import (
    SweepCreated,
    SweepDependencies,
    SweepDraft,
    SweepOptions,
    make_sweep,
    prepare_sweep,
    submit_sweep,
)
from imagefactory.actions.verify import CollectOptions
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import SifArtifact
from imagefactory.oci.sif import SifOrigin, store_sif
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.schedulers.pool import Pool
from imagefactory.settings.choices import HTCONDOR
from tests.made.factory import NAME
from tests.made.registry import RegistryMadeHere
from tests.made.sweep import PoolMadeHere

V100, A100 = (f"{NAME.replace('.', '_')}-sm{number}" for number in (70, 80))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    factory: Project
    target: Target
    registry: RegistryMadeHere
    pool: PoolMadeHere
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def opens(self, name: str) -> Pool:
        assert name == HTCONDOR
        return self.pool

    @property
    def bench(self) -> SweepDependencies:
        """Nothing is waited for."""
        return SweepDependencies(
            clock=self.clock, random=os.urandom, pools=self.opens, queue=False, pause=lambda _: None
        )

    def prepares(self, **changes: Any) -> SweepDraft:
        options = SweepOptions(**{"level": "quick", "registry": self.registry.host, **changes})
        return prepare_sweep(self.factory, (self.target,), self.pool.gpus, options, self.bench)

    def makes(self, **changes: Any) -> SweepCreated:
        prepared = self.prepares(**changes)
        made = make_sweep(self.factory, prepared, self.bench, QuietProgress())
        submit_sweep(made.folder, self.opens)
        return made

    def collects(self, folder: Path, **options: Any) -> SweepResult:
        return collect_sweep(self.factory, folder, CollectOptions(**options), self.clock(), QuietProgress())


def failed(name: str, outcome: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": "failed",
        "detail": "no",
        "outcome": outcome,
        "seconds": 0.1,
        "numbers": {},
    }


def kept_sif(site: Site) -> SifArtifact:
    """What the store has beside the image of the site's target."""
    image = site.factory.layout.image(reference(site.target))
    assert image is not None
    found = site.factory.layout.manifest(image.manifest)
    assert found is not None
    path = site.factory.layout.tmp / "made.sif"
    path.write_bytes(b"a file that is no .sif")
    return store_sif(site.factory.layout, path, SifOrigin(target=NAME, compression="fast", subject=found[0]))
