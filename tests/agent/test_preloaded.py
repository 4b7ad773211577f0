"""A script finds the same modules as in a fresh interpreter although its process has imported PyTorch before.

Modules that the script has not imported are not in sys.modules. A module of the script precedes a standard module of
the same name. Changes of environment variables that PyTorch has read are reported. A fake package that has the same
kinds of side effects at import replaces PyTorch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parents[2]
TORCH = """
import json, logging, numpy, os, pprint, sys, types, warnings
import torch.nn
os.environ.get("TORCH_LOGS"), os.getenv("PYTORCH_JIT"), os.environ.get("HOME")
logging.getLogger("torch").addHandler(logging.StreamHandler())
warnings.filterwarnings("ignore", message="of torch")
backends = types.ModuleType("torch.backends")
sys.modules["torch.made"] = types.ModuleType("torch.made")
imports = "one"
os.environ["SET_BY_TORCH"] = "by torch"
"""
# A rank: a process that imports the fake torch, hides it and runs the script.
RANK = """
import sys
sys.path[0] = sys.argv[1] + "/scripts/lib"
import recorded_imports
fresh = recorded_imports.INITIAL_MODULES - {"linecache"}  # imported by -c
sys.path[0] = sys.argv[1]
from distributed.agent.preloaded import Preload
preload = Preload(fresh, recorded_imports.IMPORTS)
with preload.record_environment_reads():
    import torch
recorded_imports.stop()
del torch, recorded_imports
sys.path[0] = sys.argv[2]
preload.hide()
with open(sys.argv[2] + "/script.py") as script:
    exec(script.read(), {"__name__": "__main__"})
"""


# Imports each module in a process of its own, and prints the names that are then in sys.modules.
IMPORT_EACH = """
import os, sys
for name in NAMES:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            __import__(name)
            result = " ".join(sorted(sys.modules))
        except BaseException as error:
            result = type(error).__name__
        os.write(write, result.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(name, pipe.read())
    os.wait()
"""
NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "test", "__main__"}
# Their first import prints a warning, for which Python imports linecache and others.
NOT_IMPORTED |= {
    "aifc", "asynchat", "asyncore", "audioop", "binhex", "cgi", "cgitb", "chunk", "crypt", "imghdr", "imp", "mailcap",
    "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sre_compile", "sre_constants", "sre_parse",
    "sunau", "telnetlib", "uu", "xdrlib",
}  # fmt: skip
STANDARD = sorted(
    name for name in sys.stdlib_module_names - NOT_IMPORTED if not name.startswith(("_pyrepl", "lib2to3"))
)


@pytest.fixture(autouse=True)
def _fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_LOGS", "PYTORCH_JIT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for file, text in {"torch/__init__.py": TORCH, "torch/nn.py": "", "numpy.py": ""}.items():
        (tmp_path / "site" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / file).write_text(text)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def run(script: str, *arguments: str) -> tuple[str, str]:
    """Write script.py and run Python with these arguments; return stdout and stderr."""
    Path("script.py").write_text(script)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def as_rank(script: str) -> tuple[str, str]:
    return run(script, "-c", RANK, str(KIT), str(Path.cwd()))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("import sys\nprint(sorted(set(sys.modules) - {'__mp_main__'}))", id="nothing is imported"),
        pytest.param(
            "import sys, json\nprint([name in sys.modules for name in ('json', 'json.decoder', 'torch', 'pprint')])",
            id="one is imported",
        ),
        pytest.param(
            "import sys, torch.nn\n"
            "print([name in sys.modules for name in ('torch', 'torch.nn', 'torch.made', 'pprint', 'json')])",
            id="torch is imported",
        ),
        pytest.param(
            "from torch import made\nimport torch\nprint(made, torch.imports)", id="a module that torch makes"
        ),
        pytest.param(
            "import os\nprint(os.environ.get('SET_BY_TORCH'))\nimport torch\nprint(os.environ['SET_BY_TORCH'])",
            id="a variable that torch sets",
        ),
        pytest.param(
            "import torch\nspec = torch.__spec__\n"
            "print(spec.name, torch.__file__, torch.__loader__ is spec.loader, type(spec.loader))",
            id="attributes of torch",
        ),
        pytest.param(
            "import importlib.util\nfound = importlib.util.find_spec('torch')\n"
            "print(found.name, found.origin, found.submodule_search_locations, found.loader.get_filename('torch'))\n"
            "import sys\nprint('torch' in sys.modules)",
            id="torch is searched for",
        ),
        pytest.param(
            "import torch, importlib\ntorch.imports = 'two'\nprint(importlib.reload(torch).imports)", id="reload"
        ),
        pytest.param(
            "import json, sys\nold = sys.modules.pop('json')\nimport json\nprint(old is json)", id="imported again"
        ),
        pytest.param(
            "import importlib.util, sys\nspec = importlib.util.find_spec('torch')\n"
            "spec.loader = importlib.util.LazyLoader(spec.loader)\n"
            "sys.modules['torch'] = torch = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(torch)\n"
            "import torch.nn\nprint(torch.imports, torch.__spec__.name, type(torch), type(torch.__spec__.loader))",
            id="a lazy loader",
        ),
        pytest.param(
            "import importlib.util, sys\n"
            "class Hook:\n    busy = False\n    def find_spec(self, name, path=None, target=None):\n"
            "        if name != 'torch' or self.busy:\n            return None\n"
            "        self.busy = True\n        spec = importlib.util.find_spec(name)\n        self.busy = False\n"
            "        class Loader(type(spec.loader)):\n            def __init__(self):\n                pass\n"
            "            create_module = spec.loader.create_module\n"
            "            def exec_module(self, module, loader=spec.loader):\n"
            "                loader.exec_module(module)\n                print('imported', module.imports)\n"
            "        spec.loader = Loader()\n        return spec\n"
            "sys.meta_path.insert(0, Hook())\nimport torch\nimport torch",
            id="a hook after the import",
        ),
        pytest.param("import sys\nsys.path.remove(sys.path[0])\nimport pprint\nprint(pprint.__file__)", id="path"),
        pytest.param("import warnings\nprint(warnings.filters)", id="warnings before torch"),
        pytest.param(
            "import warnings\nwarnings.simplefilter('error')\nimport torch\nwarnings.warn('of torch')\nprint('fine')",
            id="warnings after torch",
        ),
        pytest.param(
            "import io, sys\nsys.stderr = io.StringIO()\nimport torch, logging\n"
            "logging.getLogger('torch').warning('message')\nprint(repr(sys.stderr.getvalue()))",
            id="logging of torch",
        ),
        pytest.param(
            "import threading\nfound = []\n"
            "def get(name):\n    found.append(__import__(name))\n"
            "threads = [threading.Thread(target=get, args=[name]) for name in ('torch', 'json', 'pprint') * 20]\n"
            "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\n"
            "print(sorted({module.__name__ for module in found}), len(found))",
            id="threads",
        ),
    ],
)
def test_imports_behave_as_in_a_fresh_interpreter(script: str) -> None:
    assert without_addresses(as_rank(script)) == without_addresses(run(script, "script.py"))


def without_addresses(printed: tuple[str, str]) -> list[str]:
    return [text.partition(" at 0x")[0] for text in printed]


@pytest.mark.parametrize("file", ["pprint.py", "pprint/__init__.py", "lib/pprint.py"])
def test_a_module_of_the_script_precedes_a_standard_module(file: str) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("own = True\n")
    path = "import sys\nsys.path.insert(0, 'lib')\n" if file.startswith("lib") else ""
    for order in ("import pprint, torch", "import torch, pprint"):
        assert as_rank(f"{path}{order}\nprint(pprint.own, torch.imports)")[0] == "True one\n"


def test_a_directory_without_modules_is_not_a_module() -> None:
    """A data directory may have the name of a standard module."""
    Path("json").mkdir()
    assert as_rank("import json\nprint(json.dumps(1))") == ("1\n", "")


WARNING = (
    "warning: {0}: changed before the script imported {1}, without effect, because the agent had imported {1} "
    "already; launch {2}, or with --agent torchrun\n"
)


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        ("environ['OMP_NUM_THREADS'] = '3'", ("OMP_NUM_THREADS", "torch", "with --env OMP_NUM_THREADS=3")),
        ("environ['TORCH_LOGS'] = 'all'", ("TORCH_LOGS", "torch", "with --env TORCH_LOGS=all")),
        ("environ['PYTORCH_JIT'] = '0'", ("PYTORCH_JIT", "torch", "with --env PYTORCH_JIT=0")),
        ("del environ['OMP_THERE']", ("OMP_THERE", "torch", "without OMP_THERE in the environment")),
        (
            "environ['OPENBLAS_NUM_THREADS'] = '1'; import numpy",
            ("OPENBLAS_NUM_THREADS", "numpy", "with --env OPENBLAS_NUM_THREADS=1"),
        ),
        ("environ['OMP_THERE'] = 'yes'", None),  # unchanged
        ("environ['KMP_INIT_AT_FORK'] = 'FALSE'", None),  # as scikit-learn does; read by Intel's and LLVM's OpenMP only
        ("environ['HOME'] = '/nowhere'", None),
        ("environ['NCCL_DEBUG'] = 'INFO'", None),
        ("environ['CUDA_VISIBLE_DEVICES'] = ''", None),
        ("environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'", None),
        ("environ['MINE'] = '1'", None),
    ],
)
def test_a_change_of_a_variable_that_was_read_at_import_is_reported(
    script: str, warning: tuple[str, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_THERE", "yes")
    expected = WARNING.format(*warning) if warning else ""
    assert as_rank(f"from os import environ\n{script}\nimport torch, numpy, torch.nn\n") == ("", expected)


@pytest.mark.parametrize("library", ["libiomp5.so", "libomp.so.5", "libomp-a1b2.so"])
def test_a_change_of_a_variable_of_intel_s_openmp_is_reported_where_it_is_loaded(library: str, tmp_path: Path) -> None:
    (tmp_path / library).write_text("a stub of the library")
    loaded = f"import mmap\nlibrary = mmap.mmap(os.open({str(tmp_path / library)!r}, 0), 0, prot=mmap.PROT_READ)\n"
    (tmp_path / "site/torch/__init__.py").write_text(TORCH + loaded)
    expected = WARNING.format("KMP_BLOCKTIME", "torch", "with --env KMP_BLOCKTIME=0")
    assert as_rank("import os\nos.environ['KMP_BLOCKTIME'] = '0'\nimport torch\n") == ("", expected)


def test_changes_after_the_import_are_not_reported() -> None:
    assert as_rank("import torch, os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport numpy, torch.nn") == ("", "")


def test_a_standard_module_finds_all_modules_that_it_has_imported_in_sys_modules(tmp_path: Path) -> None:
    """asyncio of Python 3.12 looks for warnings in sys.modules, codeop of 3.11 for __future__, and so on."""
    importing = (
        "import contextlib\nfor name in NAMES:\n    with contextlib.suppress(ImportError):\n        __import__(name)\n"
    )
    (tmp_path / "site/torch/__init__.py").write_text(f"NAMES = {STANDARD}\n{importing}")
    script = f"NAMES = {STANDARD}\n{IMPORT_EACH}"
    fresh, rank = (
        {name: set(modules) for name, *modules in map(str.split, printed.splitlines())}
        for printed in (run(script, "script.py")[0], as_rank(script)[0])
    )
    assert len(fresh) > 150 and fresh.keys() == rank.keys()
    others = ("distutils", "_pydecimal")  # another finder finds distutils; _pydecimal has the name of decimal
    missing = {name: lost for name in fresh if not name.startswith(others) and (lost := fresh[name] - rank[name])}
    assert missing == {}
    assert "asyncio" not in rank["json"]


@pytest.mark.parametrize(
    "script",
    [
        "import asyncio\nasync def main():\n    process = await asyncio.create_subprocess_exec('true')\n"
        "    print(await process.wait())\nasyncio.run(main())",
        "import sys, concurrent.futures.process\nprint('__mp_main__' in sys.modules)",
        "import sys, codeop\nprint(type(codeop.compile_command('x=1')))",
    ],
)
def test_a_call_of_a_standard_module_works_before_torch_is_imported(script: str, tmp_path: Path) -> None:
    (tmp_path / "site/torch/__init__.py").write_text(
        "import asyncio, codeop, concurrent.futures.process, warnings, __future__"
    )
    assert as_rank(script)[0] == run(script, "script.py")[0]


@pytest.mark.parametrize("imported", ["", "import logging\nprint(logging.__file__)\n"])
def test_a_file_of_the_script_that_has_the_name_of_a_preloaded_module_is_named(imported: str) -> None:
    Path("logging.py").write_text("")
    _, stderr = as_rank(f"{imported}import torch\n")
    file = Path("logging.py").absolute()
    assert stderr == f"warning: {file}: hides the module logging, which PyTorch imports; rename this file\n"
