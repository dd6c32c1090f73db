"""What makes a sandbox, from the inside: a program of its own, started as `python -I -S .../runners/sandbox`.

Only the standard library, and nothing of imagefactory: init.py becomes process 1 of a sandbox. Its files find
each other by relative names, because imagefactory reads some of them too: it asks which processors are known.

Two processes come of it. The *keeper* (keeper.py) stays outside: it holds locks on the layers, passes
signals on, watches the caller and the clock, relays the terminal and removes the scratch folder. The *init*
(init.py) is process 1 inside: it builds the file system (root.py), gives up every privilege, starts the
command and reaps. Where the run has a cgroup, a third one, the *sweeper* (cgroups.py), removes that when the
keeper is gone: it is in none of the namespaces, in which nobody may.
If the caller dies, the keeper ends the init; if the keeper dies, the kernel does; and with the init
dies every process of its pid namespace, however often it forked away.

All mounts from the host are cloned as detached trees first and attached after the old root is gone. From then
on every path is the image's: no function here imports a module, no descriptor of the keeper's is left, limits
are set, and targets (root.py) are walked name by name, before /proc, /dev and /sys are there to be led to.
Needs Linux 5.12 (mount_setattr; overlay in user namespaces came with 5.11, openat2 with 5.6).
"""
