"""What train.py is made of: data, what the ranks agree on, trackers, base models."""
