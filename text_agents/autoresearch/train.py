"""`vla-wmrl research train`: builds the objects of a run around the core's loop, evaluates before and after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from text_agents.autoresearch import embedded, report
from text_agents.autoresearch.analysis import reports
from text_agents.autoresearch.commands import leaderboard, make_sandbox, summarise, task_names
from text_agents.autoresearch.execute import brief
from text_agents.autoresearch.fidelity import read_rows
from text_agents.autoresearch.judges import PastOutcomes, Predictor, SandboxJudge, WorldJudge
from text_agents.autoresearch.players import Roller, make_player
from text_agents.autoresearch.rollouts import Judged, ResearchTask, prepare
from text_agents.autoresearch.sandbox import Sandbox
from text_agents.autoresearch.tasks import load_task
from text_agents.autoresearch.train_config import OutcomeModelConfig, ResearchTrainConfig
from vla_wmrl import checkpoint
from vla_wmrl.errors import require
from vla_wmrl.learner import Learner
from vla_wmrl.progress import Progress
from vla_wmrl.report import write_calibration
from vla_wmrl.streams import make_debias, make_fusion
from vla_wmrl.tracking import JsonLines, Ledger, TensorBoardSink, Tracker, WandbSink, start_run, write_json
from vla_wmrl.train import Loop
from vla_wmrl.train import train as run_loop
from vla_wmrl.types import Start

_STARTS, _EVALUATION = 0x7A5C, 0xE7A1  # streams of the random numbers


class TaskStarts:
    """A group begins at a task. Which ones depends on (seed, step) alone; none comes twice before all have come."""

    def __init__(self, numbers: Sequence[int], seed: int):
        self.numbers, self.seed = list(numbers), seed

    def draw(self, step: int, n: int) -> list[Start]:
        rng = np.random.default_rng([_STARTS, self.seed, step])
        order: list[int] = []
        while len(order) < n:
            order += [self.numbers[i] for i in rng.permutation(len(self.numbers))]
        return [Start(task_id=number, init_id=step * n + i) for i, number in enumerate(order[:n])]

    def observe(self, starts: Sequence[Start], contrast: Sequence[bool]) -> None:
        """Nothing depends on how groups went."""


def reward_of(rollout: Judged) -> float:
    """NaN where it is absent."""
    return float("nan") if rollout.reward is None else rollout.reward


def make_predictor(cfg: OutcomeModelConfig, tasks: Sequence[ResearchTask]) -> Predictor:
    """The world model of a config. Past executions of held-out tasks are never fitted on."""
    if cfg.kind == "language":
        from text_agents.autoresearch.backends import language_backend
        from vla_wmrl.world_model.language import LanguageWorldModel

        return LanguageWorldModel(language_backend(cfg.path, cfg.url), max_tokens=cfg.max_tokens)
    rows = read_rows(cfg.data)
    rows = rows[~rows["held_out"]].reset_index(drop=True)
    require(rows["task"].nunique() >= cfg.folds, f"{cfg.data} has fewer training tasks than world_model.folds={cfg.folds}")
    return PastOutcomes(rows, [t.name for t in tasks if not t.held_out], cfg.folds, cfg.form)


class Run:
    """One training run: folder, sandbox, loop, and what happens around the updates."""

    def __init__(self, cfg: ResearchTrainConfig, tasks: Tasks, sandbox: Sandbox):
        self.cfg, self.tasks, self.judged = cfg, tasks.all, tasks.judged
        torch.manual_seed(cfg.seed)
        predictor = None if cfg.world_model.kind == "none" else make_predictor(cfg.world_model, tasks.all)
        names = {"tasks": [t.name for t in tasks.training], "evaluated": [t.name for t in tasks.judged]}
        player = make_player(cfg, self.tasks, sandbox.limits)
        self.policy = player.policy
        self.sandbox = SandboxJudge(sandbox, cfg.memory or Path(cfg.output_dir) / "outcomes.jsonl", cfg.mode)
        self.folder = start_run(cfg.output_dir, cfg, {"command": "research train", **names})
        self.real = Roller(player, self.sandbox, "real", cfg.anchors.lag > 0)
        told = reports([t.name for t in tasks.training], sandbox) if cfg.world_model.kind == "language" else {}
        self.world = None if predictor is None else WorldJudge(predictor, brief(sandbox.limits), told, cfg.mode)
        imagine = None if self.world is None else Roller(player, self.world, "imagined")
        self.loop = Loop(
            cfg=cfg, learner=Learner(self.policy, cfg.grpo), starts=TaskStarts([t.number for t in tasks.training], cfg.seed),
            execute=self.real, imagine=imagine, reward=reward_of, debias=make_debias(cfg),
            fusion=make_fusion(cfg), ledger=Ledger(), lag=cfg.anchors.lag,
            grade=self.grade if self.world is not None and cfg.anchors.pairs == "executed" else None,
        )  # fmt: skip

    def grade(self, group: Sequence[Judged]) -> np.ndarray:
        return self.world.grade(self.tasks, group)

    def state_dict(self, step: int) -> dict:
        counts = {"seconds": self.sandbox.seconds, "asked": self.sandbox.asked, "ran": self.sandbox.ran}
        world = {} if self.world is None else self.world.state_dict()
        return {"step": step, "loop": self.loop.state_dict(), "sandbox": counts, "world": world, "rng": checkpoint.rng_state()}

    def load(self) -> int:
        """Restores the newest checkpoint, if the run has one; returns the updates done."""
        latest = checkpoint.latest(self.folder) if self.cfg.resume else None
        if latest is None:
            return 0
        state = checkpoint.load(latest)
        self.loop.load_state_dict(state["loop"])
        for name, value in state["sandbox"].items():
            setattr(self.sandbox, name, value)
        if self.world is not None:
            self.world.load_state_dict(state.get("world", {"learnt": []}), self.tasks)
        checkpoint.set_rng_state(state["rng"])
        return int(state["step"])

    def evaluate(self, name: str) -> list[dict]:
        """Trajectories of the policy on the evaluation tasks, all real; a JSON line each in `<name>.jsonl`."""
        cfg, path = self.cfg, self.folder / f"{name}.jsonl"
        path.unlink(missing_ok=True)  # of an evaluation that was interrupted: with the memory it costs nothing to repeat
        rows: list[dict] = []
        with self.loop.ledger.phase("evaluation"), Progress(len(self.judged), name.replace("_", " ")) as bar:
            file = JsonLines(path)
            for task in self.judged:
                started, before = time.monotonic(), self.sandbox.seconds
                start = Start(task_id=task.number, init_id=0)
                [group] = self.real.groups([start], cfg.eval.episodes, (_EVALUATION, cfg.seed))
                wall = time.monotonic() - started
                self.loop.ledger.add_worker_seconds("sandbox_evaluation", self.sandbox.seconds - before)
                for r in group:
                    rows.append({
                        "arm": cfg.arm, "seed": cfg.seed, "task": task.name, "held_out": task.held_out, "member": r.member,
                        "percentile": r.percentile, "reward": r.reward, "statuses": [v.status for v in r.verdicts],
                        "ranks": [v.rank for v in r.verdicts], "sandbox_s": r.seconds, "wall_s": wall / len(group),
                        "texts": list(r.texts),
                    })  # fmt: skip
                    file.write(rows[-1])
                bar.update(1, task.name)
            file.close()
        print(leaderboard(summarise(rows)))
        return rows

    def after(self, step: int, metrics: dict[str, float]) -> None:
        """After update `step`: account for the sandbox, log, save."""
        ledger = self.loop.ledger
        ledger.add_worker_seconds("sandbox_anchors", sum(r.seconds for r in self.loop.executed))
        if self.cfg.world_model.learn and self.world is not None and self.loop.executed:
            self.world.learn(self.tasks, self.loop.executed)
        metrics |= ledger.metrics() | {"sandbox/asked": self.sandbox.asked, "sandbox/ran": self.sandbox.ran}
        if self.world is not None:
            metrics |= {f"wm/{name}": float(count) for name, count in self.world.counts().items()}
        self.tracker.log(step, metrics)
        shown = ("reward/env_mean", "reward/wm_mean", "calib/spearman")
        self.bar.update(1, ", ".join(f"{k} {metrics[k]:.2f}" for k in shown if np.isfinite(metrics.get(k, np.nan))))
        if step % self.cfg.save_every == 0 or step == self.cfg.steps:
            with ledger.phase("checkpoint"):
                checkpoint.save(self.folder, step, self.state_dict(step), self.cfg.keep_checkpoints)

    def run(self) -> None:
        cfg = self.cfg
        done = self.load()
        if self.world is not None and done == 0:
            self.loop.ledger.add_worker_seconds("sandbox_past", getattr(self.world.predictor, "seconds", 0.0))
        if cfg.eval.before and done == 0:
            self.evaluate("eval_before")
        log = cfg.log
        sinks = [TensorBoardSink(self.folder, done + 1)] if log.tensorboard else []
        sinks += [WandbSink(self.folder, log.wandb_project)] if log.wandb else []
        self.tracker = Tracker(self.folder, done, tuple(sinks))
        with Progress(cfg.steps, f"policy updates ({cfg.arm})", done=done) as self.bar:
            run_loop(self.loop, done, self.after)
        self.tracker.close()
        for begun in self.loop.late.waiting:  # no update is left for them, but they were asked for, and cost what they cost
            seconds = sum(r.seconds for group in begun.executing.result() for r in group)
            self.loop.ledger.add_worker_seconds("sandbox_anchors", seconds)
        self.policy.save(self.folder / "policy")
        if self.loop.debias is not None:
            write_calibration(self.folder / "calibration.json", self.loop.debias)
        if cfg.eval.after:
            self.evaluate("eval_after")
        write_json(self.folder / "ledger.json", self.loop.ledger.metrics())
        print(f"report: {report.write(self.folder)}")

    def close(self) -> None:
        self.real.close()
        self.sandbox.close()


@dataclass(frozen=True)
class Tasks:
    """Tasks of a run, numbered by their place in `all`."""

    all: list[ResearchTask]
    training: list[ResearchTask]
    judged: list[ResearchTask]


def collect_tasks(cfg: ResearchTrainConfig) -> Tasks:
    """The tasks of training and evaluation. Raises UserError where a held-out task would be trained on."""
    training, judged = task_names(cfg.tasks), task_names(cfg.eval.tasks)
    for name in training:
        require(not embedded.source(name).held_out, f"task {name} is held out: it may not be trained on")
    names = list(dict.fromkeys([*training, *judged]))
    tasks = [embedded.load(name, embedded.cache_folder()) for name in names] + [load_task(d) for d in cfg.eval.task_dirs]
    held = [embedded.source(name).held_out for name in names] + [True] * len(cfg.eval.task_dirs)
    found = prepare(tasks, held, cfg.mode)
    own = {t.name for t in found[len(names) :]}
    require(len({t.name for t in found}) == len(found), "two tasks have the same name: rename one of eval.task_dirs")
    return Tasks(found, [t for t in found if t.name in training], [t for t in found if t.name in {*judged, *own}])


def train(cfg: ResearchTrainConfig) -> int:
    """Runs `cfg` to its end; with --resume, from the newest checkpoint of its folder."""
    tasks = collect_tasks(cfg)
    with make_sandbox({t.name: t.task.public for t in tasks.all}, cfg.sandbox) as sandbox:
        run = Run(cfg, tasks, sandbox)
        try:
            run.run()
        finally:
            run.close()
    return 0
