# shellcheck shell=bash
#
# Check that a secret from --env-file appears in no command line and in no file of the run. Every user of the machine
# can read command lines.
#
# Sourced by bats files, never run. The secret is in the file "secret", and in no command line of the test itself.
# Use in a test:
#
#   make_secret
#   watch_command_lines
#   LAUNCH --env-file secrets.env --env SEEN=yes ...
#   secret_did_not_leak

make_secret() {
  printf 'k3pt-by-%s' "$RANDOM$RANDOM" >secret
  printf 'SECRET=%s\n' "$(<secret)" >secrets.env
}


# Search all command lines of this machine, in the background, and copy arguments that contain the secret or SEEN=yes to
# "seen". SEEN=yes is no secret, and proves that the search works: the launcher passes it in a command line, so "seen"
# must contain it.
watch_command_lines() {
  printf '%s\nSEEN=yes\n' "$(<secret)" >patterns
  while [ ! -e stop_watching ] && kill -0 "$$"; do
    grep -hasz -f patterns /proc/[0-9]*/cmdline | tr '\0' '\n' >>seen || true
    sleep 0.02
  done 3>&- &
  WATCHER=$!
}


stop_watching() {
  : >stop_watching
  wait "$WATCHER"
}


secret_did_not_leak() {
  stop_watching
  grep -qx 'SEEN=yes' seen
  ! grep -F -f secret seen || return 1
  ! grep -rlF -f secret logs || return 1
}
