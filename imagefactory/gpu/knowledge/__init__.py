"""What is known about the world, as data with sources: tables that decisions look things up in.

    wheels.py     pypi_cuda, companions, bounds,         CUDA that wheels come with; what goes with them;
                  conda_pypi                             names
    toolkits.py   cuda_drivers, gpu_drivers,            drivers, targets of toolkits, versions of PTX
                  cuda_targets, ptx_isa
    gpu_names.py  gpus                                  GPUs by name
    data_sheets.py data_sheets                          how fast they could be
    amd_gpus.py   amd                                   AMD's, by name and processor; ROCm
    documents.py  documented, releases                  what projects say of their builds
    indexes.py    indexes                               where packages lie that PyPI has not
    scans.py      scanned                               what their wheels were found to hold

The other tables here are read by the modules of the folder above that have their names.

A row is *documented* or measured from a package's own bytes, and names its source; it never says that an
image works. What a table does not hold is not known, which is not the same as false.
"""

from __future__ import annotations

from imagefactory.gpu.knowledge.gpus import (
    DataSheet,
    Gpu,
    amd_gpus,
    capabilities,
    data_sheets,
    find_data_sheet,
    find_gpu,
    gpus,
    known_processors,
    newest_rocm,
    processors,
)
from imagefactory.gpu.knowledge.packages import (
    Bound,
    Companion,
    CudaWheel,
    Documented,
    ElsewhereRow,
    Release,
    ScannedWheel,
    all_documented,
    bounds,
    companion_names,
    companions,
    companions_for,
    cuda_wheels,
    documented,
    elsewhere,
    families,
    known_index,
    last_with,
    newest_cuda,
    offered,
    pypi_names,
    releases,
    scanned,
    scanned_for_amd64,
    scanned_wheels,
)
from imagefactory.gpu.knowledge.toolkits import (
    cuda_drivers,
    cuda_targets,
    gpu_drivers,
    minor_floors,
    native_driver,
    ptx_cuda,
    targets_of,
)

__all__ = [
    "Bound",
    "Companion",
    "CudaWheel",
    "DataSheet",
    "Documented",
    "ElsewhereRow",
    "Gpu",
    "Release",
    "ScannedWheel",
    "all_documented",
    "amd_gpus",
    "bounds",
    "capabilities",
    "companion_names",
    "companions",
    "companions_for",
    "cuda_drivers",
    "cuda_targets",
    "cuda_wheels",
    "data_sheets",
    "documented",
    "elsewhere",
    "families",
    "find_data_sheet",
    "find_gpu",
    "gpu_drivers",
    "gpus",
    "known_index",
    "known_processors",
    "last_with",
    "minor_floors",
    "native_driver",
    "newest_cuda",
    "newest_rocm",
    "offered",
    "processors",
    "ptx_cuda",
    "pypi_names",
    "releases",
    "scanned",
    "scanned_for_amd64",
    "scanned_wheels",
    "targets_of",
]
