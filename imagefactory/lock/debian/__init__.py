"""The Debian packages of a base: which archive this machine uses, apt as the solver, the file of a lock."""
