"""Parts of train.py: data, model, collectives, stop signals, progress, trackers, base models."""
