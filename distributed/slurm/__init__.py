"""SLURM allocations and job steps."""
