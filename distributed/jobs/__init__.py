"""Many jobs on many GPUs: a list of jobs is run over a list of servers."""
