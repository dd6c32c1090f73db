"""Print the MAC of a file, by NONCE_KEY, for the run of CI with the id RUN: python3 mac.py FILE

Any job of a run can replace its artifacts, the jobs on GPUs too. They do not see this key.
"""

from __future__ import annotations

import hmac
import os
import sys
from pathlib import Path


def main(path: Path) -> None:
    key, run = os.environ["NONCE_KEY"], os.environ["RUN"]
    if not (key and run):
        sys.exit("NONCE_KEY and RUN must be set: docs/site-ci.md")
    # The entries of a nonce store have MACs by the same key, of JSON: these begin otherwise.
    data = f"{path.name} of {run}\n".encode() + path.read_bytes()
    print(hmac.new(key.encode(), data, "sha256").hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
