"""How long a report of many images takes, and how large it is. No GPU is behind it: the verdicts are made up.

    read     a signed catalog is opened, each verdict's signature checked, each image judged
    pages    the site is formatted, in memory
    write    it is formatted and its files are written next to their places and renamed, by one process
    workers  the same, by a process for each processor: seconds, not CPU seconds

Sizes are exact and carry over to other machines; of the seconds the ratios do, roughly. The others are CPU
seconds, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.extras.site.action import write_report
from imagefactory.extras.site.pages import make_site
from tests.made.report import catalog_report, many_images, with_contents

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    done = work()
    return done, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--packages", type=int, default=60, help="of each image")
    options = parser.parse_args()
    images = many_images(options.images)
    with tempfile.TemporaryDirectory() as folder:
        report, read = timed(lambda: catalog_report(Path(folder), images))
        whole = with_contents(report, options.packages)
        gc.freeze()  # as the command does
        files, pages = timed(lambda: dict(make_site(whole)))
        number, write = timed(lambda: write_report(Path(folder) / "site", make_site(whole)))
        workers, start = os.cpu_count() or 1, time.monotonic()
        write_report(Path(folder) / "again", make_site(whole), workers=workers)
        parallel = time.monotonic() - start
    cells = len(report.images) * len(report.capabilities)
    verdicts = sum(len(image.history) for image in report.images)
    total = sum(len(text.encode()) for text in files.values())
    print(f"{len(report.images)} images, {cells} cells, {verdicts} verdicts")
    print(f"  first page {len(files['index.html'].encode()) / 1000:9.0f} kB")
    print(f"  style      {len(files['style.css'].encode()) / 1000:9.0f} kB")
    print(f"  site       {total / 1e6:9.1f} MB in {number} files")
    print(f"  read       {read:9.2f} s CPU")
    print(f"  pages      {pages:9.2f} s CPU, {1000 * pages / max(len(images), 1):.1f} ms an image")
    print(f"  write      {write:9.2f} s CPU")
    print(f"  workers    {parallel:9.2f} s, {workers} processes")
    print(f"  write : read {write / read:.2f}")


if __name__ == "__main__":
    main()
