"""Nothing: the suite imports numpy, and does not use it on several nodes."""
