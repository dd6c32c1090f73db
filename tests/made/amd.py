"""A machine with AMD's GPUs, as far as its kernel tells of them in files."""

from __future__ import annotations

from pathlib import Path

UNIQUE = 0xFAFBFC00
MAJOR, MINOR = 1, 3
"""Of /dev/null: a link to it is a render node that no test needs root for."""


def make_amd_machine(root: Path, *versions: int, driver: str = "") -> None:
    """A node of the kernel's list for each number, 0 of a CPU; /dev/kfd and one render node stand for all."""
    proc, device = root / "proc", root / f"sys/class/drm/renderD{MINOR}/device"
    for folder in (proc, device):
        folder.mkdir(parents=True, exist_ok=True)
    (proc / "devices").write_text(f"Character devices:\n{MAJOR:3} drm\n\nBlock devices:\n  8 drm\n")
    (device / "unique_id").write_text(f"{UNIQUE:016x}\n")
    (device / "product_name").write_text("AMD Instinct MI250X\n")
    for number, version in enumerate(versions):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True, exist_ok=True)
        (node / "properties").write_text(
            f"cpu_cores_count {0 if version else 64}\nsimd_count 440\ngfx_target_version {version}\n"
            f"vendor_id 4098\ndrm_render_minor {MINOR}\nunique_id {UNIQUE if version else 0}\n"
        )
        for bank, (kind, size) in enumerate(((1, 64 << 30), (5, 1 << 12)) if version else ()):
            (node / f"mem_banks/{bank}").mkdir(parents=True, exist_ok=True)
            (node / f"mem_banks/{bank}/properties").write_text(f"heap_type {kind}\nsize_in_bytes {size}\n")
    if driver:
        (root / "sys/module/amdgpu").mkdir(parents=True)
        (root / "sys/module/amdgpu/version").write_text(f"{driver}\n")
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    for name in ("kfd", f"dri/renderD{MINOR}"):
        (root / "dev" / name).unlink(missing_ok=True)
        (root / "dev" / name).symlink_to("/dev/null")
