"""torchrun's agent with ranks forked from a warm process; the nodes of a run meet and know of each other."""
