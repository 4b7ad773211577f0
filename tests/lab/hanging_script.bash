# shellcheck shell=bash
#
# A script that hangs, for bats files. Sourced, never run.


# Write "my script.py": rank 1 is in an endless loop, and rank 0 waits for it in a collective.
write_hanging_script() {
  cat >"my script.py" <<'END'
import os, threading
at_work = threading.Event()
def show_progress():  # until the ranks are at work: a slow start is not a hang
    while not at_work.wait(0.3):
        print(".", flush=True)
threading.Thread(target=show_progress, daemon=True).start()
import torch
import torch.distributed as dist
def main():
    if os.environ["RANK"] == "1":
        while True: pass
    dist.all_reduce(torch.ones(1))
dist.init_process_group("gloo")
dist.barrier()
print("at work", flush=True)
at_work.set()
main()
END
}
