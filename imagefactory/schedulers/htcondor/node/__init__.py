"""Programs of a sweep for the job and for DAGMan, only with the standard library."""
