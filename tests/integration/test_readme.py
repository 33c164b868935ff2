"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_engine_example_runs(tmp_path, monkeypatch, capsys):
    from jobs import generate

    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "Engine.load" in block]
    assert len(example.strip().splitlines()) <= 14
    assert generate.main(["--output", str(tmp_path), "--videos", "1", "--groups", "60", "--seed", "3"]) == 0
    (made,) = tmp_path.glob("*.mp4")
    named = tmp_path / re.search(r'open_video\("([^"]+)"', example)[1]
    named.parent.mkdir(parents=True)
    made.rename(named)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(README), "exec"), {})
    printed = capsys.readouterr().out
    held, full = map(int, re.search(r"(\d+) bytes held at most; (\d+) in a full cache", printed).groups())
    assert 0 < held < full and (tmp_path / "video.safetensors").exists()


def test_every_file_and_command_named_there_exists():
    text = README.read_text()
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (README.parent / link).exists(), link
    for module in set(re.findall(r"python -m (jobs\.[a-z_]+)", text)):
        assert (README.parent / (module.replace(".", "/") + ".py")).exists() or (README.parent / module.replace(".", "/")).is_dir(), module
