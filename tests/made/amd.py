"""A machine with AMD's GPUs, as far as its kernel tells of them in files."""

from __future__ import annotations

from pathlib import Path


def make_amd_machine(root: Path, *versions: int, driver: str = "") -> None:
    """A node of the kernel's list for each number, 0 of a CPU; /dev/kfd and one render node stand for all."""
    for number, version in enumerate(versions):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True, exist_ok=True)
        (node / "properties").write_text(
            f"cpu_cores_count {0 if version else 64}\nsimd_count 440\ngfx_target_version {version}\n"
            "vendor_id 4098\ndrm_render_minor 128\n"
        )
    if driver:
        (root / "sys/module/amdgpu").mkdir(parents=True)
        (root / "sys/module/amdgpu/version").write_text(f"{driver}\n")
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    for name in ("kfd", "dri/renderD128"):
        (root / "dev" / name).write_text("")
