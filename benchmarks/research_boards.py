"""The reference boards of the embedded AutoResearch tasks: scores of our own ladder of baselines, frozen as csv.

    OMP_NUM_THREADS=1 python benchmarks/research_boards.py                 # all tasks whose board is not there yet
    OMP_NUM_THREADS=1 python benchmarks/research_boards.py --tasks wine digits --again

A task takes 5 to 30 s on one core. The boards are made once for a version of the cut (`embedded.VERSION`); another
version of scikit-learn moves a few scores in the last digits, and nobody's rank by more than a place or two."""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np

from text_agents.autoresearch import embedded, ladder
from text_agents.autoresearch.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(embedded.ALL_NAMES))
    parser.add_argument("--again", action="store_true", help="also where a board exists")
    args = parser.parse_args()
    embedded.BOARDS.mkdir(exist_ok=True)
    for name in args.tasks:
        path = embedded.BOARDS / f"{name}.csv"
        if path.exists() and not args.again:
            continue
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            root = embedded.build(name, folder)
            for which in ("private", "public"):  # a task needs a board to load; its rank is not used here
                (root / "private" / f"{which}_leaderboard.csv").write_text("rank,score\n1,0\n")
            board = ladder.climb(load_task(root))
        board["score"] = [float(f"{s:.6g}") for s in board["score"]]
        board.to_csv(path, index=False)
        q = np.quantile(board["score"], [0, 0.25, 0.5, 0.75, 1])
        print(f"{name}: {len(board)} entries, {np.round(q, 4)}, {time.process_time() - started:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
