"""Transcripts of a language model as the rows that `Learner` trains on: one row is one sampled token.

A transcript is cut where the model's first token stands: what comes before is its *prompt*, the rest its *tail*. Replies
to one prompt (the members of a group) share it, and so does the forward pass: with 8 members, prompts of 300 tokens and
replies of 40 that is 620 tokens instead of 2,720.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from text_agents.transcripts import TokenRollout
from vla_wmrl.errors import require


@dataclass(frozen=True)
class Passes:
    """Input of one forward pass: P prompts, S tails, b scored tokens. All on the CPU."""

    prompts: Tensor  # [P, Tp] int64, padded on the left: all tails begin at the same column
    prompt_mask: Tensor  # [P, Tp] int64
    owner: Tensor  # [S] the prompt of a tail
    tails: Tensor  # [S, Tt] int64, padded on the right
    tail_mask: Tensor  # [S, Tt] int64
    sequence: Tensor  # [b] the tail of a scored token
    column: Tensor  # [b] its place in the tail


@dataclass(frozen=True)
class TokenRows:
    """All sampled tokens of a batch of transcripts. A `vla_wmrl.policies.base.Batch` of B rows."""

    rollout: Tensor  # [B] index into the rollouts
    advantage: Tensor  # [B] float64, the rollout's, or its turn's
    mask: Tensor  # [B] bool, tokens that carry gradient
    column: Tensor  # [B] place in the rollout's tail
    prompts: list[tuple[int, ...]]  # [R]
    tails: list[np.ndarray]  # [R], each [t] int64
    pad_id: int

    def split(self, index: Tensor, size: int) -> list[Tensor]:
        """Rows in parts of whole transcripts, in order, that read at most `size` tokens (or one transcript that has more).

        A prompt counts once in a part: it is most of what a forward pass keeps in memory.
        """
        owners, lengths = torch.unique_consecutive(self.rollout[index], return_counts=True)
        parts: list[int] = [0]
        read, prompts = 0, set()
        for owner, rows in zip(owners.tolist(), lengths.tolist(), strict=True):
            prompt, tail = self.prompts[owner], len(self.tails[owner])
            more = tail if prompt in prompts else tail + len(prompt)
            if parts[-1] > 0 and read + more > size:
                parts.append(0)
                read, prompts, more = 0, set(), tail + len(prompt)
            parts[-1] += rows
            read += more
            prompts.add(prompt)
        return list(torch.split(index, parts))

    def rows(self, index: Tensor) -> tuple[Passes]:
        """What `LanguagePolicy.log_prob` takes, for some rows."""
        used, sequence = torch.unique(self.rollout[index], return_inverse=True)
        prompts = list(dict.fromkeys(self.prompts[i] for i in used.tolist()))
        place = {prompt: i for i, prompt in enumerate(prompts)}
        ids, mask = _pad(prompts, self.pad_id, left=True)
        tails, tail_mask = _pad([self.tails[i] for i in used.tolist()], self.pad_id, left=False)
        owner = torch.tensor([place[self.prompts[i]] for i in used.tolist()])
        return (Passes(ids, mask, owner, tails, tail_mask, sequence, self.column[index]),)


def token_rows(
    rollouts: Sequence[TokenRollout], advantages: Sequence[float | np.ndarray], valid: np.ndarray, pad_id: int
) -> TokenRows:
    """Sampled tokens of R transcripts with advantages: one a transcript, or an array of one a turn.

    A transcript that is not `valid` [R], or whose advantages are all 0, is masked. A turn of advantage 0 in a transcript
    that counts is not: leaving it out would make the others weigh more. Raises UserError for a transcript that begins with
    a sampled token: nothing predicts that one.
    """
    prompts, tails, owner, column, advantage = [], [], [], [], []
    for i, (rollout, given) in enumerate(zip(rollouts, advantages, strict=True)):
        sampled = np.flatnonzero(rollout.policy_mask)
        first = int(sampled[0]) if len(sampled) else len(rollout.token_ids)
        require(first > 0, "a transcript begins with a sampled token: it needs a prompt")
        prompts.append(tuple(rollout.token_ids[:first].tolist()))
        tails.append(rollout.token_ids[first:])
        owner.append(np.full(len(sampled), i))
        column.append(sampled - first)
        by_turn = np.asarray(given, np.float64)
        advantage.append(by_turn[rollout.turn_id[sampled]] if by_turn.ndim else np.full(len(sampled), by_turn))
    rows = torch.from_numpy(np.concatenate(owner))
    live = torch.from_numpy(np.asarray(valid, bool) & np.array([np.any(np.asarray(a) != 0.0) for a in advantages]))
    return TokenRows(
        rollout=rows,
        advantage=torch.from_numpy(np.concatenate(advantage)),
        mask=live[rows],
        column=torch.from_numpy(np.concatenate(column)),
        prompts=prompts,
        tails=tails,
        pad_id=pad_id,
    )


def _pad(sequences: Sequence[Sequence[int]], fill: int, left: bool) -> tuple[Tensor, Tensor]:
    width = max(1, *map(len, sequences))
    ids = torch.full((len(sequences), width), fill, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        where = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[i, where] = torch.tensor([int(t) for t in sequence], dtype=torch.long)
        mask[i, where] = 1
    return ids, mask
