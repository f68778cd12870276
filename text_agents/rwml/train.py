"""`vla-wmrl text rwml`: a language model learns what its actions lead to (RWML, arXiv 2602.05842, s2.2; and WM SFT).

Before the first update, if asked for, the too-easy filter thins the triplets (`easy_run`). An update of `rwml`: a batch of
triplets, G sampled predictions each, rewards (`scoring`), advantages within each group, one step of the shared `Learner`.
An update of `sft`: the same batch, one step towards the true next state behind an empty think block. Everything random is
keyed by (seed, update, triplet of the batch, member), so a resumed run is the same run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import transformers

from text_agents.config import RwmlConfig
from text_agents.imitation import imitate
from text_agents.language_policy import LanguagePolicy
from text_agents.order import batch_of
from text_agents.rwml import easy_run, rewards, triplets
from text_agents.rwml.evaluate import evaluate, fitting, held_out, prompt_ids, retold
from text_agents.rwml.scoring import Reward, make_reward
from text_agents.rwml.sft import label
from text_agents.rwml.triplets import Triplet
from text_agents.served import make_engine
from text_agents.transcripts import Transcript
from vla_wmrl import checkpoint
from vla_wmrl.advantage import group_advantages
from vla_wmrl.errors import require
from vla_wmrl.learner import Learner
from vla_wmrl.policies.noise import lineage
from vla_wmrl.progress import Progress
from vla_wmrl.tracking import Ledger, Tracker, start_run, write_json


class RwmlTrainer:
    """The objects of a run and its two kinds of update. `reward` is None where nothing is sampled (WM SFT)."""

    def __init__(self, cfg: RwmlConfig, policy: LanguagePolicy, reward: Reward | None, train: Sequence[Triplet]):
        self.cfg, self.policy, self.reward, self.train = cfg, policy, reward, train
        self.learner = Learner(policy, cfg.grpo)
        self.ledger = Ledger()

    def step(self, step: int) -> dict[str, float]:
        """One update; returns its metrics."""
        batch = batch_of(self.train, step, self.cfg.grpo.n_groups, self.cfg.seed)
        asked = [prompt_ids(self.policy, t, self.cfg) for t in batch]
        ids = [p for p, _ in asked]
        metrics = self._imitate(batch, ids) if self.cfg.method == "sft" else self._reinforce(step, batch, ids)
        return metrics | {"data/dropped_turns": float(sum(d for _, d in asked))} | self.ledger.metrics()

    def _reinforce(self, step: int, batch: Sequence[Triplet], ids: Sequence[list[int]]) -> dict[str, float]:
        cfg, size = self.cfg, self.cfg.grpo.group_size
        keys = [lineage(step, i, member) for i in range(len(batch)) for member in range(size)]
        with self.ledger.phase("sample"):
            replies = self.policy.sample(ids, size, cfg.model.max_new_tokens, cfg.seed, keys)
        texts = [self.policy.chat.decode(reply.token_ids) for reply in replies]
        with self.ledger.phase("reward"):
            r = self.reward(texts, [t for t in batch for _ in range(size)]).reshape(len(batch), size)
        there = np.isfinite(r)  # a judge may have given none
        advantages, zero_spread = group_advantages(r, there, cfg.grpo.advantage_scale)
        rollouts = []
        for i, reply in enumerate(replies):
            transcript = Transcript()
            transcript.add_context(ids[i // size])
            transcript.add_reply(reply.token_ids, reply.logp)
            stop = "done" if reply.ended else "token_limit"
            rollouts.append(transcript.finish(step * len(batch) + i // size, i % size, float(r.ravel()[i]), stop, step))
        valid = np.array([x.valid for x in rollouts])
        with self.ledger.phase("update"):
            metrics = self.learner.update(rollouts, advantages.ravel(), valid, int(valid.sum()))
        return {f"loss/{k}": v for k, v in metrics.items()} | {
            "reward/mean": _mean(r[there]),
            "reward/best_of_group": _mean(np.where(there, r, -np.inf).max(axis=1)[there.any(axis=1)]),
            "reward/missing": float(1.0 - there.mean()),
            "adv/zero_spread": float(zero_spread.mean()),
            "reply/tagged": float(np.mean([rewards.predicted_state(t) is not None for t in texts])),
            "reply/ended": float(np.mean([reply.ended for reply in replies])),
            "reply/tokens": float(np.mean([len(reply.token_ids) for reply in replies])),
        }

    def _imitate(self, batch: Sequence[Triplet], ids: Sequence[list[int]]) -> dict[str, float]:
        """A supervised step towards the true next states."""
        labels = [label(self.policy, t, p) for t, p in zip(batch, ids, strict=True)]
        with self.ledger.phase("update"):
            return {f"loss/{k}": v for k, v in imitate(self.learner, labels).items()}

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.ledger.load_state_dict(state["ledger"])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def planned_steps(cfg: RwmlConfig, n: int) -> int:
    """Updates of a run on n triplets: `steps`, or as many as `passes` over them takes."""
    return cfg.steps if cfg.steps is not None else math.ceil(cfg.passes * n / cfg.grpo.n_groups)


def main(cfg: RwmlConfig) -> None:
    transformers.utils.logging.set_verbosity_error()  # its bars and load reports would bury the run's own lines
    transformers.utils.logging.disable_progress_bar()
    train = triplets.read(cfg.triplets, "train")
    val = triplets.read(cfg.triplets, "val") if cfg.easy.enabled else []
    held = held_out(cfg, train)
    embedder = rewards.Embedder(cfg.reward.embedder, cfg.model.device)
    policy = LanguagePolicy.from_pretrained(
        cfg.start or cfg.model.path, device=cfg.model.device, dtype=cfg.dtype, temperature=cfg.model.temperature,
        lora_rank=cfg.lora.rank, lora_alpha=cfg.lora.alpha, lora_targets=cfg.lora.targets, template=cfg.model.template,
        seed=cfg.seed,
    )  # fmt: skip
    policy.serve(make_engine(cfg.rollouts, Path(cfg.output_dir) / "served"))
    train, long = _without_long(policy, train, held, cfg)
    val = fitting(policy, val, cfg)
    reward = make_reward(cfg.reward, embedder, cfg.model.device) if cfg.method == "rwml" and cfg.steps != 0 else None
    folder = start_run(cfg.output_dir, cfg, _manifest(train, held, policy) | {"train_triplets_too_long": long})
    filtered: dict[str, float] = {}
    if cfg.easy.enabled and cfg.steps != 0:
        train, report = easy_run.thin(cfg, policy, embedder, train, val, folder)
        filtered = {"easy/flagged": report["flagged"], "easy/dropped": report["dropped"]}
        print(f"too easy: {report['flagged']:.1%} of {report['n']} triplets; {report['kept']} are trained on", flush=True)
    trainer, steps = RwmlTrainer(cfg, policy, reward, train), planned_steps(cfg, len(train))
    last = checkpoint.latest(cfg.output_dir) if cfg.resume else None
    first = int(last.name) if last else 0
    if last:
        trainer.load_state_dict(checkpoint.load(last))
    tracker = Tracker(folder, resume_step=first)

    def assess(name: str, updates: int) -> None:
        found = evaluate(policy, held, embedder, cfg, folder / f"eval_{name}.jsonl", name, updates)
        write_json(folder / f"eval_{name}.json", found)
        print(f"{name}: accuracy {found['accuracy']:.3f} [{found['low']:.3f}, {found['high']:.3f}] of {found['n']}", flush=True)

    if cfg.eval.before and first == 0:
        assess("before", 0)
    with Progress(steps, cfg.method, done=first) as progress:
        for step in range(first, steps):
            metrics = trainer.step(step) | filtered | (policy.engine.metrics() if policy.engine else {})
            tracker.log(step + 1, metrics)
            if (step + 1) % cfg.save_every == 0 or step + 1 == steps:
                checkpoint.save(folder, step + 1, trainer.state_dict(), cfg.keep_checkpoints)
            if cfg.eval.every and (step + 1) % cfg.eval.every == 0 and step + 1 < steps:
                assess(f"{step + 1:06d}", step + 1)
            progress.update(1, _note(metrics))
    tracker.close()
    if steps > 0:
        policy.save(folder / "model")
        if cfg.eval.after:
            assess("after", steps)


def _without_long(policy: LanguagePolicy, train: Sequence[Triplet], held: Sequence[Triplet], cfg: RwmlConfig):
    """(the triplets to train on whose prompts fit, how many do not). Raises UserError where a held-out one does not fit:
    leaving it out would change what is measured."""
    asked = [retold(t) for t in held] if cfg.eval.retold else held
    limit = f"model.max_prompt_tokens={cfg.model.max_prompt_tokens}"
    over = len(asked) - len(fitting(policy, asked, cfg))
    require(over == 0, f"{over} of {len(asked)} held-out prompts exceed {limit} without any history: raise it")
    kept = fitting(policy, train, cfg)
    require(len(kept) > 0, f"none of {len(train)} prompts to train on fits into {limit} without any history: raise it")
    if long := len(train) - len(kept):
        print(f"{long} of {len(train)} triplets left out: their prompts exceed {limit} without any history", flush=True)
    return kept, long


def _note(metrics: dict[str, float]) -> str:
    if "loss/nll" in metrics:
        return f"nll {metrics['loss/nll']:.3f}"
    return f"reward {metrics['reward/mean']:.3f}, groups without contrast {metrics['adv/zero_spread']:.0%}"


def _manifest(train: Sequence[Triplet], held: Sequence[Triplet], policy: LanguagePolicy) -> dict:
    def digest(some: Sequence[Triplet]) -> str:
        return hashlib.sha256("\n".join(t.id for t in some).encode()).hexdigest()[:16]

    return {
        "train_triplets": len(train), "train_digest": digest(train),
        "held_out_triplets": len(held), "held_out_digest": digest(held),
        "held_out_tasks": len({(t.env, t.task_id) for t in held}),
        "trained_weights": sum(p.numel() for _, p in policy.parameters_to_train()),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "sentence-transformers")},
    }  # fmt: skip
