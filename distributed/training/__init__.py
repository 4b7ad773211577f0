"""What train.py is made of: data, what the ranks agree on, signals, trackers, base models."""
