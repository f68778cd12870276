"""Solutions with true outcomes: our generators' programs, run in the real sandbox and graded. JSON lines, resumable.

    python benchmarks/research_fidelity.py --output outputs/fidelity.jsonl --per_task 40            # 20 tasks: 800
    python benchmarks/research_fidelity.py --output outputs/small.jsonl --per_task 4 --tasks wine digits

One line a task (description, inventory, brief of the sandbox), one line a solution: task, id, source (how it was
generated), code, status, reward, score, rank, error type and line, seconds. Ungraded solutions are written as such
and tried again by the next call. A program takes about 0.5 s on one core."""

from __future__ import annotations

import argparse
from pathlib import Path

from text_agents.autoresearch import embedded
from text_agents.autoresearch.execute import brief, execute
from text_agents.autoresearch.generate import generate
from text_agents.autoresearch.render import facts_of
from text_agents.autoresearch.sandbox import Limits, Sandbox
from vla_wmrl.tracking import JsonLines, read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--per_task", type=int, default=40)
    parser.add_argument("--round", type=int, default=10, help="solutions of every task before any task has more")
    parser.add_argument("--tasks", nargs="*", default=list(embedded.NAMES))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpu_s", type=int, default=20)
    parser.add_argument("--wall_s", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_jsonl(path)  # a row torn by an interruption is dropped, here and in the file
    told = {r["task"] for r in rows if "inventory" in r}
    done = {(r["task"], r["id"]) for r in rows if r.get("status", "ungraded") != "ungraded"}
    limits = Limits(cpu_s=args.cpu_s, wall_s=args.wall_s)
    tasks = {name: embedded.load(name, embedded.cache_folder()) for name in args.tasks}
    file = JsonLines(path)
    with Sandbox({n: t.public for n, t in tasks.items()}, limits, args.workers) as sandbox:
        for name, task in tasks.items():
            if name not in told:
                texts = {"description": task.description, "inventory": task.inventory(), "brief": brief(limits)}
                file.write({"task": name, "held_out": embedded.source(name).held_out, **texts})
        for upto in [*range(args.round, args.per_task, args.round), args.per_task]:
            for name, task in tasks.items():
                facts = facts_of(task)
                seed = args.seed * 1000 + embedded.ALL_NAMES.index(name)
                waiting = [(i, s) for i, s in enumerate(generate(facts, upto, seed)) if (name, i) not in done]
                for at in range(0, len(waiting), args.workers):
                    part = waiting[at : at + args.workers]
                    outcomes = execute(task, facts, [f"```python\n{s.code}```" for _, s in part], "code", sandbox)
                    for (i, solution), o in zip(part, outcomes, strict=True):
                        done.add((name, i))  # an ungraded one is for the next call
                        file.write({
                            "task": name, "id": i, "source": solution.source, "code": solution.code, "status": o.status,
                            "reward": o.reward, "score": o.score, "rank": o.rank, "error_type": o.error_type,
                            "error_line": o.error_line, "sandbox_s": round(o.sandbox_s, 3), "cpu_s": round(o.cpu_s, 3),
                        })  # fmt: skip
                print(f"{name}: {len(waiting)} run, {upto} in all", flush=True)


if __name__ == "__main__":
    main()
