"""`vla-wmrl research {tasks,run,train,eval,fidelity,world,report}`: arguments in, tables out. Heavy imports come late."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from text_agents.autoresearch import config
from text_agents.autoresearch.train_config import ResearchTrainConfig
from text_agents.autoresearch.world_config import WorldTrainConfig
from vla_wmrl import arguments
from vla_wmrl.errors import nearest, require
from vla_wmrl.tracking import plain, write_json

COMMANDS: dict[str, type] = {
    "tasks": config.ResearchTasksConfig,
    "run": config.ResearchRunConfig,
    "train": ResearchTrainConfig,
    "eval": config.ResearchEvalConfig,
    "fidelity": config.ResearchFidelityConfig,
    "world": WorldTrainConfig,
    "report": config.ResearchReportConfig,
}


def usage() -> str:
    lines = ["usage: vla-wmrl research COMMAND [--config_path=FILE.yaml] [--key=value ...]", "", "commands:"]
    lines += [f"  {name:9s}{(cls.__doc__ or '').strip()}" for name, cls in COMMANDS.items()]
    return "\n".join([*lines, "", "`vla-wmrl research COMMAND --help` lists its keys."])


def run(argv: Sequence[str]) -> int:
    """Exit code of one command. Raises UserError for mistakes."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, rest = argv[0], list(argv[1:])
    require(name in COMMANDS, f"unknown command research {name!r}{nearest(name, list(COMMANDS))}")
    cls = COMMANDS[name]
    if "--help" in rest or "-h" in rest:
        print(arguments.help_text(cls, f"research {name}"))
        return 0
    if name in ("train", "world"):
        return train(cls, rest)
    cfg = arguments.load(cls, rest)
    return {"tasks": tasks, "run": run_one, "eval": evaluate, "fidelity": fidelity, "report": report}[name](cfg)


def train(cls: type, argv: Sequence[str]) -> int:
    """Train from arguments; a resumed run keeps its own config, less what may change."""
    from vla_wmrl import cli

    _, texts = arguments.read_command_line(argv)
    saved = Path(texts.get("output_dir", "")) / "config.yaml"
    resumed = texts.get("resume", "false").lower() == "true" and "output_dir" in texts and saved.is_file()
    cfg = cli.resume_config(cls, argv, saved) if resumed else arguments.load(cls, argv)
    cli.check_output_dir(cfg.output_dir, cfg.resume)
    if cls is WorldTrainConfig:
        from text_agents.autoresearch import world_training as training
    else:
        from text_agents.autoresearch import train as training

    return training.train(cfg)


def tasks(cfg: config.ResearchTasksConfig) -> int:
    from text_agents.autoresearch import bike_sharing, embedded
    from text_agents.autoresearch.tasks import load_task

    if cfg.task_dir is not None:
        task = load_task(cfg.task_dir, cfg.metric)
        direction = "higher" if task.metric.higher_is_better else "lower"
        sizes = ", ".join(f"{len(b)} ({n})" for n, b in task.boards.items())
        boards = f"boards of {sizes}" if sizes else f"no board: ranked from {task.baseline:g} to {task.best:g}"
        print(f"{task.name}: {task.kind}, {task.metric.name} ({direction} is better), {len(task.answers)} test rows, {boards}")
        print(task.inventory())
        return 0
    made = Path(cfg.output_dir) if cfg.output_dir is not None else None
    require(made is None or not made.exists() or made.is_dir(), f"output_dir {made} is a file: name a folder")
    if cfg.bike_sharing is not None:
        print(f"written: {bike_sharing.build(cfg.bike_sharing, cfg.output_dir)}")
        return 0
    for source in map(embedded.source, embedded.NAMES):
        split = "held out" if source.held_out else "train"
        print(f"{source.name:20s} {split:9s} {source.kind:11s} {source.metric:9s} {source.title}")
        if cfg.output_dir is not None:
            embedded.build(source.name, cfg.output_dir)
    if cfg.output_dir is not None:
        print(f"written: {cfg.output_dir}")
    return 0


def limits_of(sandbox: config.SandboxConfig):
    from text_agents.autoresearch.sandbox import Limits

    return Limits(cpu_s=sandbox.cpu_s, wall_s=sandbox.wall_s, memory_mb=sandbox.memory_mb, processes=sandbox.processes,
                  disk_mb=sandbox.disk_mb)  # fmt: skip


def make_sandbox(public: Mapping[str, Path], section: config.SandboxConfig):
    """The sandbox of a config, for tasks by name. Raises UserError where there is no bubblewrap, or no Ray that answers."""
    if section.pool == "ray":
        from text_agents.autoresearch.sandbox_ray import RaySandbox

        return RaySandbox(public, limits_of(section), section.workers, address=section.ray_address)
    from text_agents.autoresearch.sandbox import Sandbox

    return Sandbox(public, limits_of(section), section.workers)


def run_one(cfg: config.ResearchRunConfig) -> int:
    from text_agents.autoresearch import embedded, scoring
    from text_agents.autoresearch.execute import execute
    from text_agents.autoresearch.render import code_facts, facts_of
    from text_agents.autoresearch.tasks import load_task

    path = Path(cfg.file)
    require(path.is_file(), f"no file {path}")
    text = path.read_text(encoding="utf-8", errors="replace")
    task = load_task(cfg.task_dir, cfg.metric) if cfg.task_dir else embedded.load(cfg.task, embedded.cache_folder())
    mode = "pipeline" if path.suffix == ".json" else "code"
    facts = facts_of(task) if mode == "pipeline" else code_facts(task)
    with make_sandbox({task.name: task.public}, cfg.sandbox) as sandbox:
        done = execute(task, facts, [f"```python\n{text}\n```" if mode == "code" else text], mode, sandbox)[0]
    if cfg.show_code:
        print(done.code)
    print(f"status   {done.status}\nreward   {done.reward:.4f}\nfeedback {done.feedback}")
    if done.status == "valid":
        print(f"medal    {done.medal or 'none'}")
        for name, board in task.boards.items():
            print(f"{name} board\n{scoring.around(done.score, board, task.metric.higher_is_better)}")
    print(f"sandbox  {done.sandbox_s:.2f} s ({done.cpu_s:.2f} s of computing)")
    return 0


def evaluate(cfg: config.ResearchEvalConfig) -> int:
    from text_agents.autoresearch import embedded
    from text_agents.autoresearch.episode import run_group
    from text_agents.autoresearch.tasks import load_task

    chosen = task_names(cfg.tasks)
    folder = Path(cfg.output_dir)
    require(not folder.exists() or folder.is_dir(), f"output_dir {folder} is a file: name a folder")
    path = folder / "trajectories.jsonl"
    require(cfg.resume or not path.exists(), f"output_dir {folder} holds results: continue with --resume, or name another")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    found = {name: (embedded.load(name, embedded.cache_folder()), embedded.source(name).held_out) for name in chosen}
    found |= {task.name: (task, True) for task in (load_task(d) for d in cfg.task_dirs)}
    done = {r["task"] for r in rows}
    agent = make_agent(cfg, [task for task, _ in found.values()])
    folder.mkdir(parents=True, exist_ok=True)
    with make_sandbox({n: t.public for n, (t, _) in found.items()}, cfg.sandbox) as sandbox:
        for number, (name, (task, held_out)) in enumerate(found.items(), 1):
            if name in done:
                continue
            started = time.monotonic()
            group = run_group(task, agent, cfg.episodes, sandbox, cfg.mode, cfg.turns)
            wall = time.monotonic() - started
            new = [
                {"arm": cfg.agent, "seed": cfg.seed, "task": name, "held_out": held_out, "member": t.member,
                 "percentile": t.percentile, "reward": t.reward, "statuses": [x.status for x in t.turns],
                 "scores": [x.score for x in t.turns], "ranks": [x.rank for x in t.turns],
                 "sandbox_s": t.sandbox_s, "wall_s": wall / len(group),
                 "texts": t.texts}
                for t in group
            ]  # fmt: skip
            with path.open("a", encoding="utf-8") as f:  # a task at a time: what is there after an interruption is whole
                f.write("".join(json.dumps(plain(row)) + "\n" for row in new))
            rows += new
            print(f"[{number}/{len(found)}] {name}: percentile {_mean(new, 'percentile'):.1f}, {wall:.1f} s", flush=True)
    summary = summarise(rows)
    write_json(folder / "summary.json", summary)
    print(leaderboard(summary))
    for line in shortened(agent):
        print(line)
    return 0


def shortened(agent) -> list[str]:
    """What became of conversations beyond the context of a chat model: nothing of it may pass in silence."""
    counts, refused = getattr(agent, "counts_", {}), getattr(getattr(agent, "model", None), "too_long", 0)
    told = {
        "turns are malformed: the task alone is longer than the model's context": counts.get("too_long", 0),
        "turns are malformed: the server refused the conversation as too long": refused,
        "earlier turns were left out of conversations that outgrew the model's context": counts.get("left_out", 0),
    }
    return [f"{n} {what}" for what, n in told.items() if n]


def make_agent(cfg: config.ResearchEvalConfig, tasks: Sequence):
    """The agent of a config; `tasks` are those it will be asked about."""
    if cfg.agent == "chat":
        from text_agents.autoresearch.backends import language_backend
        from text_agents.autoresearch.chat_agent import ChatAgent

        return ChatAgent(language_backend(cfg.model, cfg.url), cfg.max_tokens)
    if cfg.agent == "policy":
        from text_agents.autoresearch.policy_agent import PolicyAgent
        from text_agents.autoresearch.render import facts_of
        from text_agents.autoresearch.spec_policy import SpecPolicy, task_vector

        vectors = {task.name: task_vector(task, facts_of(task)) for task in tasks}
        return PolicyAgent(SpecPolicy.load(cfg.policy), vectors, cfg.seed)
    from text_agents.autoresearch.episode import SpecAgent

    return SpecAgent(cfg.agent, cfg.seed)


def task_names(names: Sequence[str]) -> list[str]:
    from text_agents.autoresearch import embedded

    groups = {
        "train": [n for n in embedded.NAMES if not embedded.source(n).held_out],
        "held_out": [n for n in embedded.NAMES if embedded.source(n).held_out],
        "all": list(embedded.NAMES),
    }
    found: list[str] = []
    for name in names:
        require(
            name in groups or name in embedded.NAMES,
            f"unknown task {name!r}{nearest(name, [*embedded.NAMES, *groups])}",
        )
        found += groups.get(name, [name])
    return list(dict.fromkeys(found))


def known(value: float | None) -> bool:
    """Whether there is a value: ungraded is NaN in memory and null in files."""
    return value is not None and value == value


def _mean(rows: Sequence[dict], name: str) -> float:
    values = [r[name] for r in rows if known(r[name])]
    return sum(values) / len(values) if values else float("nan")


def summarise(rows: Sequence[dict]) -> list[dict]:
    """A row a task: mean percentile over its graded trajectories, their number, and the seconds of all of them."""
    summary = []
    for name in dict.fromkeys(r["task"] for r in rows):
        own = [r for r in rows if r["task"] == name]
        summary.append({
            "arm": own[0]["arm"], "seed": own[0]["seed"], "task": name, "held_out": own[0]["held_out"],
            "percentile": _mean(own, "percentile"), "n": sum(known(r["percentile"]) for r in own),
            "sandbox_s": sum(r["sandbox_s"] for r in own), "wall_s": sum(r["wall_s"] for r in own),
        })  # fmt: skip
    return summary


def leaderboard(summary: Sequence[dict]) -> str:
    lines = [f"{'task':22s} {'split':9s} {'percentile':>10s} {'n':>4s} {'sandbox s':>10s}"]
    for row in sorted(summary, key=lambda r: (r["held_out"], -r["percentile"])):
        split = "held out" if row["held_out"] else "train"
        lines.append(f"{row['task']:22s} {split:9s} {row['percentile']:10.1f} {row['n']:4d} {row['sandbox_s']:10.1f}")
    for held_out, split in ((False, "train"), (True, "held out")):
        part = [r for r in summary if r["held_out"] == held_out]
        if part:
            seconds, n = sum(r["sandbox_s"] for r in part), sum(r["n"] for r in part)
            lines.append(f"{'mean':22s} {split:9s} {_mean(part, 'percentile'):10.1f} {n:4d} {seconds:10.1f}")
    return "\n".join(lines)


def fidelity(cfg: config.ResearchFidelityConfig) -> int:
    from text_agents.autoresearch import fidelity as harness

    rows = harness.read_rows(cfg.data)
    if cfg.per_task is not None:
        rows = rows.groupby("task", sort=False).head(cfg.per_task).reset_index(drop=True)
    cases = harness.cases_of(rows)
    names = list(dict.fromkeys(["majority", "complexity", *cfg.predictor]))
    predictors = dict(harness.PREDICTORS)
    if "language" in names:
        from text_agents.autoresearch.backends import language_backend

        predictors["language"] = harness.fit_language(language_backend(cfg.model, cfg.url), cfg.max_tokens)
    protocols = {"leave_one_task_out": harness.across_tasks}
    if rows["held_out"].any() and not rows["held_out"].all():
        protocols["held_out_tasks"] = harness.held_out
    content: dict[str, object] = {"data": Path(cfg.data).name, "solutions": len(rows), "tasks": int(rows["task"].nunique())}
    for protocol, predict in protocols.items():
        keep = rows["held_out"].to_numpy(bool) if protocol == "held_out_tasks" else [True] * len(rows)
        table: dict[str, dict] = {}
        for name in names:
            predictions = [p for p, k in zip(predict(predictors[name], rows, cases), keep, strict=True) if k]
            found = harness.judged(rows[keep], predictions)
            table[name] = {"figures": harness.figures(rows[keep], predictions)}
            table[name]["intervals"] = found.intervals(cfg.bootstrap) if found and cfg.bootstrap else {}
        content[protocol] = table
        print(f"{protocol}: {sum(keep)} solutions of {rows[keep]['task'].nunique()} tasks")
        print(f"{'':30s}" + "".join(f"{name:>22s}" for name in names))
        for key in table[names[0]]["figures"]:
            print(f"{key:30s}" + "".join(f"{_with_interval(table[name], key):>22s}" for name in names))
    if cfg.output is not None:
        write_json(cfg.output, content)
    return 0


def _with_interval(entry: dict, key: str) -> str:
    value, bounds = entry["figures"].get(key, float("nan")), entry["intervals"].get(key)
    return f"{value:.3f}" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def report(cfg: config.ResearchReportConfig) -> int:
    from text_agents.autoresearch import report as pages

    path = pages.write(cfg.output_dir)
    print(leaderboard(summarise(pages.trajectories(cfg.output_dir))))
    print(f"report: {path}")
    return 0
