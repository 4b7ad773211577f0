"""Lists of independent jobs on the GPUs of several servers."""
