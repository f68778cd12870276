"""report.html of a run folder: one self-contained page that asks nothing of the network.

Reads what is there, says "not recorded" for the rest:
* config.yaml, manifest.json, metrics.jsonl, ledger.json (the final ledger; without it the last row of metrics)
* eval_before.jsonl, eval_after.jsonl, eval_<update>.jsonl: a row an episode with task_id, init_id, success
* calibration.json: the fitted map "x" [n], "y" [n] and its "pairs" [m, 2] of (r_wm, r_env)
* videos/*.mp4 or *.gif
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
import yaml

from vla_wmrl import report_plots as plots
from vla_wmrl import stats
from vla_wmrl.config import EvalSection
from vla_wmrl.config_commands import ReportConfig
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.errors import require
from vla_wmrl.progress import clock
from vla_wmrl.report_html import MISSING, details, image, page, save, table, tiled
from vla_wmrl.tracking import read_jsonl, write_json

MAX_VIDEO_BYTES = 24 * 2**20  # of all videos in the page; the rest is listed

# Panels of the training curves: title, then metric -> (label, colour).
IN_MODEL = {
    "Success from the anchors' starts": {
        "wm/success_twins": ("world model, same starts and noise", plots.MODEL),
        "success/env": ("real", plots.REAL),
    },
    "Reward from the anchors' starts": {
        "wm/reward_twins": ("world model, same starts and noise", plots.MODEL),
        "reward/env_mean": ("real", plots.REAL),
    },
    "Reward, all groups": {
        "reward/wm_mean": ("world model", plots.MODEL),
        "reward/calibrated_mean": ("world model, calibrated", plots.CYCLE[2]),
        "reward/env_mean": ("real (anchors)", plots.REAL),
    },
    "Whole episodes in the world model (dreams)": {
        "dream/success": ("success", plots.MODEL),
        "dream/progress": ("best progress, mean", plots.CYCLE[3]),
    },
    "World model against anchors": {
        "calib/spearman": ("rank correlation", plots.REAL),
        "calib/residual": ("mean squared residual", plots.MODEL),
    },
}
GENERIC = (
    "fusion",
    "calib",
    "adv",
    "loss",
    "wm",
    "success",
    "anchors",
)  # other metrics, by prefix, in panels of like names


@dataclass
class Run:
    """A run folder, read. Parts that are missing are empty."""

    folder: Path
    config: dict = field(default_factory=dict)
    sessions: list[dict] = field(default_factory=list)
    metrics: list[dict] = field(default_factory=list)
    before: list[dict] = field(default_factory=list)
    after: list[dict] = field(default_factory=list)
    between: dict[int, list[dict]] = field(default_factory=dict)  # by policy update
    ledger: dict = field(default_factory=dict)
    calibration: dict = field(default_factory=dict)
    videos: list[Path] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        folder = Path(folder)
        require(folder.is_dir(), f"no run folder {folder}: name the output_dir of a run")
        config, manifest = folder / "config.yaml", folder / "manifest.json"
        fit, ledger = folder / "calibration.json", folder / "ledger.json"
        return cls(
            folder,
            (yaml.safe_load(config.read_text(encoding="utf-8")) or {}) if config.is_file() else {},
            json.loads(manifest.read_text(encoding="utf-8")).get("sessions", []) if manifest.is_file() else [],
            read_jsonl(folder / "metrics.jsonl"),
            read_jsonl(folder / "eval_before.jsonl"),
            read_jsonl(folder / "eval_after.jsonl"),
            {int(p.stem[5:]): read_jsonl(p) for p in folder.glob("eval_[0-9]*.jsonl")},
            json.loads(ledger.read_text(encoding="utf-8")) if ledger.is_file() else {},
            json.loads(fit.read_text(encoding="utf-8")) if fit.is_file() else {},
            sorted(p for p in (folder / "videos").glob("**/*") if p.suffix in (".mp4", ".gif")),
        )

    @property
    def tasks(self) -> list[int]:
        listed = self.config.get("env", {}).get("task_ids", [])
        return sorted({*listed, *(row["task_id"] for row in self.before + self.after)})

    @property
    def planned(self) -> int | None:
        """Episodes a task that each evaluation is meant to have; None where the config does not say."""
        section = self.config.get("eval")
        if section is None:
            return None
        known = {k: section[k] for k in ("episodes_per_task", "init_ids") if k in section}
        return len(EvalSection(**known).ids(self.config.get("env", {}).get("split", "train")))

    def series(self, name: str) -> plots.Series:
        rows = [(r["step"], r[name]) for r in self.metrics if isinstance(r.get(name), (int, float))]
        return [r[0] for r in rows], [float(r[1]) for r in rows]

    def last(self, prefix: str) -> dict[str, float]:
        """Last value of every metric under `prefix`, without the prefix."""
        found: dict[str, float] = {}
        for row in [*self.metrics, self.ledger]:
            found |= {k[len(prefix) :]: v for k, v in row.items() if k.startswith(prefix) and isinstance(v, (int, float))}
        return found


@dataclass(frozen=True)
class Rate:
    """Successes of n episodes; `planned` of them make it complete, and only then there is a rate."""

    successes: int
    n: int
    planned: int | None

    @property
    def complete(self) -> bool:
        return self.n > 0 and (self.planned is None or self.n >= self.planned)

    @property
    def interval(self) -> tuple[float, float, float] | None:
        return (self.successes / self.n, *stats.wilson(self.successes, self.n)) if self.complete else None

    def __str__(self) -> str:
        if self.n == 0:
            return "–"
        if not self.complete:
            return f"{self.n} of {self.planned} episodes run"
        rate, low, high = self.interval
        return f"{rate:.1%} [{low:.0%}, {high:.0%}] ({self.successes}/{self.n})"


def rate_of(rows: list[dict], task_id: int | None, planned: int | None, n_tasks: int = 1) -> Rate:
    kept = [r for r in rows if task_id is None or r["task_id"] == task_id]
    return Rate(sum(bool(r["success"]) for r in kept), len(kept), None if planned is None else planned * n_tasks)


def task_name(run: Run, task_id: int) -> str:
    rows = [r for r in run.after + run.before if r["task_id"] == task_id and r.get("task")]
    return f"{task_id}: {rows[0]['task']}" if rows else f"task {task_id}"


def paired(before: list[dict], after: list[dict]) -> str:
    """The change on initial states that both evaluations ran, with McNemar's exact p-value."""
    first = {(r["task_id"], r["init_id"]): bool(r["success"]) for r in before}
    second = {(r["task_id"], r["init_id"]): bool(r["success"]) for r in after}
    keys = sorted(first.keys() & second.keys())
    if not keys:
        return ""
    a, b = (np.array([rows[k] for k in keys]) for rows in (first, second))
    return (
        f"<p>Paired over {len(keys)} initial states: {int((b & ~a).sum())} gained, {int((a & ~b).sum())} lost, "
        f"change {100 * (b.mean() - a.mean()):+.1f} points, p = {stats.mcnemar(a, b):.2g} (exact McNemar).</p>"
    )


def change(before: Rate, after: Rate) -> str:
    if not (before.complete and after.complete):
        return "–"
    points = 100 * (after.successes / after.n - before.successes / before.n)
    return f'<span class="{"up" if points > 0 else "down" if points < 0 else ""}">{points:+.1f}</span>'


def success_section(run: Run) -> str:
    if not run.before and not run.after:
        return MISSING
    planned, rows, bars = run.planned, [], ([], [])
    for task_id in run.tasks:
        rates = [rate_of(rows_, task_id, planned) for rows_ in (run.before, run.after)]
        rows.append([escape(task_name(run, task_id)), *map(str, rates), change(*rates)])
        for kept, rate in zip(bars, rates, strict=True):
            kept.append(rate.interval)
    totals = [rate_of(rows_, None, planned, len(run.tasks)) for rows_ in (run.before, run.after)]
    rows.append(["all", *map(str, totals), change(*totals)])
    out = table(["task", "before", "after", "points"], rows, total=True) + paired(run.before, run.after)
    if any(b is not None for b in bars[0] + bars[1]):
        labels = [f"task {t}" for t in run.tasks]
        out += f'<div class="wide">{image(plots.success(labels, *bars), "success by task")}</div>'
    if run.between:
        last = max((r["step"] for r in run.metrics), default=0)
        found = {0: run.before, **run.between, **({last: run.after} if run.after else {})}
        rates = {u: rate_of(rows_, None, planned, len(run.tasks)) for u, rows_ in sorted(found.items())}
        points = {u: rate.successes / rate.n for u, rate in rates.items() if rate.complete}
        if points:
            curve = {"success": (list(points), list(points.values()))}
            figure = plots.lines(curve, "Success by evaluation", "policy update")
            out += f'<div class="wide">{image(figure, "evaluations")}</div>'
    return out


def curves_section(run: Run) -> str:
    found = []
    for title, names in IN_MODEL.items():
        series = {label: run.series(n) for n, (label, _) in names.items() if run.series(n)[0]}
        if series:
            found.append(image(plots.lines(series, title, "policy update", dict(names.values())), title))
    return f'<div class="plots">{"".join(found)}</div>' if found else MISSING


def calibration_section(run: Run) -> str:
    fit = run.calibration
    pairs = np.array([p for p in fit.get("pairs", []) if None not in p], float).reshape(-1, 2)
    if not len(pairs) and not fit.get("x"):
        return MISSING
    quality = ""
    if len(pairs):
        rank = stats.spearman(pairs[:, 0], pairs[:, 1])
        quality = f"<p>{len(pairs)} anchor pairs, rank correlation {rank:.2f}.</p>"
    figure = image(plots.calibration(fit.get("x", []), fit.get("y", []), pairs), "calibration curve")
    return f'{quality}<div class="wide" style="max-width:640px">{figure}</div>'


def generic_section(run: Run) -> str:
    taken = {name for names in IN_MODEL.values() for name in names}
    names = sorted({k for row in run.metrics for k in row} - taken)
    found = []
    for prefix in GENERIC:
        mine = [n for n in names if n.startswith(f"{prefix}/") and len(run.series(n)[0])]
        for group in _like_scales(run, mine):
            series = {n.split("/", 1)[1]: run.series(n) for n in group}
            title = prefix if len(series) > 1 else group[0]
            found.append(image(plots.lines(series, title, "policy update"), title))
    return f'<div class="plots">{"".join(found)}</div>' if found else MISSING


def _like_scales(run: Run, names: list[str]) -> list[list[str]]:
    """Metrics of one prefix, in panels of at most four whose values are within a factor of 30."""
    size = {n: float(np.nanmax(np.abs(run.series(n)[1]), initial=0.0)) for n in names}
    groups: list[list[str]] = []
    for name in sorted(names, key=lambda n: -size[n]):
        if groups and len(groups[-1]) < 4 and size[name] * 30 >= size[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def ledger_section(run: Run) -> str:
    steps, seconds = run.last("steps/"), run.last("time/")
    if not steps and not seconds:
        return MISSING
    rows = []
    for kind, word in (("real", "real control steps"), ("imagined", "imagined control steps")):
        parts = {k.removeprefix(f"{kind}_"): v for k, v in steps.items() if k.startswith(f"{kind}_")}
        rows += [[escape(f"{word}: {name.replace('_', ' ')}"), f"{int(n):,}"] for name, n in parts.items()]
        if kind in steps:
            rows.append([f"<b>{word}, all</b>", f"<b>{int(steps[kind]):,}</b>"])
    phases = {k.removesuffix("_s"): v for k, v in seconds.items() if k != "total_s"}
    out = table(["", "steps"], rows) if rows else ""
    if phases:
        out += f'<div class="wide">{image(plots.bars(phases, "Wall time by phase", "seconds"), "time by phase")}</div>'
    return out


def video_section(run: Run) -> str:
    if not run.videos:
        return MISSING
    shown, left, used = [], [], 0
    for path in run.videos:
        used += path.stat().st_size
        name = escape(str(path.relative_to(run.folder / "videos")))
        if used > MAX_VIDEO_BYTES:
            left.append(name)
            continue
        data = base64.b64encode(path.read_bytes()).decode()
        element = (
            f'<img alt="{name}" src="data:image/gif;base64,{data}">'
            if path.suffix == ".gif"
            else f'<video controls autoplay loop muted playsinline src="data:video/mp4;base64,{data}"></video>'
        )
        shown.append(f"<figure>{element}<figcaption>{name}</figcaption></figure>")
    more = f'<p class="soft">Not in the page, for its size: {", ".join(left)}.</p>' if left else ""
    return f'<div class="videos">{"".join(shown)}</div>{more}'


def records_section(run: Run) -> str:
    """Protocol, config and manifest, folded away."""
    protocol = run.sessions[-1].get("protocol") if run.sessions else None
    return (
        (details("Protocol", json.dumps(protocol, indent=1)) if protocol else "")
        + (details("config.yaml", yaml.safe_dump(run.config, sort_keys=False)) if run.config else MISSING)
        + (details("manifest.json", json.dumps(run.sessions, indent=1)) if run.sessions else MISSING)
    )


def tiles(run: Run) -> str:
    planned, n = run.planned, max(len(run.tasks), 1)
    before, after = (rate_of(rows, None, planned, n) for rows in (run.before, run.after))
    steps, seconds = run.last("steps/"), run.last("time/")
    training = sum(v for k, v in steps.items() if k.startswith("real_") and k != "real_evaluation")
    shown = []
    if before.complete or after.complete:
        pair = " → ".join(f"{r.interval[0]:.1%}" if r.complete else "?" for r in (before, after))
        shown.append((pair, f"success before → after, {change(before, after)} points"))
    shown.append((f"{max((r['step'] for r in run.metrics), default=0):,}", "policy updates"))
    if steps:
        shown.append((f"{int(training):,}", "real control steps of training"))
        shown.append((f"{int(steps.get('imagined', 0)):,}", "imagined control steps"))
    if "total_s" in seconds:
        shown.append((clock(seconds["total_s"]), "wall time"))
    return tiled(shown)


def render(run: Run) -> str:
    """The page as HTML text."""
    cfg, env = run.config, run.config.get("env", {})
    title = f"{cfg.get('arm', 'run')} on {env.get('suite', 'unknown suite')}"
    facts = [f"tasks {', '.join(map(str, run.tasks)) or '?'}", f"seed {cfg.get('seed', '?')}"]
    facts += [f"policy {Path(str(cfg.get('policy', {}).get('path', '?'))).name}"]
    facts += [str(run.sessions[0].get("started", "")), f"{len(run.sessions)} session(s)"] if run.sessions else []
    return page(title, facts, tiles(run), [
        ("Success", success_section(run)),
        ("In the model and for real", curves_section(run)),
        ("Calibration of the world model", calibration_section(run)),
        ("Residuals, weights and losses", generic_section(run)),
        ("What it cost", ledger_section(run)),
        ("Videos", video_section(run)),
        ("Protocol, configuration, versions", records_section(run)),
    ])  # fmt: skip


def write_calibration(path: Path, debias: IsotonicDebiaser) -> None:
    """The fitted map and its pairs, for the report."""
    scores = debias.pairs_[:, 0]
    x = np.linspace(min(0.0, *scores), max(1.0, *scores), 101) if len(scores) > 1 else np.linspace(0.0, 1.0, 101)
    write_json(path, {"x": x, "y": debias.transform(x), "pairs": debias.pairs_})


def write(folder: str | Path) -> Path:
    """Write `<folder>/report.html` and return its path. Raises UserError for a run of another command."""
    run = Run.read(folder)
    for row in run.before + run.after:
        mine = "task_id" in row and "success" in row
        require(mine, f"{folder} is no run of `vla-wmrl train`; those of research have `vla-wmrl research report`")
    return save(folder, render(run))


def main(cfg: ReportConfig) -> int:
    print(write(cfg.output_dir))
    return 0
