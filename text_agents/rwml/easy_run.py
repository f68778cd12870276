"""The too-easy filter as a stage of `vla-wmrl text rwml` (RWML, arXiv 2602.05842, s2.2): train a copy, let it predict, thin.

The copy imitates the `val` split (10 % of the triplets, of tasks that are not trained on), predicts every training triplet K
times, and is thrown away: the policy's trained weights are lent to it and put back, so it costs no second network.

`easy.jsonl` holds a line a triplet with the K rewards; a run that was stopped goes on behind the last one. What is random is
keyed by (seed, triplet), so that neither order nor a resume changes what is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from text_agents.config import RwmlConfig
from text_agents.imitation import imitate
from text_agents.language_policy import LanguagePolicy
from text_agents.order import batch_of
from text_agents.rwml import easy
from text_agents.rwml.evaluate import prompt_ids
from text_agents.rwml.rewards import Embedder
from text_agents.rwml.scoring import by_rule
from text_agents.rwml.sft import label
from text_agents.rwml.triplets import Triplet
from vla_wmrl.errors import require
from vla_wmrl.learner import Learner
from vla_wmrl.policies.noise import lineage
from vla_wmrl.progress import Progress
from vla_wmrl.tracking import JsonLines, read_jsonl, write_json

_COPY = 0xEA57  # stream of the copy's random numbers


def thin(
    cfg: RwmlConfig, policy: LanguagePolicy, embedder: Embedder, train: Sequence[Triplet], val: Sequence[Triplet], folder: Path
) -> tuple[list[Triplet], dict]:
    """(the triplets to train on, the report), written to `easy.jsonl` and `easy.json` in `folder`.

    Report: n, flagged and dropped shares, overall and by kind; digest of what is kept; nll_first, nll_last of the copy (missing
    where it had finished before). Raises UserError where nothing is left.
    """
    path, wanted = folder / "easy.jsonl", {t.id for t in train}
    out = JsonLines(path, keep=lambda row: row["id"] in wanted)
    done = {row["id"] for row in read_jsonl(path)}
    left = [t for t in train if t.id not in done]
    losses = _judge_all(cfg, policy, embedder, left, val, out, len(train)) if left else []
    out.close()
    rewards = {row["id"]: row["rewards"] for row in read_jsonl(path)}
    flagged = easy.flag(np.array([rewards[t.id] for t in train], np.float64), cfg.easy.share)
    kept = easy.keep([t.id for t in train], flagged, cfg.easy.keep, cfg.seed)
    report: dict = easy.report(flagged, kept) | {"kept": int(kept.sum())}
    kinds = np.array([t.kind for t in train])
    for kind in sorted(set(kinds)) if len(set(kinds)) > 1 else ():
        report[kind] = easy.report(flagged[kinds == kind], kept[kinds == kind])
    report["digest"] = hashlib.sha256("\n".join(t.id for t, k in zip(train, kept, strict=True) if k).encode()).hexdigest()[:16]
    if losses:
        report |= {"copy_updates": len(losses), "nll_first": losses[0], "nll_last": losses[-1]}
    if losses or not (folder / "easy.json").is_file():
        write_json(folder / "easy.json", report)
    require(kept.any(), f"all {len(train)} training triplets are too easy: lower easy.tau, or raise easy.keep")
    return [t for t, k in zip(train, kept, strict=True) if k], report


def _judge_all(cfg, policy, embedder, train, val, out: JsonLines, total: int) -> list[float]:
    """Trains the copy on `val`, writes a row for each of `train`; returns the copy's losses."""
    size, reward = cfg.easy.samples, by_rule("rwml", embedder, cfg.easy.tau, cfg.easy.tau_user)
    with lent(policy):
        losses = _train_copy(cfg, policy, val)
        with Progress(total, "too-easy filter", done=total - len(train)) as progress:
            for first in range(0, len(train), cfg.eval.batch):
                part = train[first : first + cfg.eval.batch]
                keys = [lineage(_COPY, int(t.id, 16) % 2**62, i) for t in part for i in range(size)]
                asked = [prompt_ids(policy, t, cfg)[0] for t in part]
                replies = policy.sample(asked, size, cfg.model.max_new_tokens, cfg.seed, keys)
                texts = [policy.chat.decode(reply.token_ids) for reply in replies]
                found = reward(texts, [t for t in part for _ in range(size)]).reshape(len(part), size)
                for t, row in zip(part, found, strict=True):
                    out.write({"id": t.id, "task_id": t.task_id, "kind": t.kind, "rewards": row})
                progress.update(len(part))
    return losses


def _train_copy(cfg: RwmlConfig, policy: LanguagePolicy, val: Sequence[Triplet]) -> list[float]:
    lr = 2 * cfg.grpo.lr if cfg.easy.lr is None else cfg.easy.lr
    learner = Learner(policy, replace(cfg.grpo, lr=lr, kl_beta=0.0))
    n, losses = min(cfg.grpo.n_groups, len(val)), []
    steps = math.ceil(cfg.easy.passes * len(val) / n)
    with Progress(steps, "copy for the too-easy filter") as progress:
        for step in range(steps):
            batch = batch_of(val, step, n, cfg.seed)
            losses.append(imitate(learner, [label(policy, t, prompt_ids(policy, t, cfg)[0]) for t in batch])["nll"])
            progress.update(1, f"nll {losses[-1]:.3f}")
    return losses or [math.nan]


@contextmanager
def lent(policy: LanguagePolicy) -> Iterator[None]:
    """Whatever trains the policy in the block leaves no trace: its trained weights are put back."""
    kept = [(p, p.detach().cpu().clone()) for _, p in policy.parameters_to_train()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
                parameter.grad = None
