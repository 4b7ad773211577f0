"""What SLURM has allocated, and job steps."""
