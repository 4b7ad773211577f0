# shellcheck shell=bash
#
# An environment with settings that bash, common tools and Python obey, and with variables and functions that have the
# same names as those that Muster's scripts use.
#
# Sourced by bats files, never run:
#
#   write_hostile_environment
#   bash with_hostile_environment LAUNCH --script compare.py ...
#
# Rank 0 prints "differs: []" if it has all variables unchanged. Every rank exits with 7. config/node_env.sh calls an
# exported function, which writes "loaded torch" to the file "modules".

write_hostile_environment() {
  mkdir -p config
  echo 'module torch' >config/node_env.sh
  cat >with_hostile_environment <<'END'
export TMOUT=1 IFS=/ POSIXLY_CORRECT=1 BASH_ENV=/nowhere ENV=/nowhere GLOBIGNORE="*" CDPATH=/ FUNCNEST=200
export EXECIGNORE="/nowhere/*" BASH_COMPAT=42 SECONDS=5000 _POSIX2_VERSION=199209
export LC_ALL=C LANG=xx_XX LC_NUMERIC=de_DE GREP_OPTIONS=-v TAR_OPTIONS=--bogus SQUEUE_FORMAT=x RSYNC_RSH=false
export PYTHONINSPECT=1 PYTHONSTARTUP=/nowhere PYTHONIOENCODING=latin-1 PYTHONSAFEPATH=1 PYTHONDEVMODE=1
export RUN=a NODES=b CODE=c SCRIPT=d MODULE=e PROGRAM=f KIT=g ENVIRONMENT=h mode=i status=j entry=k EVENTS=l PYTHON=m
export CONFIG=n COMMAND=o directory=p REMOVED=q MUSTER_NODE_ENV_FILE=r INVALID=$'\xc3' LAST=s UID
read() { echo "read was replaced"; }
cd() { echo "cd was replaced"; }
mktemp() { echo "mktemp was replaced"; }
module() { echo "loaded $1" >>modules; }
export -f read cd mktemp module
exec env SHELLOPTS=noglob:physical:noclobber:nounset \
  BASHOPTS=nullglob:failglob:dotglob:nocasematch:nocaseglob:xpg_echo:expand_aliases "$@"
END
  bash with_hostile_environment env -0 >given
  cat >compare.py <<'END'
import os, sys
given = dict(entry.split(b"=", 1) for entry in open("given", "rb").read().split(b"\0") if entry)
differs = {name for name, value in given.items() if os.environb.get(name) != value}
print("differs:", sorted(differs - {b"_", b"SHLVL", b"PWD", b"OLDPWD"}))
sys.exit(7)
END
}
