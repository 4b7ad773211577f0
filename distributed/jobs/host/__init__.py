"""What runs on a server of a job list, for a dispatcher that is connected to it."""
