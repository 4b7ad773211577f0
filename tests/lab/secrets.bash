# shellcheck shell=bash
#
# Is a secret of --env-file in a command line, where every user of a machine can read it, or in a file of the run?
#
# Sourced by bats files, never run. The secret is in the file "secret", and in no command line of the test itself:
#
#   make_secret
#   watch_command_lines
#   LAUNCH --env-file secrets.env --env SEEN=yes ...
#   secret_was_kept

make_secret() {
  printf 'k3pt-by-%s' "$RANDOM$RANDOM" >secret
  printf 'SECRET=%s\n' "$(<secret)" >secrets.env
}


# All command lines of this machine, again and again until secret_was_kept. What --env gives is seen: so is a secret.
watch_command_lines() {
  printf '%s\nSEEN=yes\n' "$(<secret)" >patterns
  while [ ! -e kept ] && kill -0 "$$"; do
    grep -hasz -f patterns /proc/[0-9]*/cmdline | tr '\0' '\n' >>seen || true
    sleep 0.02
  done 3>&- &
  WATCHER=$!
}


secret_was_kept() {
  : >kept
  wait "$WATCHER"
  grep -qx 'SEEN=yes' seen
  ! grep -F -f secret seen || return 1
  ! grep -rlF -f secret logs || return 1
}
