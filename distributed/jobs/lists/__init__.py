"""What a job list is: its jobs, its servers and its base models, from files of the user."""
