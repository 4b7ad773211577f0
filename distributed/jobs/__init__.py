"""Lists of jobs on the GPUs of several servers."""
