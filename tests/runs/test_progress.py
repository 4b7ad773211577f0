"""How far a run has come: by the furthest step of all its tries, whatever else stands in metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.runs import progress


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (None, None),
        ("", None),
        ('{"step": 3}\n{"step": 12}\n{"step": 4}\n', 12),  # the second try began anew
        ('{"loss": 1}\n{"step": "x"}\n[1]\n{"step": null}\n', None),
        ('{"step": 7}\n{"step": 8', 7),
        ('{"step": 7}\n' + "[" * 100_000 + '\n{"step": 1e999}\n{"step": ' + "9" * 5000 + "}", 7),
        (b'{"step": 5}\n\xff\xfe{"step": 6}\n', 5),
    ],
)
def test_the_furthest_step(tmp_path: Path, text: str | bytes | None, step: int | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert progress.furthest(tmp_path) == step


def test_what_it_prints_for_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    progress.main([str(tmp_path)])
    assert capsys.readouterr().out == "\n3\n"
