#!/bin/sh
#
# The batch script of an array of jobs: every element of it runs one attempt of a job list.
#
# Usage: array_task.sh KIT PYTHON ARRAY
#
# SLURM runs a copy of this file from elsewhere, so its arguments say where everything is.
exec "$2" -I -S "$1/scripts/lib/array_task.py" "$3"
