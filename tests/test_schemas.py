"""The JSON of ls and status has the form that the schemas in docs/schemas describe."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

KIT = Path(__file__).resolve().parents[1]
SCRIPT = """\
import os, sys, time
print("step 1 loss 2.5", flush=True)
while not os.path.exists("go on"):
    time.sleep(0.05)
"""
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def faults(schema: dict[str, Any], value: object, name: str = "$") -> list[str]:
    """What in a value differs from a schema, of which only these keywords are supported."""
    known = {"$schema", "title", "type", "enum", "anyOf", "items", "properties", "required", "additionalProperties"}
    assert schema.keys() <= known, schema.keys() - known
    if "anyOf" in schema:
        return [] if any(not faults(one, value) for one in schema["anyOf"]) else [f"{name}: {value!r}"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_a(value, kind) for kind in kinds):
        return [f"{name}: expected {kinds}, got {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{name}: {value!r} is not one of {schema['enum']}"]
    found = []
    if isinstance(value, list):
        for number, one in enumerate(value):
            found += faults(schema.get("items", {}), one, f"{name}[{number}]")
    if isinstance(value, dict) and "properties" in schema:
        found = [f"{name}: {key} is missing" for key in schema["required"] if key not in value]
        found += [f"{name}: {key} is not in the schema" for key in value if key not in schema["properties"]]
        for key in value.keys() & schema["properties"].keys():
            found += faults(schema["properties"][key], value[key], f"{name}.{key}")
    return found


def is_a(value: object, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def schema_of(verb: str) -> dict[str, Any]:
    return dict(json.loads((KIT / f"docs/schemas/{verb}.json").read_text()))


def output_of(verb: str, cwd: Path, *arguments: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    command = [str(KIT / f"scripts/{verb}.sh"), "--python", sys.executable, "--json", *arguments]
    text = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout
    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_the_output_of_status_and_ls_has_the_form_of_its_schema(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    totals = {"jobs": 2, "done": 1, "failed": 0, "seconds": 1.0}
    results = {"created": time.time(), "state": "finished", "totals": totals, "servers": {"gpu1": {}}, "jobs": []}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "results.journal").touch(0o600)
    run = [str(KIT / "scripts/run.sh"), "--python", sys.executable, "-n", "1", "train.py"]
    with subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        assert launcher.stdout and any("step 1" in line for line in launcher.stdout)
        live, rows = output_of("status", tmp_path), output_of("ls", tmp_path)
        (tmp_path / "go on").touch()
        launcher.stdout.read()
    assert launcher.returncode == 0
    ended = output_of("status", tmp_path)
    assert (live["state"]["name"], ended["state"]["name"]) == ("running", "ended")
    assert sorted(row["kind"] for row in rows["rows"]) == ["list", "run"]
    for verb, value in (("status", live), ("status", ended), ("ls", rows), ("ls", output_of("ls", tmp_path, "--all"))):
        assert faults(schema_of(verb), value) == []
    damaged = live | {"exit_code": 3, "more": 1, "state": {"name": "running", "more": True, "wrong": False}}
    assert len(faults(schema_of("status"), damaged)) == 4


def test_the_page_for_agents_names_existing_verbs_options_and_schemas() -> None:
    text = (KIT / "docs/AGENTS.md").read_text()
    assert {f"schemas/{path.name}" for path in (KIT / "docs/schemas").iterdir()} == {
        word.strip("()`,.;").rpartition("(")[2] for word in text.replace("]", " ").split() if "schemas/" in word
    }
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["muster"] and words[1] not in ("run", "jobs"):
            shown = subprocess.run([str(KIT / "scripts/muster"), words[1], "--help"], capture_output=True, text=True)
            assert shown.returncode == 0, line
            assert all(f" {word}" in shown.stdout for word in words[2:] if word.startswith("-")), line
