"""The steps of gpu_check.py. Functions import PyTorch where they need it: without it, the other steps still work."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import KIT, Failed, Figure, Machine, Needs, Step
from distributed.host import collectives
from distributed.host.gpus import count_gpus, listed_gpus, query_gpus
from distributed.host.system import read, run_program

GB = 1e9
PAIRS = 2  # measurements of Muster and of its baseline
HELD = 0.8  # share of a GPU's memory that a rank holds before it is killed
STORE_OF_RANK_0 = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it, torchrun may not recover
QUERY_LIMIT = 5.0  # seconds that a hang check waits for nvidia-smi
SMALL = (
    *("data.path=null", "model.n_layer=4", "model.n_head=4", "model.n_embd=256", "model.block_size=256"),
    *("train.batch_size_per_device=8", "model.dropout=0.1", "train.learning_rate=1e-3", "train.evaluate_every=0"),
    *("train.evaluate_windows=16", "logging.sample=0"),
)
TINY = ("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16")  # in a rehearsal

# The start of each script: joins the process group of `ranks` on the device that is the first argument.
JOIN = """
import json, os, sys, time
import torch, torch.distributed as dist
cuda = sys.argv[1] == "cuda"
rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
device = torch.device("cuda", local) if cuda else torch.device("cpu")

def wait():
    if cuda:
        torch.cuda.synchronize()

def join():
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    reduce()

def reduce():
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return total.item()

def write(name, value):
    with open(name + ".part", "w") as file:
        json.dump(value, file)
    os.rename(name + ".part", name)
"""


def script(name: str, text: str) -> str:
    """Write a script that begins with JOIN to the working directory. Returns its path."""
    path = Path(name).absolute()
    path.write_text(JOIN + text)
    return str(path)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run a command. Returns its standard output; raises Failed with the error in its output."""
    result = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if result.returncode:
        raise failure(result.returncode, result.stdout + result.stderr)
    return result.stdout


def failure(code: int, output: str) -> Failed:
    """Describe why a command has failed: by the last exception in its output, or by its last line that is no report."""
    sys.stderr.write(output)
    if missing := re.findall(r"ModuleNotFoundError: No module named '(\w+)", output):
        return Failed(f"{missing[0]} is not installed")
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("report ", "agent: ", "verdict: ", "all output "))]
    errors = [line for line in lines if re.search(r"\w(Error|Exception): ", line)]
    return Failed(f"exit code {code}: {(errors or lines or ['no output'])[-1][:300]}")


def agent(path: str, ranks: int, *arguments: str) -> list[str]:
    """The command that starts a script with Muster's agent alone."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--", path]
    return [sys.executable, str(KIT / "scripts/lib/agent.py"), *options, *arguments]


def launcher(path: str, ranks: int, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that launches a script on this machine."""
    program = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--quiet", "--python", sys.executable]
    return [*program, *options, "--script", path, "-", str(ranks), "--", *arguments]


def loaded(name: str) -> Any:
    return json.loads(Path(name).read_text())


def at_most(what: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(what, value, unit, f"at most {limit:g} {unit}".strip(), value <= limit)


def at_least(what: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(what, value, unit, f"at least {limit:g} {unit}".strip(), value >= limit)


def equal(what: str, value: float | str, expected: float | str) -> Figure:
    return Figure(what, value, "", str(expected), value == expected)


# ---------------------------------------------------------------- the driver and PyTorch


def driver(machine: Machine) -> Iterator[Figure]:
    """How long do the driver and nvidia-smi take to list the GPUs, and do both agree with PyTorch?"""
    start = time.perf_counter()
    counted, _ = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield at_most("time in which a launch counts the GPUs", time.perf_counter() - start, 0.1, "s")
    if machine.device == "cuda":
        start = time.perf_counter()
        run_program(["nvidia-smi", "-L"], 20.0)
        yield Figure("nvidia-smi -L", time.perf_counter() - start, "s")
        start = time.perf_counter()
        found = query_gpus()
        yield at_most("nvidia-smi: all GPUs and their processes", time.perf_counter() - start, QUERY_LIMIT, "s")
        if found.error:
            raise Failed(found.error)
        yield equal("GPUs that the driver lists in /proc, against nvidia-smi", len(listed_gpus()), len(found.devices))
        names = ", ".join(sorted({gpu.name for gpu in found.devices}))
        yield Figure(f"driver of {names}", found.driver)
        yield Figure("compute mode (not changed)", ", ".join(sorted({gpu.compute_mode for gpu in found.devices})))
    import torch

    yield Figure("PyTorch", torch.__version__)
    yield equal("GPUs that PyTorch sees, against those that a launch counts", torch.cuda.device_count(), counted)


# ---------------------------------------------------------------- start-up

STARTUP = """
join()
if rank == 0:
    write("first", time.time())
dist.destroy_process_group()
"""


def startup(machine: Machine) -> Iterator[Figure]:
    """How long does a launch take to the first all-reduce on all GPUs, against torchrun under the same launcher?"""
    path = script("startup.py", STARTUP)
    run(launcher(path, machine.gpus, machine.device))  # reads the files once
    for pair in range(PAIRS):
        seconds = {}
        for side in ("fast", "torchrun") if pair % 2 else ("torchrun", "fast"):
            start = time.time()
            run(launcher(path, machine.gpus, machine.device, options=["--agent", side]))
            seconds[side] = loaded("first") - start
        yield Figure(f"command to first all-reduce, {machine.gpus} ranks: Muster", seconds["fast"], "s")
        yield Figure("the same with --agent torchrun", seconds["torchrun"], "s")
        yield at_most("ratio of Muster to torchrun", seconds["fast"] / seconds["torchrun"], 1.0)


# ---------------------------------------------------------------- the fork

FORK = """
def facts(pid):
    links = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            pass
    with open(f"/proc/{pid}/maps") as maps:
        links += [line.split(maxsplit=5)[-1] for line in maps]
    used = {link.strip() for link in links if link.startswith(("/dev/nvidia", "/dev/dxg"))}
    return {"threads": len(os.listdir(f"/proc/{pid}/task")), "files": len(used)}

agent = os.getppid()
with open(f"/proc/{agent}/task/{agent}/children") as file:
    server = next(pid for pid in map(int, file.read().split()) if os.getsid(pid) != pid)
found = {"agent": facts(agent), "server": facts(server), "rank": facts("self")}
join()
found["later"] = facts("self")
if rank == 0:
    write("fork", found)
dist.destroy_process_group()
"""


def fork(machine: Machine) -> Iterator[Figure]:
    """Has the process that forks the ranks one thread, and no part of CUDA?"""
    run(agent(script("fork.py", FORK), machine.gpus, machine.device))
    found = loaded("fork")
    yield equal("threads of the process that forks the ranks", found["server"]["threads"], 1)
    for name, who in (("server", "this process"), ("agent", "the agent"), ("rank", "a rank at its start")):
        yield equal(f"files of the driver that are open in {who}", found[name]["files"], 0)
    if machine.device == "cuda":
        yield at_least("the same in a rank that uses its GPU (control)", found["later"]["files"], 1)


def cpu_run(machine: Machine) -> Iterator[Figure]:
    """Does train.py on the CPU of a machine with GPUs leave them alone, also when it saves a checkpoint?"""
    import threading

    import torch

    import train
    from distributed.torch import process_group
    from distributed.training.settings import batch, read

    os.environ["MUSTER_OUTPUT_DIR"] = os.getcwd()
    with process_group(name="cpu") as world:
        overrides = [*SMALL, *TINY, "train.steps=2", "checkpoint.every=1", "distributed.device=cpu"]
        settings = read(None, overrides)
        train.train(settings, {}, world, batch(settings, world.size), threading.Event())
    yield equal("CUDA is initialized in a run with device=cpu", str(torch.cuda.is_initialized()), "False")
    if machine.device == "cuda":
        own = [process for gpu in query_gpus().devices for process in gpu.processes if process.pid == os.getpid()]
        yield equal("GPUs that list this run among their processes", len(own), 0)


# ---------------------------------------------------------------- collectives


def smoke(machine: Machine) -> Iterator[Figure]:
    """Does the smoke test pass on all GPUs, and how fast is an all-reduce?"""
    program = [str(KIT / "scripts/test_distributed.sh"), "--json", "--seconds", "5", "--python", sys.executable]
    largest = "1G" if machine.device == "cuda" else "64K"
    found = json.loads(run([*program, "--max-bytes", largest, str(machine.gpus)]))
    backend = "nccl" if machine.device == "cuda" else "gloo"
    yield equal("backend of the smoke test", found["world"]["backend"], backend)
    faults = [one["name"] for one in found["checks"] if one["status"] == "fault"]
    yield equal("checks of the smoke test that have failed", ", ".join(faults) or "none", "none")
    if machine.gpus > 1:
        speeds = [one["bus_gb_per_second"] for one in found["bandwidth"] if one["collective"] == "all_reduce"]
        yield Figure("largest bus bandwidth of an all-reduce", max(speeds), "GB/s")


# ---------------------------------------------------------------- waiting and hanging

WAIT = """
import subprocess, threading
join()
dist.barrier()
if rank == size - 1:
    time.sleep(6)
    reduce()
else:
    use = []
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    ask = lambda: use.append(subprocess.run(query, capture_output=True, text=True).stdout.splitlines())
    thread = threading.Timer(2.5, ask) if cuda and rank == 0 else threading.Timer(0, lambda: None)
    thread.start()
    total = torch.ones(1, device=device)
    start, cores = time.perf_counter(), time.process_time()
    dist.all_reduce(total)
    wait()
    seconds, cores = time.perf_counter() - start, time.process_time() - cores
    thread.join()
    if rank == 0:
        write("wait", {"cores": cores / seconds, "seconds": seconds, "use": use})
dist.destroy_process_group()
"""


def waiting(machine: Machine) -> Iterator[Figure]:
    """How much CPU time does a rank use that waits in a collective, and what does nvidia-smi report meanwhile?"""
    run(agent(script("wait.py", WAIT), 2, machine.device))
    found = loaded("wait")
    yield at_least("time that rank 0 has waited for rank 1", found["seconds"], 4, "s")
    yield Figure("CPU use of the waiting rank", found["cores"], "cores")
    # Without CUDA_VISIBLE_DEVICES, rank i uses GPU i of nvidia-smi.
    if machine.device == "cuda" and "CUDA_VISIBLE_DEVICES" not in os.environ and len(found["use"]) == 1:
        waits, sleeps = found["use"][0][:2]
        if not (waits + sleeps).isdecimal():
            raise Needs("GPUs whose use nvidia-smi reports")
        yield at_least("use of the GPU of the waiting rank, as nvidia-smi reports it", int(waits), 50, "%")
        yield at_most("use of the GPU of the rank that sleeps", int(sleeps), 5, "%")


HANG = """
join()
for _ in range(3):
    reduce()
write(f"ready{rank}", os.environ["MUSTER_RUN_DIR"])
if size == 1 or rank < size - 1:
    total = torch.ones(1, device=device)
    if size > 1:
        dist.all_reduce(total)
    wait()
time.sleep(600)
"""


def hang(machine: Machine) -> Iterator[Figure]:
    """Do ranks under NCCL write the flight recorder's record on request, and does it name the rank behind a hang?"""
    command = launcher(script("hang.py", HANG), machine.gpus, machine.device)
    with open("launch", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        names = [f"ready{rank}" for rank in range(machine.gpus)]
        while not all(map(os.path.exists, names)):
            if process.poll() is not None:
                raise failure(process.returncode, read(Path("launch")))
            time.sleep(0.05)
        time.sleep(1)  # the ranks enter the collective
        nodes = list(Path(loaded("ready0"), "ranks").iterdir())
        start = time.perf_counter()
        with ThreadPoolExecutor(machine.gpus) as threads:
            replies = threads.map(lambda rank: collectives.query(str(nodes[0]), rank), range(machine.gpus))
            records = dict(enumerate(replies))
        seconds = time.perf_counter() - start
        yield equal("ranks that write a record on request", sum(map(bool, records.values())), machine.gpus)
        yield at_most("time until all have written it", seconds, collectives.DUMP_TIMEOUT, "s")
        called = max((one.called for groups in records.values() for one in groups), default=0)
        yield at_least("collectives in the record", called, 4)
        if machine.gpus > 1:
            found = collectives.find_mismatch(records)
            missing = ", ".join(map(str, found.missing)) if found else "none"
            yield equal("rank named as the one that has not called a collective", missing, str(machine.gpus - 1))
    finally:
        process.kill()
    if machine.gpus == 1:
        raise Needs("2 GPUs to name the rank behind a hang")


# ---------------------------------------------------------------- restart

RESTART = f"""
import signal
from torch.utils.data import DataLoader
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
started = time.time()
free, total = torch.cuda.mem_get_info(device) if cuda else (1, 1)
held = torch.empty(int({HELD} * total) if cuda else 10**8, dtype=torch.uint8, device=device)
batches = iter(DataLoader(range(1000), num_workers=2, persistent_workers=True))
next(batches)
join()
write(f"attempt{{attempt}}_{{rank}}", {{"started": started, "free": free / total, "joined": time.time()}})
dist.barrier()
if attempt == 0 and rank == size - 1:
    write("killed", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
while attempt == 0:
    reduce()
"""


def restart(machine: Machine) -> Iterator[Figure]:
    """How long does a restart take with CUDA contexts, and is the memory of the killed ranks free by then?"""
    path = script("restart.py", RESTART)
    totals = {}
    for side in ("fast", "torchrun"):
        options = ["--agent", side, "--max-restarts", "1"]
        try:
            run(launcher(path, machine.gpus, machine.device, options=options), STORE_OF_RANK_0)
        except Failed as error:
            raise Failed(f"--agent {side}: {error}") from None
        first, second = ([loaded(f"attempt{n}_{rank}") for rank in range(machine.gpus)] for n in (0, 1))
        who, killed = ("Muster" if side == "fast" else "--agent torchrun"), loaded("killed")
        totals[side] = max(one["joined"] for one in second) - killed
        if side == "fast":
            yield Figure("SIGKILL to the start of the script", max(one["started"] for one in second) - killed, "s")
            kept = min(new["free"] - old["free"] for old, new in zip(first, second, strict=True))
            what = f"GPU memory not free again, of {HELD:.0%} held with loader workers"
            yield at_most(what, max(0.0, -100 * kept), 1, "%")
        yield Figure(f"SIGKILL to the next all-reduce: {who}", totals[side], "s")
    yield at_most("ratio of Muster to torchrun", totals["fast"] / totals["torchrun"], 1.0)


# ---------------------------------------------------------------- equal results


def train_py(machine: Machine, name: str, *overrides: str) -> dict[str, Any]:
    """Train on all GPUs in the checkpoint directory `name`. Returns the tensors of its last checkpoint, by key path."""
    import torch

    small = (*SMALL, *TINY) if machine.device == "cpu" else SMALL
    arguments = [*small, "train.steps=40", "checkpoint.every=20", f"checkpoint.dir={name}", *overrides]
    run(
        agent(str(KIT / "train.py"), machine.gpus, *arguments, f"distributed.device={machine.device}"),
        {"MUSTER_OUTPUT_DIR": os.path.abspath(f"{name}_run")},
    )
    path = max(Path(name).glob("step_*")) / "state.pt"
    return dict(tensors(torch.load(path, map_location="cpu", weights_only=True)["model"]))


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested dicts, with their key paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}")
    else:
        yield path, value


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    """The number of tensors that are not equal, bit for bit."""
    if first.keys() != second.keys() or not first:
        raise Failed("the checkpoints have different tensors")
    return sum(not first[name].equal(second[name]) for name in first)


def equal_bits(machine: Machine) -> Iterator[Figure]:
    """Are results equal, bit for bit, with train.deterministic, and after a resume? Does fp16 learn the same?"""
    on = "train.deterministic=true"
    with ThreadPoolExecutor(3 if machine.gpus == 1 else 1) as threads:
        runs = [threads.submit(train_py, machine, name, on) for name in ("first", "second")]
        plain = [threads.submit(train_py, machine, name) for name in ("plain", "again")]
        first, second = (each.result() for each in runs)
        yield equal("tensors that differ between two runs with train.deterministic", differing(first, second), 0)
        shutil.copytree("second/step_00000020", "resumed/step_00000020")
        resumed = threads.submit(train_py, machine, "resumed", on)
        half = threads.submit(train_py, machine, "fp16", "train.precision=fp16")
        last = resumed.result()
        yield equal("tensors that differ after a resume from the middle", differing(first, last), 0)
        yield equal("step from which this run has resumed", event("resumed", "event", "resume")["step"], 20)
        yield Figure("the same between two runs without it", differing(*(each.result() for each in plain)))
        half.result()
    losses = {name: event(name, "held_out_loss")["held_out_loss"] for name in ("first", "fp16")}
    difference = abs(losses["fp16"] / losses["first"] - 1)
    yield at_most(
        "difference of held-out losses, fp16 and default precision", 100 * difference, 5, "%"
    )  # the scaler skips some steps


def event(name: str, key: str, value: str = "") -> dict[str, Any]:
    """The first line of a run's metrics that has this key, with this value if one is given."""
    lines = map(json.loads, read(Path(f"{name}_run/metrics.jsonl")).splitlines())
    return next(line for line in lines if key in line and value in ("", line[key]))


# ---------------------------------------------------------------- memory


def checkpoint(machine: Machine) -> Iterator[Figure]:
    """How long does a save stop the training, against torch.save, and how much memory does its copy take?"""
    import torch

    from distributed.checkpoint.checkpoints import Checkpoints
    from distributed.checkpoint.snapshot import Snapshot, page_locked

    size = (12, 15_000_000) if machine.device == "cuda" else (3, 300_000)  # on a GPU half of GPT-2 124M
    state = {str(number): torch.randn(size[1], device=machine.device) for number in range(size[0])}
    total = sum(tensor.nbytes for tensor in state.values())
    if machine.device == "cuda":
        yield equal("the copy is in page-locked memory", str(page_locked(state["0"]).is_pinned()), "True")
        before = resident()
        snapshot = Snapshot()
        snapshot.take(state)
        yield at_most(f"memory of the copy, relative to the state ({total / GB:.1f} GB)",
                      (resident() - before) / total, 1.05)  # fmt: skip
        del snapshot
    saves, baseline = [], []
    with Checkpoints(Path("checkpoints"), keep=1) as checkpoints:
        checkpoints.save(0, state)  # allocates the memory of the copy
        for step in range(1, 4):
            checkpoints.wait()
            if machine.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            checkpoints.save(step, state)
            saves.append(time.perf_counter() - start)
            checkpoints.wait()
            start = time.perf_counter()
            torch.save(state, "plain.pt")
            baseline.append(time.perf_counter() - start)
    yield Figure("time that a save stops the training", statistics.median(saves), "s")
    ratio = statistics.median(own / other for own, other in zip(saves, baseline, strict=True))
    yield at_most("the same, relative to torch.save", ratio, 0.1)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(read(Path("/proc/self/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")


FSDP = f"""
import gc
sys.path.insert(0, {str(KIT)!r})
from distributed.torch import gradient_sync, process_group, wrap
from distributed.training.model import GPT
from distributed.training.settings import Model

with process_group(name=sys.argv[1]) as world:
    sizes = dict(n_layer=8, n_head=8, n_embd=1024) if cuda else dict(n_layer=2, n_head=2, n_embd=16)
    found = {{}}
    for reduce_once in (False, True):
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        gpt = GPT(Model(block_size=64, **sizes), 256).to(device)
        found["parameters"] = sum(parameter.numel() for parameter in gpt.parameters())
        model = wrap(gpt, "fsdp", world, dtype=torch.bfloat16)
        tokens = torch.zeros(1, 64, dtype=torch.long, device=device)
        for micro in range(4):
            with gradient_sync(model, on=micro == 3 or not reduce_once):
                model(tokens, tokens).mean().backward()
        found[str(reduce_once)] = torch.cuda.max_memory_allocated() - before if cuda else 0
        del gpt, model
        gc.collect()  # a sharded module is part of cycles
    if rank == 0:
        write("fsdp", found)
"""


def fsdp(machine: Machine) -> Iterator[Figure]:
    """How much memory do unsharded gradients take, which fsdp keeps only with distributed.reduce_once?"""
    run(agent(script("fsdp.py", FSDP), machine.gpus, machine.device))
    found = loaded("fsdp")
    yield Figure("fsdp, 4 micro-batches: peak memory of a GPU", found["False"] / GB, "GB")
    yield Figure("the same with distributed.reduce_once", found["True"] / GB, "GB")
    gradients = 4 * found["parameters"] * (1 - 1 / machine.gpus)
    saved = (found["True"] - found["False"]) / gradients
    yield at_least("memory saved, relative to gradients of other ranks' shards", saved, 0.5)


# ---------------------------------------------------------------- speed

# nanoGPT's model and loop (github.com/karpathy/nanoGPT, model.py and train.py) with its settings for GPT-2 124M, one
# micro-batch per step; the tokens are random, as they do not change the speed.
PLAIN = """
import json, sys, time
import torch
import torch.nn.functional as F
from torch import nn

cuda = sys.argv[1] == "cuda"
device = torch.device("cuda" if cuda else "cpu")
layers, heads, width, block, batch, vocabulary, steps = map(int, sys.argv[2:])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(batch, block, heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, block, width)
        x = x + self.c_proj(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x, y):
        x = self.wte(x) + self.wpe(torch.arange(block, device=device))
        for each in self.h:
            x = each(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).view(-1, vocabulary), y.view(-1))

def next_batch():
    start = torch.randint(len(data) - block, (batch,))
    x, y = (torch.stack([data[i + shift : i + shift + block] for i in start]) for shift in (0, 1))
    return [part.pin_memory().to(device, non_blocking=True) if cuda else part for part in (x, y)]

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
data = torch.randint(256, (10**6,))
model = GPT().to(device)
groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == decay], "weight_decay": 0.1 * decay}
          for decay in (True, False)]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
step_model = torch.compile(model) if cuda else model
x, y = next_batch()
for step in range(2 * steps):
    if step == steps:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16):
        loss = step_model(x, y)
    x, y = next_batch()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 9:
        loss.item()
if cuda:
    torch.cuda.synchronize()
print(json.dumps(batch * block * steps / (time.perf_counter() - start)))
"""


def speed(machine: Machine) -> Iterator[Figure]:
    """How many tokens per second does train.py process with GPT-2 124M on one GPU, against a plain loop?"""
    layers, heads, width, block, batch, steps = (12, 12, 768, 1024, 12, 60) if machine.device == "cuda" else (
        1, 2, 16, 16, 2, 3)  # fmt: skip
    Path("plain.py").write_text(PLAIN)
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": block}
    overrides = [
        *(f"model.{name}={value}" for name, value in sizes.items()),
        *("data.path=null", "data.workers=0", f"train.batch_size={batch}", "train.accumulation=1"),
        *(f"train.steps={2 * steps}", "train.warmup_steps=0", "train.evaluate_every=0", "train.evaluate_windows=1"),
        *("logging.sample=0", f"logging.every={steps}", "checkpoint.every=0", "checkpoint.dir=checkpoints"),
        *(f"train.compile={'true' if machine.device == 'cuda' else 'false'}", f"distributed.device={machine.device}"),
    ]
    command = [*agent(str(KIT / "train.py"), 1), "--config", str(KIT / "config/gpt2_124m.yaml"), *overrides]
    run(command, one_gpu | {"MUSTER_OUTPUT_DIR": os.getcwd()})
    lines = map(json.loads, read(Path("metrics.jsonl")).splitlines())
    *_, last = (line for line in lines if "tokens_per_second" in line)
    own = last["tokens_per_second"]
    yield Figure(f"tokens/s of train.py, batches of {batch} x {block}, bf16, compiled", own)
    mfu = 100 * last.get("mfu", 0)
    yield Figure("MFU of train.py", mfu, "%") if mfu else Figure("MFU of train.py", "peak unknown")
    arguments = map(str, (layers, heads, width, block, batch, 50304, steps))
    plain = float(run([sys.executable, "plain.py", machine.device, *arguments], one_gpu))
    yield Figure("tokens/s of a plain loop with nanoGPT's settings", plain)
    if mfu:
        yield Figure("MFU of the plain loop", mfu * plain / own, "%")
    yield at_least("ratio of train.py to the plain loop", own / plain, 0.98)


# No step takes time from the later ones: without that of the last one, which compiles two models, the limits together
# leave a minute of gpu_check.LIMIT. The last one usually has much more, because the others do not use all their time.
STEPS = (
    Step("driver", driver, 25),
    Step("fork", fork, 20),
    Step("cpu run", cpu_run, 15),
    Step("start-up", startup, 35),
    Step("smoke test", smoke, 20),
    Step("waiting", waiting, 15, gpus=2),
    Step("hang", hang, 20),
    Step("restart", restart, 35),
    Step("equal bits", equal_bits, 60),
    Step("checkpoint", checkpoint, 25),
    Step("fsdp memory", fsdp, 20, gpus=2),
    Step("speed", speed, 160),
)
