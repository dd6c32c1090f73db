"""Programs of a sweep for the job and for DAGMan. They use only the standard library."""
