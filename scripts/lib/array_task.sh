#!/bin/sh
#
# The batch script of a SLURM array that runs a job list: each array element runs one attempt of a job.
#
# Usage: array_task.sh KIT PYTHON ARRAY
#
# KIT is Muster's directory, PYTHON the Python of the dispatcher, ARRAY the directory with the attempts of the array.
# SLURM runs a copy of this file in another directory, so all paths are arguments.
exec "$2" -I -S "$1/scripts/lib/module.py" jobs.array_task "$3"
