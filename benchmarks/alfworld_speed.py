"""Our ALFWorld engine beside stock TextWorld: the same random walks, transcripts compared word by word, and timed.

A walk takes admissible commands, now and then one that is not. Loading is what an episode pays before its first
command: stock reads and translates, ours does so with an empty cache ("cold") and reads a filled one ("warm").
Seconds are CPU seconds of the process, so that other work on the machine changes them less. Run:

    python benchmarks/alfworld_speed.py --data=$ALFWORLD_DATA --games=50 --steps=25 --output_dir results/alfworld_speed

Games already in the output's episodes.jsonl are skipped, so the comparison can be made in parts (--limit). Memory:
after the walks, --memory games (of --memory_splits, one after the other) are loaded and walked 5 steps on our engine,
with the resident size.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from text_agents import alfworld_stock as stock
from text_agents.alfworld import versions
from text_agents.alfworld_games import Machine, find_games, games_hash, open_game
from text_agents.alfworld_translate import cache_folder
from vla_wmrl.tracking import read_jsonl, write_json


def seconds(call):
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def ours(game, steps: int, seed: int, folder: Path) -> tuple[list, float, float]:
    """(transcript, seconds to load and start, seconds of the walk)."""
    fresh = open_game(game.path)

    def start() -> None:
        fresh.__dict__["machine"] = Machine(fresh.data, folder)
        fresh.start()

    _, load = seconds(start)
    lines, walk = seconds(lambda: stock.walk(fresh, steps, seed))
    return lines, load, walk


def theirs(game, steps: int, seed: int) -> tuple[list, float, float]:
    runner = stock.StockGame()
    started, load = seconds(lambda: runner.start(game))
    lines, walk = seconds(lambda: runner.walk(game, steps, seed, started))
    return lines, load, walk


def compare(game, args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        mine, cold, walk = ours(game, args.steps, args.seed, Path(folder))
        again, warm, _ = ours(game, args.steps, args.seed, Path(folder))
    reference, load, stock_walk = theirs(game, args.steps, args.seed)
    return {
        "game": game.name, "digest": game.digest, "steps": args.steps, "equal": mine == reference == again,
        "transcript": stock.transcript_hash(mine), "stock_transcript": stock.transcript_hash(reference),
        "load_cold_s": cold, "load_warm_s": warm, "walk_s": walk, "stock_load_s": load, "stock_walk_s": stock_walk,
    }  # fmt: skip


def memory(splits: list[str], data: str | None, limit: int) -> dict:
    """Resident MB while games are loaded and walked one after the other, and its growth over the second half."""
    games, kept = [], cache_folder()
    for split in splits:
        games += find_games(split, data, limit=limit - len(games)) if len(games) < limit else []
    process, sizes, before = psutil.Process(), [], len(list(kept.glob("*")))
    for i, game in enumerate(games):
        stock.walk(game, 5)
        game.release()
        if i % 10 == 9:
            sizes.append(round(process.memory_info().rss / 2**20, 1))
    half = sizes[len(sizes) // 2 :]
    slope = float(np.polyfit(np.arange(len(half)) * 10, half, 1)[0]) if len(half) > 1 else float("nan")
    return {
        "splits": splits, "games": len(games), "translated_anew": len(list(kept.glob("*"))) - before,
        "mb_every_10_games": sizes, "peak_mb": max(sizes, default=float("nan")), "mb_per_game_second_half": slope,
    }  # fmt: skip


def summary(rows: list[dict], args) -> dict:
    steps = sum(r["steps"] for r in rows)
    total = {name: sum(r[name] for r in rows) for name in rows[0] if name.endswith("_s")}
    return {
        "split": args.split, "games": len(rows), "steps": steps, "equal": sum(r["equal"] for r in rows),
        "steps_per_s": steps / total["walk_s"], "stock_steps_per_s": steps / total["stock_walk_s"],
        "load_cold_s": total["load_cold_s"] / len(rows), "load_warm_s": total["load_warm_s"] / len(rows),
        "stock_load_s": total["stock_load_s"] / len(rows),
        "speedup_steps": total["stock_walk_s"] / total["walk_s"],
        "speedup_load_cold": total["stock_load_s"] / total["load_cold_s"],
        "speedup_load_warm": total["stock_load_s"] / total["load_warm_s"],
        "speedup_episode_warm": (total["stock_load_s"] + total["stock_walk_s"])
        / (total["load_warm_s"] + total["walk_s"]),
        "versions": versions(), "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--split", default="valid_unseen")
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="compare this many new games, then stop")
    parser.add_argument("--memory", type=int, default=200, help="games of the memory check; 0: none")
    parser.add_argument("--memory_splits", nargs="+", default=["valid_unseen", "train"])
    parser.add_argument("--output_dir", default="results/alfworld_speed")
    args = parser.parse_args()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    games = find_games(args.split, args.data, limit=args.games)
    path = folder / "episodes.jsonl"
    rows = read_jsonl(path)
    todo = [g for g in games if g.digest not in {r["digest"] for r in rows}][: args.limit]
    with path.open("a", encoding="utf-8") as out:
        for game in todo:
            rows.append(compare(game, args))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
            print(f"{len(rows)}/{len(games)} equal={rows[-1]['equal']} {game.name}", flush=True)
    found = summary(rows, args) | {"games_hash": games_hash(games)}
    if args.memory:
        found["memory"] = memory(args.memory_splits, args.data, args.memory)
    write_json(folder / "summary.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
