"""Next-state accuracy on held-out triplets: one greedy prediction each, judged by the reward that RWML trains on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from text_agents.config import RwmlConfig
from text_agents.language_policy import LanguagePolicy
from text_agents.rwml import calibrate, known, prompts, rewards, triplets
from text_agents.rwml.triplets import Triplet
from text_agents.transcripts import fit_history
from vla_wmrl.errors import require
from vla_wmrl.progress import Progress
from vla_wmrl.stats import wilson
from vla_wmrl.tracking import JsonLines, read_jsonl


def draw(found: Sequence[Triplet], limit: int, seed: int = 0) -> list[Triplet]:
    """At most `limit` triplets, by a hash of (seed, content): the same ones whatever order they come in."""
    return sorted(found, key=lambda t: hashlib.sha256(f"{seed} {t.id}".encode()).hexdigest())[:limit]


def held_out(cfg: RwmlConfig, train: Sequence[Triplet]) -> list[Triplet]:
    """The triplets to evaluate on. Raises UserError where a task is also trained on, or where there are none."""
    folder = cfg.eval.triplets
    found = triplets.read(cfg.triplets, "val") if folder is None else triplets.read_all(folder)
    both = {(t.env, t.task_id) for t in found} & {(t.env, t.task_id) for t in train}
    require(not both, f"{len(both)} tasks are both trained on and held out: evaluate on other games")
    return draw(found, cfg.eval.limit)


def recent(triplet: Triplet, cfg: RwmlConfig) -> list[tuple[str, str]]:
    """The latest `history` turns of a triplet."""
    return triplet.turns if cfg.history is None else triplet.turns[max(0, len(triplet.turns) - cfg.history) :]


def fitting(policy: LanguagePolicy, found: Sequence[Triplet], cfg: RwmlConfig) -> list[Triplet]:
    """Those whose prompt fits into `model.max_prompt_tokens` without any history: a long one must not end a run half-way."""
    return [t for t in found if len(_render(policy, t, ())) <= cfg.model.max_prompt_tokens]


def _render(policy: LanguagePolicy, triplet: Triplet, turns: Sequence[tuple[str, str]]) -> list[int]:
    return policy.chat.render([{"role": "user", "content": prompts.predict(triplet, turns)}])


def prompt_ids(policy: LanguagePolicy, triplet: Triplet, cfg: RwmlConfig) -> tuple[list[int], int]:
    """(ids of the prompt that asks for the next state, history turns that did not fit)."""
    return fit_history(lambda some: _render(policy, triplet, some), recent(triplet, cfg), cfg.model.max_prompt_tokens)


def evaluate(
    policy: LanguagePolicy,
    held: Sequence[Triplet],
    embedder: rewards.Embedder,
    cfg: RwmlConfig,
    path: str | Path,
    label: str,
    updates: int = 0,
) -> dict[str, float]:
    """Predicts every triplet once, greedily, writes a line each to `path`, returns the summary; goes on where it stopped.

    updates: of the model; lines of one with fewer, or of a prompt in other words, are not gone on from.

    accuracy: mean reward; exact: the very words; tagged: has <next_state>; low, high: 95 % Wilson interval of accuracy;
    accuracy_known: of next states that the prompt determines (`known`), by the action alone or by what was seen before.
    """
    ids, same = {t.id for t in held}, {"updates": updates, "retold": cfg.eval.retold}
    out = JsonLines(path, keep=lambda row: row["id"] in ids and all(row.get(k) == v for k, v in same.items()))
    done = {row["id"] for row in read_jsonl(path)}
    rest = [t for t in held if t.id not in done]
    with Progress(len(held), f"evaluate {label}", done=len(held) - len(rest)) as progress:
        for first in range(0, len(rest), cfg.eval.batch):
            part = rest[first : first + cfg.eval.batch]
            asked = [prompt_ids(policy, retold(t) if cfg.eval.retold else t, cfg) for t in part]
            replies = policy.sample([p for p, _ in asked], 1, cfg.model.max_new_tokens, greedy=True)
            texts = [policy.chat.decode(reply.token_ids) for reply in replies]
            for row in judge(part, texts, embedder, cfg):
                i = row.pop("index")
                shown = recent(part[i], cfg)[asked[i][1] :]
                row |= {"ended": replies[i].ended, "tokens": len(replies[i].token_ids), "dropped_turns": asked[i][1]}
                row |= same | dict(zip(("foretold", "known"), known.foretell(part[i], shown), strict=True))
                out.write(row)
            progress.update(len(part))
    out.close()
    return summary(read_jsonl(path))


def retold(triplet: Triplet) -> Triplet:
    """The triplet with the observations of its prompt in other words; the same words whenever it is asked for."""
    rng = np.random.default_rng(int(triplet.id[:12], 16))
    turns = [(action, calibrate.retold(seen, rng)) for action, seen in triplet.turns]
    return replace(triplet, history=json.dumps(turns), observation=calibrate.retold(triplet.observation, rng))


def judge(held: Sequence[Triplet], outputs: Sequence[str], embedder: rewards.Embedder, cfg: RwmlConfig) -> list[dict]:
    """One row a triplet with its output of the model: what was predicted, how far off, whether it counts as right."""
    tau = {"alfworld": cfg.reward.tau, "user": cfg.reward.tau_user}
    scores = rewards.rewards(outputs, [t.next_state for t in held], [t.kind for t in held], embedder, tau)
    rows = []
    for i, (t, output, score) in enumerate(zip(held, outputs, scores, strict=True)):
        predicted = rewards.predicted_state(output)
        distance = None if predicted is None else float(embedder.distances([predicted], [t.next_state])[0])
        rows.append({
            "index": i, "id": t.id, "env": t.env, "task_id": t.task_id, "step": t.step, "kind": t.kind, "action": t.action,
            "true": t.next_state, "predicted": predicted, "reward": float(score), "distance": distance,
            "exact": predicted is not None and " ".join(predicted.split()) == " ".join(t.next_state.split()),
            "output": None if predicted is not None else output[:400],
        })  # fmt: skip
    return rows


def summary(rows: Sequence[dict]) -> dict[str, float]:
    """Shares of N evaluated triplets, and accuracy by the verb of the action."""
    n, right = len(rows), sum(row["reward"] for row in rows)
    low, high = wilson(round(right), n)  # of tools, whose rewards are fifths, about right
    found = {
        "n": n, "accuracy": right / n, "low": low, "high": high,
        "exact": float(np.mean([row["exact"] for row in rows])),
        "tagged": float(np.mean([row["predicted"] is not None for row in rows])),
        "ended": float(np.mean([row["ended"] for row in rows])),
        "tokens": float(np.mean([row["tokens"] for row in rows])),
        "dropped_turns": float(sum(row["dropped_turns"] for row in rows)),
    }  # fmt: skip
    for verb in sorted({row["action"].split()[0] for row in rows if row["kind"] == "alfworld" and row["action"].split()}):
        of = [row["reward"] for row in rows if row["kind"] == "alfworld" and row["action"].split()[:1] == [verb]]
        found |= {f"accuracy_{verb}": float(np.mean(of)), f"n_{verb}": len(of)}
    for name, kinds in (("known", ("action", "history")), ("known_action", ("action",)), ("known_history", ("history",))):
        of = [row["reward"] for row in rows if row.get("known") in kinds]
        if of:
            low, high = wilson(round(sum(of)), len(of))
            found |= {f"accuracy_{name}": float(np.mean(of)), f"n_{name}": len(of)}
            found |= {f"low_{name}": low, f"high_{name}": high}
    return found
