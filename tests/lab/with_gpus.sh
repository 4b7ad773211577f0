#!/usr/bin/env bash
#
# Run a command where NVIDIA's driver seems to list COUNT GPUs: in a mount namespace with stubs of /proc/driver/nvidia
# and of the device files. Needs root.
#
# Usage: with_gpus.sh COUNT COMMAND [ARGUMENT...]
#
set -euo pipefail


add_gpu() { # <number> <directory of device files>
  mkdir -p "/proc/driver/nvidia/gpus/0000:0$1:00.0"
  printf '%s: \t %s\n' Model 'NVIDIA STUB' 'GPU UUID' "GPU-a$1" 'Device Minor' "$1" \
    >"/proc/driver/nvidia/gpus/0000:0$1:00.0/information"
  mknod -m 666 "$2/nvidia$1" c 1 3
}


main() {
  local devices name number
  [[ $1 == --inside ]] || exec unshare --mount --propagation private "$0" --inside "$@"
  mount -t tmpfs none /proc/driver
  devices=$(mktemp -d)
  mount -t tmpfs none "$devices"
  cp -ax /dev/. "$devices"
  for ((number = 0; number < $2; number++)); do
    add_gpu "$number" "$devices"
  done
  for name in pts shm; do
    mount --rbind "/dev/$name" "$devices/$name"
  done
  mount --move "$devices" /dev
  rmdir "$devices"
  exec "${@:3}"
}

main "$@"
