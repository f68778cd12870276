"""`vla-wmrl research report`: report.html of a run of `research train` or `research eval`, one page without the network.

Reads what is there: eval_before.jsonl and eval_after.jsonl (`eval`: trajectories.jsonl), a row a trajectory; metrics.jsonl,
ledger.json, calibration.json, config.yaml, manifest.json. Says "not recorded" for the rest."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from text_agents.autoresearch.commands import known
from vla_wmrl import report as core
from vla_wmrl import report_plots as plots
from vla_wmrl.errors import require
from vla_wmrl.progress import clock
from vla_wmrl.report_html import MISSING, details, image, page, save, table, tiled
from vla_wmrl.stats import paired_difference
from vla_wmrl.tracking import read_jsonl

_SECONDS = {"sandbox_anchors": "training", "sandbox_evaluation": "evaluation", "sandbox_past": "past executions, once"}


def graded(rows: list[dict], task: str) -> np.ndarray:
    """Percentiles [n] of a task's graded trajectories: what nobody graded is missing, not 0."""
    return np.array([r["percentile"] for r in rows if r["task"] == task and known(r["percentile"])], np.float64)


def tasks_of(rows: list[dict]) -> dict[str, bool]:
    """Task -> held out, in the order of evaluation, training tasks first."""
    found = {r["task"]: bool(r["held_out"]) for r in rows}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def mean_text(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ({len(values)})" if len(values) else "–"


def change_text(before: np.ndarray, after: np.ndarray) -> str:
    return f"{after.mean() - before.mean():+.1f}" if len(before) and len(after) else "–"


def percentile_section(before: list[dict], after: list[dict]) -> str:
    """A row a task and a split: mean percentile of its trajectories (their number), and the change over tasks."""
    tasks = tasks_of(before + after)
    if not tasks:
        return MISSING
    rows = []
    for task, held_out in tasks.items():
        pair = [graded(r, task) for r in (before, after)]
        rows.append([escape(task), "held out" if held_out else "train", *map(mean_text, pair), change_text(*pair)])
    out = table(["task", "split", "before", "after", "points"], rows)
    for held_out, name in ((False, "training"), (True, "held-out")):
        own = [t for t, h in tasks.items() if h == held_out and len(graded(before, t)) and len(graded(after, t))]
        if len(own) < 2:
            continue
        a, b = (np.array([graded(r, t).mean() for t in own]) for r in (before, after))
        found = paired_difference(a, b, np.arange(len(own)))
        out += (
            f"<p>Mean of {len(own)} {name} tasks: {a.mean():.1f} before, {b.mean():.1f} after, {found.value:+.1f} points "
            f"[{found.low:+.1f}, {found.high:+.1f}] (95 % bootstrap over tasks).</p>"
        )
    bars = [[_spread(graded(r, t)) for t in tasks] for r in (before, after)]
    label = "percentile: mean of the trajectories and their range"
    return out + f'<div class="wide">{image(plots.success(list(tasks), *bars, label), "percentile by task")}</div>'


def _spread(values: np.ndarray) -> tuple[float, float, float] | None:
    return (values.mean() / 100, values.min() / 100, values.max() / 100) if len(values) else None


def best_section(rows: list[dict]) -> str:
    """The best program of each task, as it was written."""
    out = ""
    for task in tasks_of(rows):
        turns = [
            (rank, text)
            for r in rows if r["task"] == task
            for rank, text in zip(r["ranks"], r["texts"], strict=True) if known(rank)
        ]  # fmt: skip
        best = max(turns, key=lambda turn: turn[0], default=None)
        title = f"{task}: " + ("no valid program" if best is None else f"percentile {100 * best[0]:.1f}")
        out += details(title, "" if best is None else best[1])
    return out or MISSING


def cost_section(run: core.Run) -> str:
    """Computing seconds in the sandbox by purpose, trajectories by judge, time on the clock."""
    workers, steps, seconds = run.last("worker_time/"), run.last("steps/"), run.last("time/")
    if not workers and not seconds:
        return MISSING
    rows = [[f"sandbox: {word}", f"{workers[f'{name}_s']:,.0f} s"] for name, word in _SECONDS.items() if f"{name}_s" in workers]
    judged = (("real", "programs judged by the sandbox"), ("imagined", "programs judged by the world model"))
    rows += [[word, f"{int(steps[kind]):,}"] for kind, word in judged if kind in steps]
    phases = {k.removesuffix("_s"): v for k, v in seconds.items() if k != "total_s"}
    figure = image(plots.bars(phases, "Wall time by phase", "seconds"), "time by phase") if phases else ""
    return table(["training", ""], rows) + f'<div class="wide">{figure}</div>'


def tiles(run: core.Run, before: list[dict], after: list[dict]) -> str:
    shown = []
    held = [[graded(r, t) for t, h in tasks_of(r).items() if h] for r in (before, after)]
    if any(held):
        pair = " → ".join(f"{np.mean([v.mean() for v in kept if len(v)]):.1f}" if any(map(len, kept)) else "?" for kept in held)
        shown.append((pair, "held-out percentile before → after"))
    shown.append((f"{max((r['step'] for r in run.metrics), default=0):,}", "policy updates"))
    for name in ("sandbox_anchors", "sandbox_evaluation"):
        if f"{name}_s" in run.last("worker_time/"):
            shown.append((f"{run.last('worker_time/')[f'{name}_s']:,.0f} s", f"sandbox, {_SECONDS[name]}"))
    if "total_s" in run.last("time/"):
        shown.append((clock(run.last("time/")["total_s"]), "wall time"))
    return tiled(shown)


def trajectories(folder: str | Path) -> list[dict]:
    """The last evaluation of a run: of the trained policy, else of `research eval`, else of the policy before training."""
    names = ("eval_after.jsonl", "trajectories.jsonl", "eval_before.jsonl")
    return next((rows for name in names if (rows := read_jsonl(Path(folder) / name))), [])


def render(folder: str | Path) -> str:
    """The page as HTML text. Raises UserError for a folder that is no run of research."""
    run = core.Run.read(folder)
    before, last = run.before, trajectories(folder)
    after = [] if last == before else last
    ours = all({"percentile", "held_out", "ranks"} <= set(r) for r in before + last) and (run.metrics or last)
    require(ours, f"{folder} holds no run of `vla-wmrl research train` or `research eval`")
    arm = run.config.get("arm") or next((r["arm"] for r in after), "run")
    facts = [f"seed {run.config.get('seed', next((r['seed'] for r in after), '?'))}"]
    facts += [str(run.sessions[0].get("started", "")), f"{len(run.sessions)} session(s)"] if run.sessions else []
    return page(f"{arm} on AutoResearch", facts, tiles(run, before, after), [
        ("Percentile on the boards", percentile_section(before, after)),
        ("Best programs", best_section(last)),
        ("In the model and for real", core.curves_section(run)),
        ("Calibration of the world model", core.calibration_section(run)),
        ("Residuals, weights and losses", core.generic_section(run)),
        ("What it cost", cost_section(run)),
        ("Configuration, versions", core.records_section(run)),
    ])  # fmt: skip


def write(folder: str | Path) -> Path:
    """Write `<folder>/report.html` and return its path."""
    return save(folder, render(folder))
