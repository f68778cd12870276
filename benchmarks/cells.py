"""A cell of an ablation: one run of a training command, resumed where it was interrupted, left alone where it is finished."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from vla_wmrl.tracking import read_jsonl


def run_cell(command: list[str], folder: Path, shared: Path) -> None:
    """Runs `vla-wmrl` with `command` into `folder`. The evaluation before training is made once and kept in `shared`."""
    if (folder / "ledger.json").exists():
        return
    line = [sys.executable, "-m", "vla_wmrl.cli", *command, f"--output_dir={folder}"]
    if folder.exists() and any(p.name != "config.yaml" for p in folder.iterdir()):
        line.append("--resume=true")
    elif shared.exists():
        line.append("--eval.before=false")
    print(" ".join(line), flush=True)
    subprocess.run(line, check=True)
    before = folder / "eval_before.jsonl"
    if before.exists() and not shared.exists():
        shutil.copy(before, shared)


def curve(runs: Path, arm: str, name: str) -> np.ndarray:
    """A metric of an arm by update, mean over the seeds that are there [updates]; empty without any."""
    found = [[r.get(name) for r in read_jsonl(f / "metrics.jsonl")] for f in sorted(runs.glob(f"{arm}_*")) if f.is_dir()]
    found = [np.array(values, float) for values in found if values]
    shortest = min(map(len, found), default=0)
    return np.mean([values[:shortest] for values in found], axis=0) if shortest else np.empty(0)
