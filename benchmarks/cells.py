"""A cell of an ablation: one run of a training command, resumed where it was interrupted, left alone where it is finished."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from vla_wmrl.tracking import write_json


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


def curve(rows: list[dict], arm: str, name: str) -> np.ndarray:
    """A metric of an arm by update, mean over the seeds that are there [updates]; empty without any.

    `rows` are those of all cells' metrics, each with its arm and seed.
    """
    seeds = sorted({r["seed"] for r in rows if r["arm"] == arm})
    found = [np.array([r.get(name) for r in rows if (r["arm"], r["seed"]) == (arm, s)], float) for s in seeds]
    shortest = min(map(len, found), default=0)
    return np.mean([values[:shortest] for values in found], axis=0) if shortest else np.empty(0)


def add(path: Path, rows: list[dict]) -> list[dict]:
    """Writes a table of cells, and keeps the cells of an earlier one whose run folders are gone. Returns all rows.

    A cell is an (arm, seed). `path`: .json, a list, or .jsonl.gz, a row a line.
    """
    fresh = {(r["arm"], r["seed"]) for r in rows}
    if path.exists():
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            old = [json.loads(line) for line in file] if path.suffix == ".gz" else json.load(file)
        rows = [r for r in old if (r["arm"], r["seed"]) not in fresh] + rows
    rows = sorted(rows, key=lambda r: (r["arm"], r["seed"]))
    if path.suffix == ".gz":
        with gzip.GzipFile(path, "wb", mtime=0) as file:  # the same rows are the same file
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    else:
        write_json(path, rows)
    return rows
