"""From the store to one file that other programs read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imagefactory.access import Access
from imagefactory.errors import BuildError, UsageError
from imagefactory.model import Target
from imagefactory.oci.model import Sif
from imagefactory.oci.sif import copy_sif
from imagefactory.progress import Progress
from imagefactory.stages.stored import ensure_sif, stored_image, stored_sif


@dataclass(frozen=True, slots=True, kw_only=True)
class SifExport:
    """`compression` is empty for that of the .sif at hand, else `fast`; `output` is None for its own name."""

    compression: str = ""
    output: Path | None = None


def export_sif(access: Access, target: Target, options: SifExport, progress: Progress) -> tuple[Sif, Path]:
    """Writes the target's .sif, of its image or as apptainer built it, beside and renamed; gives where.

    Raises BuildError when there is neither, UsageError for a compression that a built one has not.
    """
    with access.layout.in_use(progress):
        image = stored_image(access, target)
        sif = stored_sif(access, target) if image is None else None
        if image is not None:
            compression = options.compression or "fast"
            sif = ensure_sif(access, image, target.name, progress, compression=compression)
        if sif is None:
            raise BuildError(
                "image-not-built", f"{target.name} is not built", hint=f"imagefactory build {target.name}"
            )
        if options.compression not in ("", sif.compression):
            raise UsageError(
                "compression-fixed",
                f"Apptainer built the .sif of {target.name} with compression '{sif.compression}'",
                hint=f"omit --compression, or run imagefactory build {target.name} --engine assemble",
            )
        output = options.output or Path(sif.name)
        copy_sif(sif, output, progress)
    return sif, output
