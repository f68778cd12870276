"""Conversations with a causal language model that go on turn by turn: what was read once is kept, not read again.

An episode of 15 turns with prompts that grow to 1,500 tokens would otherwise read about 12,000 tokens instead of 1,500.

Non-obvious behaviour
* Rows of a batch have turns of different lengths. Each turn is padded on its left and the padding masked, so a row's cache
  has holes; positions count the row's own tokens. Attention that looks back by columns (sliding windows shorter than the
  conversation) would miscount.
* Log-probabilities are those of reading everything at once up to rounding; the trainer recomputes them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reply:
    """One sampled reply of n tokens, the end-of-turn token included where it was sampled."""

    token_ids: list[int]
    logp: list[float]  # of each token, at the sampling temperature, over the full softmax
    ended: bool  # False: it ran into the token limit


class Dialogues:
    """B conversations with one model. temperature 0: the likeliest token."""

    def __init__(self, model: Any, end_id: int, temperature: float = 1.0):
        self.model, self.end_id, self.temperature = model, end_id, temperature
        self._cache: Any = None
        self._mask: Any = None  # [B, T] what a row has read
        self._unread: list[list[int]] = []  # the last sampled token of each row

    def reply(
        self,
        contexts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rngs: Sequence[np.random.Generator],
        copies: int = 1,
        last: bool = False,
    ) -> list[Reply]:
        """Reads one context of token ids a conversation, and samples a reply to each by its own random numbers.

        copies: only at the beginning; every context is read once and begins that many conversations, in a row. last: no
        turn comes after this one, so that rows that have ended leave the batch.
        """
        import torch

        n = len(contexts) * copies
        begun = self._unread or [[]] * len(contexts)
        ids, mask = self._turn([[*before, *context] for before, context in zip(begun, contexts, strict=True)])
        tokens: list[list[int]] = [[] for _ in range(n)]
        logps: list[list[float]] = [[] for _ in range(n)]
        ended = [False] * n
        rows = list(range(n))  # the conversation of each row of the batch
        with torch.no_grad():
            for step in range(max_new_tokens):
                logits = self._read(ids, mask)
                if step == 0 and copies > 1:
                    self._cache.batch_repeat_interleave(copies)
                    self._mask, logits = (x.repeat_interleave(copies, dim=0) for x in (self._mask, logits))
                logp = torch.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)
                picked = _pick(logp, self.temperature, [rngs[row] for row in rows])
                chosen = logp.gather(1, picked[:, None])[:, 0].tolist()
                for row, token, value in zip(rows, picked.tolist(), chosen, strict=True):
                    if not ended[row]:
                        tokens[row].append(token)
                        logps[row].append(value)
                        ended[row] = token == self.end_id
                going = [i for i, row in enumerate(rows) if not ended[row]]
                if not going:
                    break
                ids = picked[:, None]
                if last and len(going) < len(rows):
                    self.keep(going)
                    ids, rows = ids[torch.tensor(going, device=ids.device)], [rows[i] for i in going]
                mask = torch.tensor([[int(not ended[row])] for row in rows], device=ids.device)
        self._unread = [some[-1:] for some in tokens]
        return [Reply(*parts) for parts in zip(tokens, logps, ended, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these conversations only, in this order."""
        import torch

        kept = torch.tensor(list(rows), device=self._mask.device)
        self._cache.batch_select_indices(kept)
        self._mask = self._mask[kept]
        self._unread = [self._unread[i] for i in rows] if self._unread else []

    def _turn(self, turns: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Token ids and mask [B, W] of a turn, on the left padded: all replies begin at the same column."""
        import torch

        device = next(self.model.parameters()).device
        width = max(map(len, turns))
        ids = torch.full((len(turns), width), max(self.end_id, 0), dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for i, turn in enumerate(turns):
            ids[i, width - len(turn) :] = torch.tensor(list(turn), device=device)
            mask[i, width - len(turn) :] = 1
        return ids, mask

    def _read(self, ids: Any, mask: Any) -> Any:
        """Logits [B, V] of what follows ids [B, W]."""
        import torch

        from text_agents.cache import growing_cache

        if self._cache is None:
            self._cache = growing_cache(self.model.config)
        self._mask = mask if self._mask is None else torch.cat([self._mask, mask], dim=1)
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        return out.logits[:, -1]


def _pick(logp: Any, temperature: float, rngs: Sequence[np.random.Generator]) -> Any:
    """A token a row, by inverting the cumulated probabilities at a uniform number of the row's own."""
    import torch

    if temperature == 0:
        return logp.argmax(dim=-1)
    cumulated = logp.double().exp().cumsum(dim=-1)
    draws = torch.tensor([[rng.random()] for rng in rngs], dtype=torch.float64, device=logp.device) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, draws, right=True)[:, 0].clamp(max=logp.shape[-1] - 1)
