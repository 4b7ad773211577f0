"""Muster's Python package: place, launch, watch and checkpoint distributed PyTorch training."""
