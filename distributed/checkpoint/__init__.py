"""Save, find and load checkpoints."""
