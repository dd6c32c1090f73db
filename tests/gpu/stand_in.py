"""The command line on a machine whose GPU is the tests' stand-in: LIBCUDA COMMAND ... Only to rehearse with.

What it verifies is worth nothing: the name of its GPU says so, and its keys are thrown away. The program
itself takes no stand-in (tests/engines/test_gpu_verify.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from imagefactory.actions.verify import VerifyDependencies  # noqa: E402
from imagefactory.cli import main, verify  # noqa: E402
from imagefactory.oci.layout import Layout  # noqa: E402
from imagefactory.runtime.devices import GpuDevices  # noqa: E402
from imagefactory.runtime.unshare import UnshareRunner  # noqa: E402
from imagefactory.verify.evidence import LocalEvidence  # noqa: E402
from tests.services import libcuda  # noqa: E402
from tests.services.gpu_host import Told, make_host  # noqa: E402


def dependencies(library: Path) -> VerifyDependencies:
    told = Told(uuid=libcuda.UUID, name=libcuda.NAME, memory=libcuda.MEMORY)
    places = make_host(library.with_name(f"host-{os.getpid()}"), told)
    devices = GpuDevices(devices=(), libraries=(str(library),), links=(), programs=(), driver=told.driver)
    layout = Layout(Path(os.environ["IMAGEFACTORY_STORE"]))
    return VerifyDependencies(
        evidence=LocalEvidence(places=places), runner=UnshareRunner(layout, find=lambda: devices)
    )


if __name__ == "__main__":
    stand_in = Path(sys.argv.pop(1))
    verify.verify_dependencies = lambda: dependencies(stand_in)
    main()
