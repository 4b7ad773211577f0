"""What may start: slots of servers, the order of jobs, and the jobs that wait for others."""
