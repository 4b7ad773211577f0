"""Muster's agent: it forks the ranks of a node from a preloaded process, and exchanges heartbeats with other nodes."""
