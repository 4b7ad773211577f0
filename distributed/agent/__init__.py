"""torchrun's agent, with ranks forked from a preloaded process and heartbeats between the nodes of a run."""
