"""The bench of memory shows what the README claims: flat with a budget, growing without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_peak_is_flat_from_4_to_16_times_the_length():
    command = [sys.executable, "-m", "jobs.bench", "memory", "--tokens", "2048,8192,32768", "--policies", "keydiff"]
    size = ["--hidden", "64", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--budget-tokens", "512", "--block-tokens", "256"]
    root = Path(__file__).parents[2]
    printed = subprocess.run([*command, *size], capture_output=True, text=True, check=True, cwd=root, env=os.environ).stdout
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert [row["kv_held_bytes"] for row in rows] == [rows[0]["kv_formula_bytes"]] * 3
    assert rows[2]["kv_full_bytes"] > 15 * rows[0]["kv_full_bytes"]
    assert rows[2]["process_peak_bytes"] < 1.03 * rows[1]["process_peak_bytes"]
