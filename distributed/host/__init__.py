"""Facts of this machine, its processes, and the replies of other nodes."""
