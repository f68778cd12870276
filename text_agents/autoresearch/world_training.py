"""`vla-wmrl research world`: the language world model learns what programs come to, from executions in the sandbox.

After RWML (arXiv 2602.05842): an update of `rwml` samples G predictions a program, rewards each by the true outcome, and takes
a GRPO step; one of `sft` is a step towards the true outcome, written as the answer that is asked for. Held-out tasks' programs
are never trained on: they are judged before and after, by the harness of `research fidelity`.

The reward is coarse, as RWML's: 1 for the right status (of a valid program: with the right quality), 0.5 for a valid one whose
quality is wrong, 0 for anything else and for answers that cannot be read. Only the first outcome counts.

Non-obvious behaviour
* Predictions are sampled freely here, not by constrained decoding: the form is something to learn, and under a constraint the
  log-probabilities of the update would be another policy's. A small model needs `sft` first (`--start=RUN/model`).
* Everything random is keyed by (seed, update, program of the batch, member): a resumed run is the same run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import pandas as pd
import transformers

from text_agents.autoresearch import fidelity
from text_agents.autoresearch.backends import TransformersBackend
from text_agents.autoresearch.world_config import WorldTrainConfig
from text_agents.imitation import imitate
from text_agents.language_policy import LanguagePolicy
from text_agents.order import batch_of
from text_agents.transcripts import TokenRollout, Transcript
from vla_wmrl import checkpoint
from vla_wmrl.advantage import group_advantages
from vla_wmrl.errors import require
from vla_wmrl.learner import Learner
from vla_wmrl.policies.noise import lineage
from vla_wmrl.progress import Progress
from vla_wmrl.tracking import Ledger, Tracker, start_run, write_json
from vla_wmrl.world_model.language import (
    BrokenPrediction,
    Case,
    LanguageWorldModel,
    bucket_of,
    build_prompt,
    compile_gate,
    parse_prediction,
)


@dataclass(frozen=True)
class Executed:
    """A program with what became of it. `bucket`: quality of a valid one, None of others. `prompt`: token ids."""

    case: Case
    status: str
    bucket: str | None
    error_type: str | None
    error_line: int | None
    prompt: list[int]


def answer_of(case: Executed) -> str:
    """The answer that is true of a program: its outcome, and the likeliest other one as the second."""
    true = {"status": case.status, "error_type": case.error_type, "error_line": case.error_line, "quality_bucket": case.bucket}
    other = {"status": "runtime_error", "error_type": None, "error_line": None, "quality_bucket": None}
    if case.status != "valid":
        other |= {"status": "valid", "quality_bucket": "fair"}
    predictions = [
        {**outcome, "env_feedback": outcome["error_type"] or "", "confidence": p} for outcome, p in ((true, 0.9), (other, 0.1))
    ]
    return json.dumps({"reason": "", "predictions": predictions})


def reward_of(answer: str, case: Executed) -> float:
    """How right an answer is, in {0, 0.5, 1}."""
    try:
        first = parse_prediction(answer).outcomes[0]
    except BrokenPrediction:
        return 0.0
    if first.status != case.status:
        return 0.0
    return 1.0 if first.bucket == case.bucket else 0.5


def executed(policy: LanguagePolicy, rows: pd.DataFrame, max_prompt_tokens: int) -> list[Executed]:
    """Rows of the data file as they are asked about, less programs that do not compile (no model is asked about them) and
    those whose prompt is too long even without the data's inventory."""
    found = []
    for case, row in zip(fidelity.cases_of(rows), rows.to_dict("records"), strict=True):
        if compile_gate(case.code):
            continue
        for inventory in (True, False):
            prompt = policy.chat.render([{"role": "user", "content": build_prompt(case, inventory=inventory)}])
            if len(prompt) <= max_prompt_tokens:
                break
        else:
            continue
        bucket = bucket_of(2 * row["reward"] - 1) if row["status"] == "valid" else None
        kind, line = row.get("error_type"), row.get("error_line")
        line = int(line) if isinstance(line, int | float) and line == line else None
        found.append(Executed(case, row["status"], bucket, kind if isinstance(kind, str) else None, line, prompt))
    return found


class WorldTrainer:
    """The objects of a run and its two kinds of update."""

    def __init__(self, cfg: WorldTrainConfig, policy: LanguagePolicy, cases: Sequence[Executed]):
        self.cfg, self.policy, self.cases = cfg, policy, cases
        self.learner, self.ledger = Learner(policy, cfg.grpo), Ledger()

    def step(self, step: int) -> dict[str, float]:
        """One update; returns its metrics."""
        batch = batch_of(self.cases, step, self.cfg.grpo.n_groups, self.cfg.seed)
        metrics = self._imitate(batch) if self.cfg.method == "sft" else self._reinforce(step, batch)
        return metrics | self.ledger.metrics()

    def _imitate(self, batch: Sequence[Executed]) -> dict[str, float]:
        labels = [self._label(case, i) for i, case in enumerate(batch)]
        with self.ledger.phase("update"):
            return {f"loss/{k}": v for k, v in imitate(self.learner, labels).items()}

    def _label(self, case: Executed, place: int) -> TokenRollout:
        ids = self.policy.tokenizer(self.policy.chat.neutral(answer_of(case)), add_special_tokens=False)["input_ids"]
        transcript = Transcript()
        transcript.add_context(case.prompt)
        transcript.add_reply([*ids, self.policy.chat.end_id], [math.nan] * (len(ids) + 1))
        return transcript.finish(place, 0, 1.0, "done")

    def _reinforce(self, step: int, batch: Sequence[Executed]) -> dict[str, float]:
        cfg, size = self.cfg, self.cfg.grpo.group_size
        keys = [lineage(step, i, member) for i in range(len(batch)) for member in range(size)]
        with self.ledger.phase("sample"):
            replies = self.policy.sample([c.prompt for c in batch], size, cfg.model.max_new_tokens, cfg.seed, keys)
        answers = [self.policy.chat.decode(reply.token_ids) for reply in replies]
        cases = [case for case in batch for _ in range(size)]
        r = np.array([reward_of(a, c) for a, c in zip(answers, cases, strict=True)]).reshape(len(batch), size)
        advantages, zero_spread = group_advantages(r, np.isfinite(r), cfg.grpo.advantage_scale)
        rollouts = []
        for i, reply in enumerate(replies):
            transcript = Transcript()
            transcript.add_context(cases[i].prompt)
            transcript.add_reply(reply.token_ids, reply.logp)
            stop = "done" if reply.ended else "token_limit"
            rollouts.append(transcript.finish(step * len(batch) + i // size, i % size, float(r.ravel()[i]), stop, step))
        with self.ledger.phase("update"):
            found = self.learner.update(rollouts, advantages.ravel(), np.ones(len(rollouts), bool), len(rollouts))
        return {f"loss/{k}": v for k, v in found.items()} | {
            "reward/mean": float(r.mean()),
            "reward/best_of_group": float(r.max(axis=1).mean()),
            "adv/zero_spread": float(zero_spread.mean()),
            "reply/ended": float(np.mean([reply.ended for reply in replies])),
        }

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.ledger.load_state_dict(state["ledger"])


def assess(policy: LanguagePolicy, rows: pd.DataFrame, cfg: WorldTrainConfig) -> dict[str, float]:
    """Figures of the fidelity harness on the held-out tasks' first programs, by constrained decoding."""
    backend = TransformersBackend.of(policy.model, policy.tokenizer, temperature=0.0)
    model = LanguageWorldModel(backend, max_tokens=cfg.model.max_new_tokens)
    return fidelity.figures(rows, model.predict(fidelity.cases_of(rows)))


def train(cfg: WorldTrainConfig) -> int:
    """Runs `cfg` to its end; with --resume, from the newest checkpoint of its folder."""
    transformers.utils.logging.set_verbosity_error()  # its load reports would bury the run's own lines
    transformers.utils.logging.disable_progress_bar()
    rows = fidelity.read_rows(cfg.data)
    held = rows[rows["held_out"]].groupby("task", sort=False).head(cfg.eval_per_task).reset_index(drop=True)
    rows = rows[~rows["held_out"]].reset_index(drop=True)
    require(len(rows) > 0, f"{cfg.data} has no solutions of training tasks")
    policy = LanguagePolicy.from_pretrained(
        cfg.start or cfg.model.path, device=cfg.model.device, temperature=cfg.model.temperature, lora_rank=cfg.lora.rank,
        lora_alpha=cfg.lora.alpha, lora_targets=cfg.lora.targets, template=cfg.model.template, seed=cfg.seed,
    )  # fmt: skip
    cases = executed(policy, rows, cfg.model.max_prompt_tokens)
    require(len(cases) > 0, f"no prompt fits into model.max_prompt_tokens={cfg.model.max_prompt_tokens}")
    names = {"programs": len(cases), "left_out": len(rows) - len(cases), "held_out_programs": len(held)}
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    folder = start_run(cfg.output_dir, cfg, {"command": "research world", **names, "versions": versions})
    trainer = WorldTrainer(cfg, policy, cases)
    latest = checkpoint.latest(folder) if cfg.resume else None
    first = 0
    if latest is not None:
        state = checkpoint.load(latest)
        trainer.load_state_dict(state["trainer"])
        first = int(state["step"])
    if first == 0:
        _judge(policy, held, cfg, "before")
    tracker = Tracker(folder, first)
    with Progress(cfg.steps, f"world model ({cfg.method})", done=first) as bar:
        for step in range(first, cfg.steps):
            metrics = trainer.step(step)
            tracker.log(step + 1, metrics)
            if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
                checkpoint.save(folder, step + 1, {"step": step + 1, "trainer": trainer.state_dict()}, cfg.keep_checkpoints)
            shown = ("loss/nll", "reward/mean", "adv/zero_spread")
            bar.update(1, ", ".join(f"{k} {metrics[k]:.3f}" for k in shown if k in metrics))
    tracker.close()
    policy.save(folder / "model")
    _judge(policy, held, cfg, "after")
    return 0


def _judge(policy: LanguagePolicy, held: pd.DataFrame, cfg: WorldTrainConfig, name: str) -> None:
    if not len(held):
        return
    found = assess(policy, held, cfg)
    write_json(f"{cfg.output_dir}/eval_{name}.json", found)
    shown = ("status_at_1", "status_at_2", "before_mae", "before_spearman_within_task")
    figures = ", ".join(f"{k} {found[k]:.3f}" for k in shown if k in found)
    print(
        f"{name}: {figures or 'no prediction'} ({int(found['n'])} held-out programs, {int(found['missing'])} missing)",
        flush=True,
    )
