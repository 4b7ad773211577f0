"""What is shown of a job list: the console, the results and their page."""
