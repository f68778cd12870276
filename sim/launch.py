"""`vla-wmrl train`: builds the objects of a run, evaluates before and after, and lets the loop do the rest."""

from __future__ import annotations

import os

import numpy as np
import torch

from sim.compose import env_spec, make_pool, policy_ref
from sim.dreams import DreamtStarts
from sim.evaluate import EvalPlan, evaluate, save_video, show, summary
from sim.execute import GroupExecutor, collect
from sim.imagine import WorldModelRuntime, task_specs
from sim.protocol import CONTROL_HZ, SETTLE_STEPS, describe
from sim.rewards import branch_margin, branch_reward, episode_reward, mark, passes_next
from sim.starts import BranchStarts, EpisodeStarts
from sim.twins import TwinJob
from sim.workers import Pool
from vla_wmrl import checkpoint, report
from vla_wmrl.config import TrainConfig
from vla_wmrl.learner import Learner
from vla_wmrl.progress import Progress
from vla_wmrl.streams import make_debias, make_fusion
from vla_wmrl.tracking import Ledger, TensorBoardSink, Tracker, WandbSink, start_run, write_json
from vla_wmrl.train import Loop
from vla_wmrl.train import train as run_loop


class Run:
    """One training run: folder, pool, loop, and what happens around the updates."""

    def __init__(self, cfg: TrainConfig, pool: Pool):
        from sim.doctor import versions

        self.cfg, self.pool = cfg, pool
        torch.manual_seed(cfg.seed)
        np.random.seed(cfg.seed)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # the simulators need the rest; waiting threads spin
        manifest = {"command": "train", "protocol": describe(cfg.env.suite), "overlap": cfg.overlap(), **versions()}
        self.folder = start_run(cfg.output_dir, cfg, manifest)
        self.specs = {task: env_spec(cfg.env, task) for task in cfg.env.task_ids}
        self.ref = policy_ref(cfg.policy)
        self.policy = self.ref.build()
        learner = Learner(self.policy, cfg.grpo)
        tasks = task_specs(pool, self.specs)
        self.conjuncts = {task: len(spec.goal) for task, spec in tasks.items()}
        self.executor = GroupExecutor(
            pool, self.specs, self.ref, learner, cfg.groups, self.folder, self.conjuncts, cfg.env.max_steps
        )
        branch = cfg.groups.kind == "branch"
        self.starts = (
            BranchStarts(cfg.env.task_ids, cfg.seed)
            if branch
            else EpisodeStarts(cfg.env.task_ids, cfg.env.train_inits, cfg.env.train_split, cfg.seed)
        )
        imagined = cfg.world_model.kind != "none"
        self.world = WorldModelRuntime(cfg, tasks, self.policy, pool, self.executor.publish, self.folder) if imagined else None
        dreams = imagined and cfg.groups.dream_resets > 0
        self.dreams = DreamtStarts(cfg, self.world, pool, self.conjuncts) if dreams else None
        self.loop = Loop(
            cfg=cfg, learner=learner, starts=self.starts, execute=self.executor, imagine=self.world,
            reward=branch_reward(cfg.groups.reward, self.conjuncts) if branch else episode_reward, debias=make_debias(cfg),
            fusion=make_fusion(cfg), ledger=Ledger(),
            score=branch_margin(self.conjuncts) if cfg.groups.score == "margin" else None, dreams=self.dreams,
        )  # fmt: skip

    # ---- state
    def state_dict(self, step: int) -> dict:
        state = {
            "step": step,
            "loop": self.loop.state_dict(),
            "starts": self.starts.state_dict(),
            "rng": checkpoint.rng_state(),
        }
        state |= {} if self.dreams is None else {"dreams": self.dreams.state_dict()}
        return state | ({} if self.world is None else {"world": self.world.state_dict()})

    def load(self) -> int:
        """Restores the newest checkpoint, if the run has one; returns the updates done."""
        latest = checkpoint.latest(self.folder) if self.cfg.resume else None
        if latest is None:
            return 0
        state = checkpoint.load(latest)
        self.loop.load_state_dict(state["loop"])
        self.starts.load_state_dict(state["starts"])
        if self.world is not None:
            self.world.load_state_dict(state["world"])
        if self.dreams is not None:
            self.dreams.load_state_dict(state["dreams"])
        checkpoint.set_rng_state(state["rng"])
        return int(state["step"])

    # ---- phases
    def evaluate(self, name: str, videos: int) -> list[dict]:
        """Success on the official initial states with the deterministic sampler; rows in `<name>.jsonl`."""
        cfg = self.cfg
        policy = self.executor.publish()
        plan = EvalPlan(
            specs=tuple(self.specs.values()), init_ids=tuple(cfg.eval.ids(cfg.env.split)),
            policy=type(policy)(**{**policy.__dict__, "eta": 0.0}), seed=cfg.seed, max_steps=cfg.env.max_steps, videos=videos,
        )  # fmt: skip
        with self.loop.ledger.phase("evaluation"):
            rows = evaluate(plan, self.pool, self.folder, name, name.replace("_", " "))
        self.loop.ledger.add_real("evaluation", sum(r["steps"] for r in rows))
        table = summary(rows, len(plan.episodes()))
        write_json(self.folder / f"{name}.json", table)
        show(table, cfg.env.suite, f"{name.replace('_', ' ')}: official initial states")
        return rows

    def collect_starts(self) -> None:
        """Fills the bank of branch starts with rollouts of the policy that training starts from; the world model learns
        from them too."""
        cfg, ledger = self.cfg, self.loop.ledger
        ids = cfg.env.train_inits[: cfg.groups.start_episodes]
        with ledger.phase("starts"), Progress(len(ids) * len(self.specs), "branch starts") as bar:
            recorded = collect(self.pool, self.specs, self.executor.publish(), ids, cfg.env.train_split, cfg.seed,
                               cfg.groups.start_steps or cfg.env.max_steps, bar.update)  # fmt: skip
        ledger.add_real("starts", sum(len(r.trace.actions) for r in recorded))
        if self.dreams is not None:
            with ledger.phase("starts"):
                ledger.add_real("starts", SETTLE_STEPS * self.dreams.reset(self.specs))
        for r in recorded:
            goals = self.conjuncts[r.rollout.start.task_id]
            starts = mark(r.starts[: r.rollout.looks], r.rollout.progress, goals)
            self.starts.extend(starts)
            self.starts.observe(starts, passes_next(r.rollout.progress, goals, cfg.groups.looks))
        if self.world is not None:
            with ledger.phase("world_model"):
                self.world.observe([r.trace for r in recorded], [r.rollout for r in recorded])

    def after(self, step: int, metrics: dict[str, float]) -> None:
        """After update `step`: grow the bank and the world model, log, save."""
        cfg = self.cfg
        traces, reached = self.executor.drain()
        self.starts.extend(s for s in reached if s.progress < 1.0)
        if self.world is not None:
            with self.loop.ledger.phase("world_model"):
                self.world.observe(traces, [])
                if cfg.world_model.refit_every and step % cfg.world_model.refit_every == 0:
                    metrics |= {f"wm/{k}": v for k, v in self.world.refit().items()}
        if self.dreams is not None:
            self.loop.ledger.add_imagined("dreams", self.dreams.steps)
            self.dreams.steps = 0
            metrics |= self.dreams.metrics | self.loop.ledger.metrics()
        self.tracker.log(step, metrics)
        shown = ("reward/env_mean", "reward/wm_mean", "success/env", "success/wm")
        note = ", ".join(f"{k} {metrics[k]:.2f}" for k in shown if np.isfinite(metrics.get(k, np.nan)))
        self.bar.update(1, note)
        if step % cfg.save_every == 0 or step == cfg.steps:
            self.save(step)
        if cfg.eval.every and step % cfg.eval.every == 0 and step < cfg.steps:
            self.evaluate(f"eval_{step:05d}", 0)

    def film_twins(self) -> None:
        """Anchors of the last update beside what the world model imagined of them, `eval.videos` a task, in `videos/`."""
        films = [p for t in self.specs for p in [p for p in self.loop.pairs if p[0].start.task_id == t][: self.cfg.eval.videos]]
        films = [(real, twin) for real, twin in films if real.start.snapshot is not None]
        jobs = [TwinJob.of(self.specs[real.start.task_id], real, twin) for real, twin in films]
        for i, (job, frames) in enumerate(zip(jobs, self.pool.map(jobs), strict=True)):
            name = f"real_imagined_error_{i}_task{job.spec.task_id}_init{job.start.init_id}_look{job.start.look}"
            save_video(self.folder, name, frames, CONTROL_HZ / self.policy.n_action_steps)

    def save(self, step: int) -> None:
        with self.loop.ledger.phase("checkpoint"):
            checkpoint.save(self.folder, step, self.state_dict(step), self.cfg.keep_checkpoints)

    def sinks(self, step: int) -> tuple:
        log = self.cfg.log
        sinks = [TensorBoardSink(self.folder, step + 1)] if log.tensorboard else []
        return (*sinks, *([WandbSink(self.folder, log.wandb_project)] if log.wandb else []))

    def run(self) -> None:
        cfg = self.cfg
        done = self.load()
        if cfg.eval.before and done == 0:
            self.evaluate("eval_before", cfg.eval.videos)
        if done == 0 and cfg.groups.kind == "branch":
            self.collect_starts()
        if done == 0 and self.world is not None:
            self.loop.ledger.add_real("world_model", self.world.real_steps)  # paid before this run, counted all the same
            with self.loop.ledger.phase("world_model"):
                self.world.fit()
        self.tracker = Tracker(self.folder, done, self.sinks(done))
        with Progress(cfg.steps, f"policy updates ({cfg.arm})", done=done) as self.bar:
            run_loop(self.loop, done, self.after)
        self.tracker.close()
        self.policy.save(self.folder / "policy")
        with self.loop.ledger.phase("videos"):
            self.film_twins()
        if self.loop.debias is not None:
            report.write_calibration(self.folder / "calibration.json", self.loop.debias)
        if cfg.eval.after:
            self.evaluate("eval_after", cfg.eval.videos)
        write_json(self.folder / "ledger.json", self.loop.ledger.metrics())
        print(f"report: {report.write(self.folder)}")


def train(cfg: TrainConfig) -> int:
    """Runs `cfg` to its end; with --resume, from the newest checkpoint of its folder."""
    with make_pool(cfg.workers) as pool:
        Run(cfg, pool).run()
    return 0
