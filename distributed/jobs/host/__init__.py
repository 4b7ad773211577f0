"""What runs on a server of a job list, with the standard library alone, for a dispatcher that is connected to it."""
