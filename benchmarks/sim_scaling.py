"""Control steps a second (without cameras) of 1, 2 and 4 workers: threads of one process against processes.

    python benchmarks/sim_scaling.py --output_dir results/sim

Every worker steps an environment of its own through the same actions; wall time from a common start to the last one's end.
Contenders take turns, `--repeats` times. `others` is the share of all cores that other programs used meanwhile; where it is
not small, a rate says little: the table is of runs with at most QUIET of it, or of all where there are none. Threads and
processes must end in the bits of one thread alone (`same_bits`). Runs are appended to scaling.jsonl; then scaling.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np

from sim.workers import one_thread_each
from vla_wmrl.tracking import read_jsonl, write_json

COUNTS, MODES, STEPS = (1, 2, 4), ("exact", "fast"), 200
QUIET = 0.1


class Walker:
    """One environment and the walk that every worker takes."""

    def __init__(self, mode: str):
        from sim.libero import EnvSpec, LiberoEnv

        self.env = LiberoEnv(EnvSpec("libero_10", 0, 0, mode, placements=1))
        self.actions = np.clip(np.random.default_rng(1).normal(0, 0.4, (STEPS, 7)) - [0, 0, 0.3, 0, 0, 0, 0], -1, 1)
        self.env.reset(self.env.official_states[0])
        self.start = self.env.snapshot()
        self.walk(3)

    def walk(self, steps: int = STEPS) -> np.ndarray:
        self.env.restore(self.start)
        for action in self.actions[:steps]:
            self.env.step(action)
        return self.env.data.qpos.copy()


def _serve(mode: str, pipe) -> None:
    walker = Walker(mode)
    pipe.send("ready")
    while pipe.recv():
        pipe.send(walker.walk())


class Processes:
    def __init__(self, mode: str, n: int):
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(n):
            ours, theirs = spawn.Pipe()
            with one_thread_each():
                self.processes.append(spawn.Process(target=_serve, args=(mode, theirs), daemon=True))
                self.processes[-1].start()
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()

    def walk(self, n: int) -> list[np.ndarray]:
        for pipe in self.pipes[:n]:
            pipe.send(True)
        return [pipe.recv() for pipe in self.pipes[:n]]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(False)
            process.join()


class Threads:
    def __init__(self, mode: str, n: int):
        self.walkers = [Walker(mode) for _ in range(n)]

    def walk(self, n: int) -> list[np.ndarray]:
        ends: list = [None] * n

        def go(i: int) -> None:
            ends[i] = self.walkers[i].walk()

        threads = [threading.Thread(target=go, args=(i,)) for i in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends

    def close(self) -> None:
        for walker in self.walkers:
            walker.env.close()


def busy_seconds() -> float:
    """CPU seconds that all programs of the machine have used."""
    user, nice, system = (int(t) for t in Path("/proc/stat").read_text().split("\n")[0].split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_seconds(processes) -> float:
    total = time.process_time()
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(mode: str, repeats: int) -> list[dict]:
    """One row a run."""
    contenders = {"threads": Threads(mode, max(COUNTS)), "processes": Processes(mode, max(COUNTS))}
    alone = contenders["threads"].walk(1)[0]
    children = contenders["processes"].processes
    cores, rows = len(os.sched_getaffinity(0)), []
    for _ in range(repeats):
        for n in COUNTS:
            for kind, contender in contenders.items():
                busy, own, start = busy_seconds(), own_seconds(children), time.perf_counter()
                ends = contender.walk(n)
                wall, own, busy = time.perf_counter() - start, own_seconds(children) - own, busy_seconds() - busy
                rows.append({
                    "mode": mode, "kind": kind, "workers": n, "cores": cores,
                    "steps_per_s": n * STEPS / wall, "cores_used": own / wall,
                    "others": max(0.0, busy - own) / (wall * cores),
                    "same_bits": all(bool((end == alone).all()) for end in ends),
                })  # fmt: skip
    for contender in contenders.values():
        contender.close()
    return rows


def summary(runs: list[dict]) -> list[dict]:
    table = []
    for mode, kind, n in sorted({(r["mode"], r["kind"], r["workers"]) for r in runs}, key=lambda k: (k[0], k[2], k[1])):
        mine = [r for r in runs if (r["mode"], r["kind"], r["workers"]) == (mode, kind, n)]
        quiet = [r for r in mine if r["others"] <= QUIET]
        used = quiet or mine
        rates = [r["steps_per_s"] for r in used]
        table.append({
            "mode": mode, "kind": kind, "workers": n, "cores": mine[0]["cores"], "repeats": len(used), "quiet": bool(quiet),
            "steps_per_s_median": float(np.median(rates)), "steps_per_s_min": min(rates), "steps_per_s_max": max(rates),
            "cores_used": float(np.median([r["cores_used"] for r in used])),
            "others": float(np.median([r["others"] for r in used])), "same_bits": all(r["same_bits"] for r in mine),
        })  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("results/sim"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--modes", default=",".join(MODES))
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "scaling.jsonl"
    if args.repeats:
        for mode in args.modes.split(","):
            found = measure(mode, args.repeats)
            with path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in found))
    table = summary(read_jsonl(path))
    write_json(args.output_dir / "scaling.json", table)
    for row in table:
        print("{mode:6} {workers} {kind:9} {steps_per_s_median:5.0f} steps/s [{steps_per_s_min:.0f}, {steps_per_s_max:.0f}], "
              "{cores_used:.2f} of {cores} cores, others {others:.0%}, {repeats} runs, "
              "same bits: {same_bits}".format(**row))  # fmt: skip


if __name__ == "__main__":
    main()
