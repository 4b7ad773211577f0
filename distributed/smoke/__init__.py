"""Do the ranks compute together, how fast, and who is slow."""
