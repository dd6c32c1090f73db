"""What travels with a sweep: programs of the standard library alone, for the job and for DAGMan."""
