"""Where jobs run: this machine, servers over ssh, and SLURM."""
