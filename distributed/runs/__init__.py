"""Runs: their directories, how to find, watch and stop them."""
