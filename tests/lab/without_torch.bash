# shellcheck shell=bash
#
# Launches without PyTorch, for tests whose subject is not PyTorch: they take a fifth of the CPU time.
# Sourced by a bats file, never run.


# From now on, the launches of this test, or of this file if setup_file calls this, use an agent that does not import
# PyTorch: tests/lab/agent_without_torch.py. with_torch runs a command with the usual agent.
use_agent_without_torch() {
  export WITH_TORCH=$VIRTUAL_ENV VIRTUAL_ENV=$BATS_FILE_TMPDIR/without_torch
  mkdir -p "$VIRTUAL_ENV/bin"
  cat >"$VIRTUAL_ENV/bin/python" <<END
#!/bin/sh
case "\$1 \$2" in
  *"/scripts/lib/agent.py --plain") ;;
  *"/scripts/lib/agent.py "*) shift && set -- "$KIT/tests/lab/agent_without_torch.py" "\$@" ;;
esac
exec "$WITH_TORCH/bin/python" "\$@"
END
  chmod +x "$VIRTUAL_ENV/bin/python"
}


with_torch() { # <command...>
  VIRTUAL_ENV=$WITH_TORCH "$@"
}


# Write "my script.py", a script that does not import PyTorch.
write_plain_script() { # <body on standard input>
  {
    cat <<'END'
import os, socket, sys, time
rank = int(os.environ["RANK"])
END
    cat
  } >"my script.py"
}


# Write "my script.py", which behaves like train.py: it prints steps, writes a checkpoint when it is asked to stop, exits
# with 75 or its argument, and resumes.
write_plain_trainer() {
  write_plain_script <<'END'
import signal
stop, saved = [], f"saved by {rank}"
for name in ("TERM", "INT", "USR1", "USR2", "XCPU"):
    signal.signal(signal.Signals[f"SIG{name}"], lambda *_: stop.append(True))
step = int(open(saved).read()) if os.path.exists(saved) else 0
if step and rank == 0:
    print(f"resuming from step {step}", flush=True)
while not stop:
    step += 1
    if rank == 0:
        print(f"step {step:>6}/100000", flush=True)
    time.sleep(0.05)
with open(saved, "w") as file:
    file.write(str(step))
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 75)
END
}
