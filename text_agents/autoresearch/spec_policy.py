"""The CPU-default agent: a small autoregressive policy over the choices of the pipeline grammar.

A token is one choice of one slot. What it is conditioned on: facts of the task, the turn, what became of the turns so
far, the best specification so far, and the choices made in this one. To the learner it is a policy like any other:
`collate` gives rows (a row is a token), `log_prob` scores them again.

Non-obvious behaviour
* Tokens are drawn by inverse distribution function from given uniform numbers, so that a twin in the world model
  draws the same tokens for as long as it sees the same.
* What an agent reads is in the rows' inputs and has no log-probability of its own: observations are masked from the
  loss by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from text_agents.autoresearch.outcomes import METRIC_NAMES, task_facts
from text_agents.autoresearch.render import Facts
from text_agents.autoresearch.scoring import STATUSES
from text_agents.autoresearch.tasks import Task
from text_agents.autoresearch.vocabulary import MAX_CHOICES, SLOTS, TOKENS, open_slot
from vla_wmrl.errors import UserError

MAX_TURNS = 8
SEEN = (*STATUSES, "ungraded")


def task_vector(task: Task, facts: Facts) -> np.ndarray:
    """What the policy knows of a task [F] float32: kind, metric, logarithms of sizes, strings and gaps."""
    known = task_facts(task.description, task.inventory(limit=10**6))
    sizes = ("train rows", "train columns", "train strings", "train numbers", "train categories")
    gaps = [f"{file} gaps in {kind}" for file in ("train", "test") for kind in ("numbers", "strings")]
    values = [float(facts.kind == "regression"), float(facts.labels), np.log1p(len(facts.columns)) / 3]
    values += [known[f"metric {m}"] for m in METRIC_NAMES]
    values += [np.log1p(known.get(name, 0.0)) / 5 for name in sizes]
    values += [float(known.get(name, 0.0) > 0) for name in (*gaps, "train strings")]
    return np.array(values, np.float32)


FACTS = 3 + len(METRIC_NAMES) + 5 + 5
INPUTS = FACTS + MAX_TURNS + len(SEEN) + 2 + 2 * len(TOKENS) + len(SLOTS)


@dataclass
class State:
    """What one trajectory has seen. `best`: tokens of its best turn. Ranks are HumanRank in [0, 1]."""

    task: np.ndarray  # [F]
    kind: str  # "classification" or "regression"
    turn: int = 0
    status: str = ""  # of the last turn
    rank: float = 0.0  # of the last turn, 0 unless valid
    best_rank: float = 0.0
    best: tuple[int, ...] = ()
    best_reward: float = -1.0

    def see(self, tokens: Sequence[int], status: str, rank: float, reward: float) -> None:
        """Take in what became of a turn; reward NaN: nobody graded it."""
        self.turn, self.status = self.turn + 1, status
        self.rank = rank if np.isfinite(rank) else 0.0
        if np.isfinite(reward) and reward > self.best_reward:
            self.best, self.best_reward, self.best_rank = tuple(tokens), reward, self.rank

    def vector(self) -> np.ndarray:
        """[INPUTS] float32, with this turn's slot and choices still empty."""
        x = np.zeros(INPUTS, np.float32)
        x[:FACTS] = self.task
        x[FACTS + self.turn] = 1.0
        at = FACTS + MAX_TURNS
        if self.status:
            x[at + SEEN.index(self.status)] = 1.0
        x[at + len(SEEN)], x[at + len(SEEN) + 1] = self.rank, self.best_rank
        x[at + len(SEEN) + 2 + np.array(self.best, np.int64)] = 1.0
        return x


CHOSEN = INPUTS - len(SLOTS) - len(TOKENS)  # where this turn's choices begin in a row's inputs


@dataclass(frozen=True)
class TurnSample:
    """One sampled specification: its values in the grammar's order, and a row a token."""

    values: list[Any]
    x: np.ndarray  # [T, INPUTS] float32
    allowed: np.ndarray  # [T, V] bool
    tokens: np.ndarray  # [T] int64


@dataclass(frozen=True)
class TokenBatch:
    """R rollouts as B rows, as `Learner` takes them."""

    x: Tensor  # [B, INPUTS]
    allowed: Tensor  # [B, V] bool
    tokens: Tensor  # [B]
    rollout: Tensor  # [B] index into the rollouts
    advantage: Tensor  # [B] float64, the rollout's
    mask: Tensor  # [B] bool, rows that carry gradient

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.allowed[index], self.tokens[index]

    def split(self, index: Tensor, size: int) -> list[Tensor]:
        return list(torch.split(index, size))


class SpecPolicy:
    """Two layers over the inputs, logits of all tokens, those of the open slot allowed. Starts uniform."""

    def __init__(self, width: int = 128, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.width = width
        self.net = nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, len(TOKENS)))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INPUTS**-0.5)
            self.net[2].weight.zero_()
            self.net[2].bias.zero_()
        self.dtype = torch.float32

    @torch.no_grad()
    def sample(self, states: Sequence[State], uniforms: np.ndarray, temperature: float = 1.0) -> list[TurnSample]:
        """A specification for each of n states from uniforms [n, MAX_CHOICES] in [0, 1). temperature 0: the likeliest."""
        n = len(states)
        chosen: list[list[Any]] = [[] for _ in range(n)]
        x = np.stack([s.vector() for s in states]) if n else np.zeros((0, INPUTS), np.float32)
        rows: list[list[tuple[np.ndarray, np.ndarray, int]]] = [[] for _ in range(n)]
        for position in range(MAX_CHOICES):
            opened = {i: slot for i in range(n) if (slot := open_slot(states[i].kind, chosen[i])) is not None}
            if not opened:
                break
            for i, (slot, _) in opened.items():
                x[i, INPUTS - len(SLOTS) :] = 0.0
                x[i, INPUTS - len(SLOTS) + slot] = 1.0
            logits = self.net(torch.from_numpy(x[list(opened)])).numpy()
            for row, (i, (_, options)) in zip(logits, opened.items(), strict=True):
                token = int(options[_draw(row[options], uniforms[i, position], temperature)])
                allowed = np.zeros(len(TOKENS), bool)
                allowed[options] = True
                rows[i].append((x[i].copy(), allowed, token))
                chosen[i].append(TOKENS[token][1])
                x[i, CHOSEN + token] = 1.0
        return [
            TurnSample(values, np.stack([r[0] for r in own]), np.stack([r[1] for r in own]), np.array([r[2] for r in own]))
            for values, own in zip(chosen, rows, strict=True)
        ]

    def collate(self, rollouts: Sequence[Any], advantages: np.ndarray, valid: np.ndarray) -> TokenBatch:
        """Rollouts (with x [T, INPUTS], allowed [T, V], tokens [T]), their advantages [R] and valid [R], as rows.

        A rollout that is not valid, or has advantage 0, is masked: it adds nothing to the gradient.
        """
        owner = np.repeat(np.arange(len(rollouts)), [len(r.tokens) for r in rollouts])
        live = valid & (advantages != 0.0)
        return TokenBatch(
            *(torch.from_numpy(np.concatenate([getattr(r, name) for r in rollouts])) for name in ("x", "allowed", "tokens")),
            rollout=torch.from_numpy(owner), advantage=torch.from_numpy(advantages[owner]), mask=torch.from_numpy(live[owner]),
        )  # fmt: skip

    def log_prob(self, x: Tensor, allowed: Tensor, tokens: Tensor) -> Tensor:
        """log pi(token) [B] among the tokens allowed [B, V]."""
        logits = self.net(x).masked_fill(~allowed, -torch.inf)
        return torch.log_softmax(logits, dim=1).gather(1, tokens[:, None])[:, 0]

    def parameters_to_train(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.net.named_parameters())

    def without_adapter(self) -> None:
        """There is none: the reference policy is a copy of the weights."""

    def save(self, path: str | Path) -> None:
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().contiguous() for name, p in self.net.named_parameters()}
        save_file(weights, folder / "spec_policy.safetensors", metadata={"width": str(self.width)})

    @classmethod
    def load(cls, path: str | Path) -> SpecPolicy:
        """Raises UserError for a folder without such a policy, or one of another grammar."""
        from safetensors import safe_open

        file = Path(path) / "spec_policy.safetensors"
        if not file.is_file():
            raise UserError(f"{path} holds no policy: name the folder `policy` of a run of `vla-wmrl research train`")
        with safe_open(file, "pt") as stored:
            policy = cls(int(stored.metadata()["width"]))
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if any(weights[name].shape != p.shape for name, p in policy.net.named_parameters()):
            raise UserError(f"{file} was trained on another version of the pipeline language")
        policy.net.load_state_dict(weights)
        return policy


def _draw(logits: np.ndarray, uniform: float, temperature: float) -> int:
    """Index by inverse distribution function; the last one where rounding leaves the sum below `uniform`."""
    if temperature == 0.0:
        return int(np.argmax(logits))
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return min(int(np.searchsorted(np.cumsum(p / p.sum()), uniform, side="right")), len(p) - 1)
