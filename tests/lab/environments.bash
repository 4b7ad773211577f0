# shellcheck shell=bash
#
# Python environments for bats files. Sourced, never run.


# Make the environment ./venv, which has all packages of VIRTUAL_ENV except the given ones.
make_environment_without() { # <package...>
  local site name
  site=$(echo "$VIRTUAL_ENV"/lib/python3.*/site-packages)
  mkdir -p venv/bin "venv/lib/$(basename "$(dirname "$site")")/site-packages"
  cp "$VIRTUAL_ENV/pyvenv.cfg" venv
  ln -s "$(readlink -f "$VIRTUAL_ENV/bin/python")" venv/bin/python
  ln -s "$site"/* venv/lib/python3.*/site-packages/
  for name; do
    rm -- venv/lib/python3.*/site-packages/"$name"
  done
}
