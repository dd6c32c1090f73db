"""Tables of targets and GPUs, made of what is known and proven of each cell. Pure."""
