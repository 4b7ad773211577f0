"""Run commands on other nodes: over ssh, or in a SLURM job."""
