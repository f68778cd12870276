"""`vla-wmrl text rl`: builds the objects of a run around the core's loop, evaluates before and after.

Real groups run in the games (or tau2-bench's tasks), imagined ones in a language world model; anchors, calibration and fusion
are the core's. The policy is one network on one device, which reads for both: real groups run when the loop asks for their
results, not in a thread beside the imagined ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

from text_agents.deferred import Deferred
from text_agents.language_policy import LanguagePolicy, check_context
from text_agents.order import batch_of
from text_agents.rl.bench import AlfworldBench, Bench
from text_agents.rl.config import TextRlConfig
from text_agents.rl.episodes import EpisodeRollout, World, describe, roll
from text_agents.rl.evaluate import evaluate
from text_agents.rl.gigpo import step_advantages
from text_agents.rl.imagine import LanguageWorld
from text_agents.rl.imitate import Imitation
from text_agents.rl.rejection import RejectionSampling
from text_agents.rl.tau2_bench import Tau2Bench
from text_agents.served import make_engine
from vla_wmrl import checkpoint
from vla_wmrl.learner import Learner
from vla_wmrl.progress import Progress
from vla_wmrl.streams import make_debias, make_fusion
from vla_wmrl.tracking import Ledger, TensorBoardSink, Tracker, WandbSink, start_run, write_json
from vla_wmrl.train import Loop
from vla_wmrl.train import train as run_loop
from vla_wmrl.types import Start


class GameStarts:
    """A group begins at the opening of a game. Every pass over the games has an order of its own, by (seed, step) alone."""

    def __init__(self, n_games: int, seed: int):
        self.games, self.seed = range(n_games), seed

    def draw(self, step: int, n: int) -> list[Start]:
        drawn = batch_of(self.games, step, n, self.seed)
        return [Start(task_id=game, init_id=step * n + i) for i, game in enumerate(drawn)]


class Roller:
    """Groups of episodes in one world, as the loop asks for them. Keeps the latest, for metrics."""

    def __init__(self, policy: LanguagePolicy, world: World, cfg: TextRlConfig):
        self.policy, self.world, self.cfg = policy, world, cfg
        self.latest: list[EpisodeRollout] = []

    def groups(self, starts: Sequence[Start], size: int, seed: Sequence[int]) -> list[tuple[EpisodeRollout, ...]]:
        cfg = self.cfg
        limits = (cfg.model.max_new_tokens, cfg.model.max_prompt_tokens)
        groups = roll(self.policy, self.world, starts, size, seed, cfg.episodes, *limits)
        self.latest = [rollout for group in groups for rollout in group]
        return groups

    def execute(self, starts: Sequence[Start], size: int, seed: Sequence[int]) -> Future:
        return Deferred(lambda: self.groups(starts, size, seed))


def reward_of(rollout: EpisodeRollout) -> float:
    """NaN where it is absent."""
    return float("nan") if rollout.reward is None else rollout.reward


class StepCredit:
    """Step-level advantages of a group (GiGPO), for `Loop.credit`."""

    def __init__(self, weight: float, gamma: float, scale: str):
        self.weight, self.gamma, self.scale = weight, gamma, scale

    def __call__(self, rollouts: Sequence[EpisodeRollout], rewards: np.ndarray) -> list[np.ndarray]:
        found = step_advantages(rewards, [r.observations[:-1] for r in rollouts], self.gamma, self.scale)
        return [self.weight * a for a in found]


def make_policy(cfg: TextRlConfig) -> LanguagePolicy:
    """The policy that trains. Raises UserError where its context is shorter than an episode may be."""
    path = cfg.start or cfg.model.path
    policy = LanguagePolicy.from_pretrained(
        path, device=cfg.model.device, dtype=cfg.dtype, temperature=cfg.model.temperature, lora_rank=cfg.lora.rank,
        lora_alpha=cfg.lora.alpha, lora_targets=cfg.lora.targets, template=cfg.model.template, seed=cfg.seed,
    )  # fmt: skip
    check_context(policy, cfg.model, "model")
    return policy


def make_predictor(cfg: TextRlConfig) -> LanguagePolicy:
    """The world model, as it comes: it is not trained here."""
    model = cfg.world_model.model
    predictor = LanguagePolicy.from_pretrained(
        model.path, device=model.device, dtype=cfg.dtype, temperature=model.temperature or 1.0, template=model.template
    )
    check_context(predictor, model, "world_model.model")
    return predictor


class Run:
    """One training run: folder, games, loop, and what happens around the updates."""

    def __init__(self, cfg: TextRlConfig):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.bench: Bench = Tau2Bench(cfg) if cfg.env == "tau2" else AlfworldBench(cfg)
        self.policy = make_policy(cfg)
        self.policy.serve(make_engine(cfg.rollouts, Path(cfg.output_dir) / "served"))
        self.real: Roller | None = None
        self.imagined: Roller | None = None
        learner = Learner(self.policy, cfg.grpo)
        self.loop = {"sft": self.make_imitation, "rft": self.make_rejection, "rl": self.make_loop}[cfg.method](learner)
        self.folder = start_run(cfg.output_dir, cfg, self.manifest())

    def make_imitation(self, learner: Learner) -> Imitation:
        return Imitation(self.cfg, learner, self.bench.train)

    def make_rejection(self, learner: Learner) -> RejectionSampling:
        self.real = Roller(self.policy, self.bench.world(), self.cfg)
        starts = GameStarts(len(self.bench.train), self.cfg.seed)
        return RejectionSampling(self.cfg, learner, starts.draw, self.real.groups)

    def make_loop(self, learner: Learner) -> Loop:
        """The core's loop, around the environment and (in the arms that have one) a language world model."""
        cfg, section, level = self.cfg, self.cfg.world_model, self.cfg.step_level
        self.real = Roller(self.policy, self.bench.world(), cfg)
        if section.kind != "none":
            world = LanguageWorld(make_predictor(cfg), self.bench.train, cfg.train_max_steps, section)
            self.imagined = Roller(self.policy, world, cfg)
        return Loop(
            cfg=cfg, learner=learner, starts=GameStarts(len(self.bench.train), cfg.seed), execute=self.real.execute,
            imagine=None if self.imagined is None else self.imagined.groups, reward=reward_of, debias=make_debias(cfg),
            fusion=make_fusion(cfg), ledger=Ledger(),
            credit=StepCredit(level.weight, level.gamma, cfg.grpo.advantage_scale) if level.weight > 0 else None,
        )  # fmt: skip

    def manifest(self) -> dict:
        found, packages = self.bench.manifest(), ("torch", "transformers", "peft")
        weights = sum(p.numel() for _, p in self.policy.parameters_to_train())
        versions = found["versions"] | {name: version(name) for name in packages}
        return found | {"command": "text rl", "trained_weights": weights, "versions": versions}

    def load(self) -> int:
        """Restores the newest checkpoint, if the run has one; returns the updates done."""
        latest = checkpoint.latest(self.folder) if self.cfg.resume else None
        if latest is None:
            return 0
        state = checkpoint.load(latest)
        self.loop.load_state_dict(state["loop"])
        checkpoint.set_rng_state(state["rng"])
        return int(state["step"])

    def save(self, step: int) -> None:
        with self.loop.ledger.phase("checkpoint"):
            state = {"step": step, "loop": self.loop.state_dict(), "rng": checkpoint.rng_state()}
            checkpoint.save(self.folder, step, state, self.cfg.keep_checkpoints)

    def evaluate(self, label: str) -> None:
        """Whole episodes of the held-out tasks: `eval_<label>.jsonl` and `.json`."""
        ledger, path = self.loop.ledger, self.folder / f"eval_{label}.jsonl"
        with ledger.phase("evaluation"):
            found, steps = evaluate(self.policy, self.bench, self.cfg, path, label)
        ledger.add_real("evaluation", steps)
        write_json(path.with_suffix(".json"), found)
        for split, one in found.items():
            rates = one["all"]
            interval = f"[{rates['success_low']:.3f}, {rates['success_high']:.3f}]"
            told = f"success {rates['success']:.3f} {interval} of {rates['episodes']}, {self.bench.remark(rates)}"
            print(f"{label}, {split}: {told}", flush=True)

    def after(self, step: int, metrics: dict[str, float]) -> None:
        """After update `step`: log, save, evaluate."""
        cfg = self.cfg
        for name, roller in (("episode", self.real), ("imagined", self.imagined)):
            metrics |= {} if roller is None else {f"{name}/{k}": v for k, v in describe(roller.latest).items()}
        metrics |= self.policy.engine.metrics() if self.policy.engine else {}
        self.tracker.log(step, metrics)
        shown = ("success/env", "success/wm", "episode/invalid", "loss/nll")
        self.bar.update(1, ", ".join(f"{k} {metrics[k]:.2f}" for k in shown if np.isfinite(metrics.get(k, np.nan))))
        if step % cfg.save_every == 0 or step == cfg.steps:
            self.save(step)
        if cfg.eval.every and step % cfg.eval.every == 0 and step < cfg.steps:
            self.evaluate(f"{step:06d}")

    def run(self) -> None:
        cfg, log = self.cfg, self.cfg.log
        done = self.load()
        if cfg.eval.before and done == 0:
            self.evaluate("before")
        sinks = [TensorBoardSink(self.folder, done + 1)] if log.tensorboard else []
        sinks += [WandbSink(self.folder, log.wandb_project)] if log.wandb else []
        self.tracker = Tracker(self.folder, done, tuple(sinks))
        what = {"sft": "imitation", "rft": "rejection sampling", "rl": f"policy updates ({cfg.arm})"}[cfg.method]
        with Progress(cfg.steps, what, done=done) as self.bar:
            run_loop(self.loop, done, self.after)
        self.tracker.close()
        if cfg.steps > 0:
            self.policy.save(Path(self.folder) / "model")
            if cfg.eval.after:
                self.evaluate("after")
        write_json(self.folder / "ledger.json", self.loop.ledger.metrics())


def main(cfg: TextRlConfig) -> None:
    """Runs `cfg` to its end; with --resume, from the newest checkpoint of its folder."""
    transformers.utils.logging.set_verbosity_error()  # its bars and load reports would bury the run's own lines
    transformers.utils.logging.disable_progress_bar()
    Run(cfg).run()
