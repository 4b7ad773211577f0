#!/bin/sh
#
# Write down this process's host and environment, in a new file of the folder $TOLD.
{ uname -n && env -0; } >"$(mktemp "$TOLD/XXXXXX")"
