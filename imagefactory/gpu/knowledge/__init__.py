"""Facts about GPUs, drivers and packages, as tables with sources.

    gpus.py       gpus, data_sheets, amd                GPUs by name, their speed, AMD processors and ROCm
    packages.py   pypi_cuda, companions, bounds,        wheels' CUDA, their companions,
                  conda_pypi, documented, releases,     what projects document, other indexes,
                  indexes, scanned, source_builds       scans of wheels, builds from source
    toolkits.py   cuda_drivers, gpu_drivers,            drivers, targets of toolkits, versions of PTX,
                  cuda_targets, ptx_isa, compilers      packages that compile GPU code while they run

Modules in the parent directory read the other tables; each has the name of its table.

Each row is documented, or measured from the bytes of a package, and names its source. No row claims that an
image works. A missing row means unknown, not false.
"""

from __future__ import annotations

from imagefactory.gpu.knowledge.gpus import (
    DataSheet as DataSheet,
)
from imagefactory.gpu.knowledge.gpus import (
    GpuModel as GpuModel,
)
from imagefactory.gpu.knowledge.gpus import (
    all_processors as all_processors,
)
from imagefactory.gpu.knowledge.gpus import (
    amd_gpus as amd_gpus,
)
from imagefactory.gpu.knowledge.gpus import (
    capabilities as capabilities,
)
from imagefactory.gpu.knowledge.gpus import (
    data_sheets as data_sheets,
)
from imagefactory.gpu.knowledge.gpus import (
    find_data_sheet as find_data_sheet,
)
from imagefactory.gpu.knowledge.gpus import (
    find_gpu as find_gpu,
)
from imagefactory.gpu.knowledge.gpus import (
    gpus as gpus,
)
from imagefactory.gpu.knowledge.gpus import (
    newest_rocm as newest_rocm,
)
from imagefactory.gpu.knowledge.gpus import (
    only_host as only_host,
)
from imagefactory.gpu.knowledge.gpus import (
    processors as processors,
)
from imagefactory.gpu.knowledge.packages import (
    WheelScan as WheelScan,
)
from imagefactory.gpu.knowledge.packages import (
    aliases as aliases,
)
from imagefactory.gpu.knowledge.packages import (
    all_documented as all_documented,
)
from imagefactory.gpu.knowledge.packages import (
    bounds as bounds,
)
from imagefactory.gpu.knowledge.packages import (
    companion_names as companion_names,
)
from imagefactory.gpu.knowledge.packages import (
    companions as companions,
)
from imagefactory.gpu.knowledge.packages import (
    companions_for as companions_for,
)
from imagefactory.gpu.knowledge.packages import (
    cuda_wheels as cuda_wheels,
)
from imagefactory.gpu.knowledge.packages import (
    distributions as distributions,
)
from imagefactory.gpu.knowledge.packages import (
    documented as documented,
)
from imagefactory.gpu.knowledge.packages import (
    external_indexes as external_indexes,
)
from imagefactory.gpu.knowledge.packages import (
    families as families,
)
from imagefactory.gpu.knowledge.packages import (
    is_known_index as is_known_index,
)
from imagefactory.gpu.knowledge.packages import (
    known_names as known_names,
)
from imagefactory.gpu.knowledge.packages import (
    last_with as last_with,
)
from imagefactory.gpu.knowledge.packages import (
    newest_cuda as newest_cuda,
)
from imagefactory.gpu.knowledge.packages import (
    newest_patch as newest_patch,
)
from imagefactory.gpu.knowledge.packages import (
    offered as offered,
)
from imagefactory.gpu.knowledge.packages import (
    pypi_names as pypi_names,
)
from imagefactory.gpu.knowledge.packages import (
    releases as releases,
)
from imagefactory.gpu.knowledge.packages import (
    scanned as scanned,
)
from imagefactory.gpu.knowledge.packages import (
    scanned_for as scanned_for,
)
from imagefactory.gpu.knowledge.packages import (
    scanned_release as scanned_release,
)
from imagefactory.gpu.knowledge.packages import (
    scanned_wheels as scanned_wheels,
)
from imagefactory.gpu.knowledge.toolkits import (
    compilers_of as compilers_of,
)
from imagefactory.gpu.knowledge.toolkits import (
    cuda_drivers as cuda_drivers,
)
from imagefactory.gpu.knowledge.toolkits import (
    cuda_targets as cuda_targets,
)
from imagefactory.gpu.knowledge.toolkits import (
    minor_floors as minor_floors,
)
from imagefactory.gpu.knowledge.toolkits import (
    native_driver as native_driver,
)
from imagefactory.gpu.knowledge.toolkits import (
    ptx_cuda as ptx_cuda,
)
from imagefactory.gpu.knowledge.toolkits import (
    targets_of as targets_of,
)
