"""The CUDA folder that a package is compiled with: NVIDIA's wheels as one toolkit."""

from __future__ import annotations

from pathlib import Path

from imagefactory.extras.wheels.wheel_builder import link_libraries, link_tree


def test_wheels_of_two_places_become_one_folder(tmp_path: Path) -> None:
    contents = {
        "tools/bin/nvcc": "compiler",
        "tools/include/crt/host.h": "crt",
        "tools/include/both.h": "the tools'",
        "image/include/both.h": "the image's",
        "image/include/cublas.h": "cublas",
        "image/lib/libcudart.so.13": "cudart",
        "image/lib/libcublas.so.13.2": "cublas",
        "image/share/doc": "left out",
    }
    for name, text in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    cuda = tmp_path / "cuda"
    for root in ("tools", "image"):
        link_tree(tmp_path / root, cuda)
    link_libraries(cuda / "lib")
    found = {str(path.relative_to(cuda)): path.read_text() for path in cuda.rglob("*") if path.is_file()}
    assert found == {
        "bin/nvcc": "compiler",
        "include/both.h": "the tools'",
        "include/crt/host.h": "crt",
        "include/cublas.h": "cublas",
        "lib/libcudart.so": "cudart",
        "lib/libcudart.so.13": "cudart",
        "lib/libcublas.so": "cublas",
        "lib/libcublas.so.13.2": "cublas",
    }
