"""The process for spython, started by apptainer_command.py. Only the standard library and spython.

spython runs a program named `singularity` from its process's PATH, with its process's environment, and cannot
stop it. So it gets a process with PATH, environment and group for a single call. This function of spython
returns the exit code: `build` without `stream` drops it, and `build` with it reads one of two pipes, so that
a build with much output on the other one never ends. Arguments: the verb, then apptainer's.

Standard input is a pipe of the parent. It ends when the parent dies, and so does everything here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def end_with_the_parent() -> None:
    """End this process's group when standard input ends. Children get an empty one."""
    parent = os.dup(0)
    with open(os.devnull) as empty:  # noqa: PTH123
        os.dup2(empty.fileno(), 0)

    def wait() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(verb: str, *arguments: str) -> int:
    from spython.main import get_client
    from spython.utils import stream_command

    end_with_the_parent()
    client = get_client()
    client.quiet = False
    command = [*client._init_command(verb), *arguments]
    try:
        for line in stream_command(command, output_type="both"):
            sys.stdout.write(line)
            sys.stdout.flush()
    except BrokenPipeError:
        # The parent has died, perhaps before the thread notices, which an exit would end.
        os.killpg(0, signal.SIGKILL)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
