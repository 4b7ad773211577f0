"""torchrun's agent, with ranks forked from a warm process and heartbeats between the nodes of a run."""
