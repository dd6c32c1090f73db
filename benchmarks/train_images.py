"""A training as benchmarks/stalls.py runs it inside an image: ResNet-50 in mixed precision, on files.

train_images.py FOLDER WORKERS decode       JPEG files of ImageNet's size, decoded and cropped
train_images.py FOLDER WORKERS read SHARE   decoded ones, of which SHARE of 100 are in the page cache
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torchvision import transforms

IMAGES, BATCH, STEPS = 512, 64, 32
SHAPE = (3, 224, 224)


def make(folder: Path) -> None:
    """Files of smooth noise, each of both kinds."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for number in range(IMAGES):
        small = torch.randint(0, 255, (94, 125, 3), dtype=torch.uint8, generator=generator)
        picture = Image.fromarray(small.numpy()).resize((500, 375), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.jpg", quality=90)
        (folder / f"{number}.raw").write_bytes(torch.rand(SHAPE, generator=generator).numpy().tobytes())


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prepare = transforms.Compose(
            [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        )

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, number: int) -> tuple[Any, int]:
        with Image.open(self.folder / f"{number}.jpg") as picture:
            return self.prepare(picture), number % 2


class Decoded(Pictures):
    """What is not among the cached is put out of the page cache before it is read."""

    def __init__(self, folder: Path, cached: int) -> None:
        super().__init__(folder)
        self.cached = cached

    def __getitem__(self, number: int) -> tuple[Any, int]:
        with (self.folder / f"{number}.raw").open("rb", buffering=0) as file:
            if number % 100 >= self.cached:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.frombuffer(bytearray(file.read()), dtype=torch.float32).view(SHAPE), number % 2


def main(workers: int, data: Pictures) -> None:
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, pin_memory=True, persistent_workers=True
    )
    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    step = 0
    while step < STEPS:
        for images, labels in loader:
            with torch.autocast("cuda"):
                out = model(images.cuda(non_blocking=True))
                loss = torch.nn.functional.cross_entropy(out, labels.cuda(non_blocking=True))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1


if __name__ == "__main__":
    place, count, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if not place.exists():
        make(place)
    main(count, Pictures(place) if kind == "decode" else Decoded(place, int(sys.argv[4])))
