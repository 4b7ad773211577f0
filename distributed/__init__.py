"""Muster's Python package: launch, monitor and checkpoint distributed PyTorch training."""
