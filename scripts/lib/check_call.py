"""Check a call of a launcher before anything is started. One process makes all checks that need Python.

usage: check_call.py [option...] -- [SCRIPT-ARGUMENT...]

  --torch               ranks run on this machine: check that PyTorch is installed
  --script FILE         check that this file is Python, which the ranks can run
  --foreign-script FILE like --script, for ranks that run another Python, which may accept another syntax
  --module NAME         check that `python -m NAME` works in this directory
  --nodes NPROC         print the nodes of --node (repeatable) or --hostfile, without those of --exclude
  --allocation RANKS    print the nodes that SLURM has allocated for this many ranks; 0: SLURM's number of tasks
  --gpus NPROC          check that this machine has enough GPUs, or cores, for this many ranks
  --port PORT           check that the port is free on this machine
  --master ADDRESS --node-rank N   check that all nodes can use this address of node rank 0
  --config FILE         check these settings, with the arguments after --, for Muster's train.py
  --ranks N             number of ranks for --config (default: that of the nodes)
  --replace             with --nodes: print spare nodes as `spare`, because they replace lost nodes
  --forward             with --nodes: print the names of variables that are forwarded to the nodes

Prints one fact per line for run_checks in launch.bash. The last line is `ok`, `usage MESSAGE` or `unfit MESSAGE`.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit()  # the launcher finds no `ok` and checks the version

import argparse
import os
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from importlib.machinery import ModuleSpec
from importlib.util import MAGIC_NUMBER, find_spec, module_from_spec

KIT = os.path.abspath(f"{__file__}/../../..")
RANKS_PER_CORE = 4  # a larger number of ranks per core causes a warning
LARGEST_SCRIPT = 10_000_000  # bytes; the syntax of a larger file is not checked
OTHER_SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".sh", ".ps1")  # JSON, for example, is an expression of Python


class CheckFailed(Exception):
    """A check has failed. Its two arguments are the kind (`usage` or `unfit`) and the message."""


def find_module(name: str) -> ModuleSpec | None:
    """Find a module as `python -m` does in this directory, but do not run its packages: PyTorch takes a second.

    Returns the spec of a package above it whose own code decides where its modules are, as with pkgutil.extend_path().
    """
    sys.path[0], known = "", set(sys.modules)
    parts = name.split(".")
    try:
        for count in range(1, len(parts)):
            package = ".".join(parts[:count])
            if package not in sys.modules and (spec := find_spec(package)):
                sys.modules[package] = module_from_spec(spec)
                if (origin := spec.origin) and origin.endswith("__init__.py") and os.path.isfile(origin):
                    with open(origin, "rb") as opened:
                        if re.search(rb"__path__|declare_namespace", opened.read(LARGEST_SCRIPT)):
                            return spec
        return find_spec(name) if name != "__main__" else None
    except (ImportError, ValueError):  # no such package, or an empty part of the name
        return None
    finally:
        for package in sys.modules.keys() - known:
            del sys.modules[package]
        sys.path[0] = KIT


def check_program(options: argparse.Namespace) -> None:
    if script := options.script or options.foreign_script:
        check_script(script, foreign_python=not options.script)
    if options.progress:
        from distributed.launch.output_metrics import check_expression

        if fault := check_expression(options.progress):
            raise CheckFailed("usage", f"--progress '{options.progress}': {fault}")
    if options.torch and not find_module("torch"):
        remedy = "install it there, or choose another Python with --python PATH"
        raise CheckFailed("usage", f"'{sys.executable}' has no PyTorch; {remedy}")
    if options.module is not None:
        found = find_module(options.module)
        if not found:
            missing = f"no such module for '{sys.executable}' (also searched in {os.getcwd()})"
            raise CheckFailed("usage", f"-m '{options.module}': {missing}")
        if found.submodule_search_locations is not None and not find_module(f"{options.module}.__main__"):
            raise CheckFailed("usage", f"-m '{options.module}': a package without __main__.py; name one of its modules")


def check_script(file: str, foreign_python: bool) -> None:
    """Refuse a program that is not Python, and a syntax error. Bytecode, zip files and huge files are accepted."""
    import warnings
    import zipfile

    with open(file, "rb") as opened:
        source = opened.read(LARGEST_SCRIPT)
    program = non_python_program(source)
    if file.endswith(".pyc") or source.startswith(MAGIC_NUMBER) or zipfile.is_zipfile(file):
        return
    check_format(file, source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if len(source) < LARGEST_SCRIPT or program:
                compile(source, file, "exec", dont_inherit=True)
        return
    except (RecursionError, MemoryError):  # a very deep expression
        return
    except SyntaxError as error:
        fault = f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    except ValueError as error:  # a NUL byte
        fault = str(error)
    if program or (not file.endswith(".py") and not foreign_python):
        remedy = "ranks run Python: start this program from a Python script, such as with subprocess.run()"
        raise CheckFailed("usage", f"script '{file}': not a Python script ({program or fault}); {remedy}")
    if not foreign_python:
        remedy = "save it as UTF-8" if "'utf-8' codec" in fault else "correct it"
        raise CheckFailed("usage", f"script '{file}': {fault}; {remedy}")


def check_format(file: str, source: bytes) -> None:
    """Refuse a file of another format, for which Python would report a misleading error or no error."""
    suffix = os.path.splitext(file)[1].lower()
    if source.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in source[:2]:
        raise CheckFailed("usage", f"script '{file}': its encoding is UTF-16; save it as UTF-8")
    if suffix == ".ipynb":
        remedy = "convert it with `jupyter nbconvert --to script`"
        raise CheckFailed("usage", f"script '{file}': a notebook, not a Python script; {remedy}")
    if suffix in OTHER_SUFFIXES and not source.startswith(b"#!"):
        fault = f"not a Python script (its name ends in {suffix})"
        raise CheckFailed("usage", f"script '{file}': {fault}; name a Python script")


def non_python_program(source: bytes) -> str:
    """Describe an executable or a script of another interpreter by its first bytes. Returns "" if it may be Python."""
    if source.startswith(b"\x7fELF"):
        return "an executable"
    shebang = re.match(rb"#!.*", source)
    if not shebang or re.search(rb"python|pypy|uv|sage|conda", shebang[0]):
        return ""
    return f"it begins with {shebang[0].decode(errors='replace')}"


def print_forwarded() -> None:
    from distributed.launch.forwarding import ForwardingError, forwarded

    try:
        names = forwarded(os.environ)
    except ForwardingError as error:
        raise CheckFailed("usage", str(error)) from None
    for name in names:
        print(f"forward {name}")


def print_named_nodes(options: argparse.Namespace) -> int:
    """Returns the number of ranks; 1 if NPROC is auto, gpu or cpu."""
    from distributed.nodelist import NodeListError, requested

    try:
        nodes = requested(options.node, options.hostfile, options.exclude, options.spares)
    except NodeListError as error:
        raise CheckFailed("usage", str(error)) from None
    except OSError as error:
        raise CheckFailed("usage", f"hostfile '{error.filename}': {error.strerror}") from None
    if options.forward:
        print_forwarded()
    for node in nodes:
        kind = "spare" if node.spare and options.replace else "node"
        print(f"{kind} {node.address} {node.slots or options.nodes}")
    nodes = [node for node in nodes if not (node.spare and options.replace)]
    if not options.nodes.isdecimal():
        return 1  # unknown before the nodes are probed
    return sum(node.slots or int(options.nodes) for node in nodes)


def print_allocation(ranks: int) -> int:
    """Returns the number of ranks."""
    from distributed.slurm.allocation import AllocationError, free_port, read

    try:
        allocation = read(ranks)
    except AllocationError as error:
        raise CheckFailed("usage", str(error)) from None
    for warning in allocation.warnings(os.environ):
        print(f"warning {warning}")
    print(f"cores-per-rank {allocation.cores_per_task}")
    print(f"cores-per-node {min(allocation.cores)}")
    if os.environ.get("SLURMD_NODENAME") == allocation.nodes[0]:
        print(f"port {free_port(allocation.job)}")
    for node, tasks in zip(allocation.nodes, allocation.tasks, strict=True):
        print(f"node {node} {tasks}")
    return sum(allocation.tasks)


def may_have_gpus() -> bool:
    """Whether this machine may have GPUs. This check is quick; to count GPUs, modules must be imported."""
    programs = (os.path.join(directory, "nvidia-smi") for directory in os.environ.get("PATH", "").split(os.pathsep))
    return any(map(os.path.exists, programs)) or any(name.startswith("nvidia") for name in os.listdir("/dev"))


def check_gpus(ranks: int) -> None:
    if ranks <= RANKS_PER_CORE and not may_have_gpus():
        return
    from distributed.host.gpus import count_visible
    from distributed.host.resources import read_cores

    gpus = count_visible()
    if 0 < gpus < ranks:
        available = f"{gpus} GPU{'s' * (gpus > 1)}"
        raise CheckFailed("usage", f"NPROC {ranks}: this machine has {available}; start at most one process per GPU")
    if not gpus and ranks > RANKS_PER_CORE:
        cores = max(1, int(read_cores().usable))
        if ranks > RANKS_PER_CORE * cores:
            print(f"warning NPROC {ranks}: more than {RANKS_PER_CORE} per CPU core (this machine has {cores})")


def check_port(port: int) -> None:
    from distributed.host.network import listener, port_is_free

    if not port_is_free(port):
        holder = listener(port)
        taken = f"in use on this machine{holder and f' by {holder}'}"
        raise CheckFailed("unfit", f"--master-port {port}: {taken}; choose another, or leave it out")


def print_master(master: str, node_rank: int) -> None:
    from distributed.host.network import address_of, own_addresses
    from distributed.launch.master_address import check_master

    address, fault = check_master(master, node_rank, address_of(master), own_addresses())
    if fault:
        raise CheckFailed("unfit", fault)
    print(f"master {address}")


def check_writable(directory: str) -> None:
    """Check that the checkpoint directory exists or can be made, without making it. Raises ConfigError."""
    from distributed.training.settings import ConfigError

    existing = os.path.abspath(directory)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        problem = "not a directory" if not os.path.isdir(existing) else "not writable"
        raise ConfigError(f"checkpoint.dir={directory!r}: cannot write checkpoints there: {existing} is {problem}")


def check_settings(config: str, arguments: list[str], ranks: int, ranks_are_local: bool) -> None:
    """Exit with 2 if Muster's train.py would refuse the settings. Prints one message per fault on standard error.

    If ranks_are_local is false, the packages that the ranks need are printed instead of checked.
    """
    from distributed.checkpoint.compatibility import check_resumable
    from distributed.checkpoint.directory import CheckpointError, newest_intact
    from distributed.training import trackers
    from distributed.training.settings import ConfigError, for_ranks, holds_settings, parser
    from distributed.trust import bounded

    if {"--help", "-h", "--version"} & set(arguments):  # train.py prints only the help or its version
        return
    options = parser("", "train.py").parse_intermixed_args(["--config", config, *arguments])
    try:
        settings, _ = for_ranks(options, ranks)
        if settings.checkpoint.dir and (newest := newest_intact(settings.checkpoint.dir)):
            check_resumable(newest, settings, settings.model.vocab_size)
        values = settings.model_dump()
        if ranks_are_local:
            trackers.check(values)
            check_writable(str(settings.checkpoint.dir or "."))
        else:
            for package in trackers.enabled(values):
                print(f"package {package}")
    except trackers.TrackerMissing as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"{bounded(str(error))}\n")
        try:
            is_other_file = not holds_settings(options.config)
        except ConfigError:
            is_other_file = False
        if is_other_file:
            hint = "contains no setting of Muster's train.py; to run another script, add --script FILE"
            sys.stderr.write(f"{config}: {hint}\n")
        sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="check_call.py", allow_abbrev=False)
    program_options = ("--script", "--foreign-script", "--module", "--config", "--progress")
    for name in (*program_options, "--nodes", "--hostfile", "--exclude", "--spares", "--master"):
        parser.add_argument(name)
    for name in ("--allocation", "--gpus", "--port", "--node-rank", "--ranks"):
        parser.add_argument(name, type=int)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--node", action="append", default=[])
    end = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:end])
    try:
        check_program(options)
        ranks = options.ranks or 0
        if options.nodes is not None:
            ranks = print_named_nodes(options)
        if options.allocation is not None:
            ranks = print_allocation(options.allocation)
        if options.config is not None:
            check_settings(options.config, sys.argv[end + 1 :], ranks, ranks_are_local=options.torch)
        if options.gpus is not None:
            check_gpus(options.gpus)
        if options.port is not None:
            check_port(options.port)
        if options.master is not None:
            print_master(options.master, options.node_rank)
        print("ok")
    except CheckFailed as error:
        from distributed.trust import bounded

        kind, message = error.args
        print(kind, " ".join(bounded(message).splitlines()))


if __name__ == "__main__":
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, KIT)
    else:
        sys.path[0] = KIT
    main()
