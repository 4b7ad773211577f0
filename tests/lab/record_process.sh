#!/bin/sh
#
# Write the host name and the environment of this process to a new file in the directory $RECORDS.
{ uname -n && env -0; } >"$(mktemp "$RECORDS/XXXXXX")"
