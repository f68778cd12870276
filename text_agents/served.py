"""Replies from a server that samples (vLLM's completions with token ids), for a language policy that trains here.

What is sent are token ids, and what comes back are the sampled ids with their log-probabilities: text is never encoded again.
Before the policy samples with other weights than last time, its adapter is saved and the server loads it by a new name
(vLLM: --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True); both must see the same folder.

Non-obvious behaviour
* The trainer computes log-probabilities anew, so an engine that rounds differently does not bias ratios. But one that serves
  other weights, or log-probabilities of another temperature, would go unnoticed: the first reply of every batch is scored here
  as well, and the run ends where they differ by more than `max_gap` nats a token.
* Sampling is the server's, by seeds that we send: a resumed run is not bit-equal.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from text_agents.dialogues import Reply
from text_agents.server import Server
from vla_wmrl.errors import UserError, require

if TYPE_CHECKING:
    from text_agents.language_policy import LanguagePolicy


class Engine:
    """A server that samples for one policy. `gap`: of its log-probabilities to ours at the last check, nats a token."""

    def __init__(
        self, url: str, folder: Path, model: str | None = None, key: str = "", timeout_s: float = 600.0, parallel: int = 64,
        max_gap: float = 0.1,
    ):  # fmt: skip
        """folder: where adapters are written for the server to read. model: None asks the server."""
        self.server, self.folder, self.parallel, self.max_gap = Server(url, key, timeout_s), Path(folder), parallel, max_gap
        self.base = model or self.server.first_model()
        self.name, self.gap = self.base, float("nan")
        self._loaded = ""

    def update(self, policy: LanguagePolicy) -> None:
        """Lets the server load the policy's present weights, unless it has them."""
        digest = hashlib.sha256()
        for _, p in policy.parameters_to_train():
            digest.update(p.detach().float().cpu().numpy().tobytes())
        if digest.hexdigest() == self._loaded:
            return
        before, self.name = self.name, f"policy-{digest.hexdigest()[:16]}"
        folder = self.folder / self.name
        policy.save(folder)
        self.server.request("/load_lora_adapter", {"lora_name": self.name, "lora_path": str(folder.resolve())})
        if before != self.base:
            self.server.request("/unload_lora_adapter", {"lora_name": before})
            shutil.rmtree(self.folder / before, ignore_errors=True)
        self._loaded = digest.hexdigest()

    def metrics(self) -> dict[str, float]:
        return {"rollout/logp_gap": self.gap}

    def complete(self, ids: Sequence[int], end_id: int, max_new_tokens: int, temperature: float, seed: int) -> Reply:
        """One reply to a prompt of token ids. Raises UserError for an answer without ids and log-probabilities."""
        content = {
            "model": self.name, "prompt": list(ids), "max_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,  # a model's own settings may have others
            "logprobs": 1, "return_token_ids": True, "stop_token_ids": [end_id], "skip_special_tokens": False,
        }  # fmt: skip
        choice = (self.server.ask("/completions", content).get("choices") or [{}])[0]
        tokens, logps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        whole = tokens is not None and logps is not None and len(tokens) == len(logps) and None not in logps
        if not whole:
            raise UserError(f"{self.server.url} returns no token ids with log-probabilities: vLLM since 0.10.2 does")
        ended = bool(tokens) and tokens[-1] == end_id
        stopped = choice.get("finish_reason") == "stop"
        require(ended or not stopped, f"{self.server.url} leaves out the token that ended a reply, which trains as well")
        return Reply([int(t) for t in tokens], [float(x) for x in logps], ended)

    def check(self, policy: LanguagePolicy, context: Sequence[int], reply: Reply, temperature: float) -> None:
        """Scores a reply here as well. Raises UserError where the server must be sampling from something else."""
        import torch

        from text_agents.language_model import score

        ids = torch.tensor([[*context, *reply.token_ids]], device=policy.device)
        with torch.no_grad():
            ours = score(policy.model, ids, torch.ones_like(ids), temperature)[0, len(context) :].cpu().numpy()
        self.gap = float(np.abs(ours - np.array(reply.logp)).mean()) if reply.logp else 0.0
        require(
            self.gap <= self.max_gap,
            f"{self.server.url}: log-probabilities differ from this policy's by {self.gap:.3g} nats a token, more than "
            f"rollouts.max_gap={self.max_gap:g}: serve the same base model, and (vLLM) --logprobs-mode processed_logprobs",
        )


class ServedDialogues:
    """`dialogues.Dialogues` whose replies a server samples. What a conversation has read is sent again; servers cache it."""

    def __init__(self, engine: Engine, policy: LanguagePolicy, temperature: float):
        self.engine, self.policy, self.temperature = engine, policy, temperature
        self._read: list[list[int]] = []

    def reply(
        self,
        contexts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rngs: Sequence[np.random.Generator],
        copies: int = 1,
        last: bool = False,
    ) -> list[Reply]:
        """See `Dialogues.reply`."""
        begun = not self._read
        if begun:
            self._read = [[] for _ in range(len(contexts) * copies)]
        prompts = [[*read, *contexts[i // copies]] for i, read in enumerate(self._read)]
        seeds = [int(rng.integers(2**31)) for rng in rngs]
        end_id = self.policy.chat.end_id

        def one(asked: tuple[list[int], int]) -> Reply:
            return self.engine.complete(asked[0], end_id, max_new_tokens, self.temperature, asked[1])

        with ThreadPoolExecutor(self.engine.parallel) as pool:
            replies = list(pool.map(one, zip(prompts, seeds, strict=True)))
        if (
            begun and self.temperature > 0
        ):  # at temperature 0 a server's log-probabilities are of another temperature, or of none
            self.engine.check(self.policy, prompts[0], replies[0], self.temperature)
        self._read = [[*prompt, *reply.token_ids] for prompt, reply in zip(prompts, replies, strict=True)]
        return replies

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these conversations only, in this order."""
        self._read = [self._read[i] for i in rows]


def make_engine(section: Any, folder: Path) -> Engine | None:
    """The engine of a config's `rollouts` section, None where sampling is done here."""
    import os

    if section.url is None:
        return None
    key = os.environ.get(section.key_variable, "")
    return Engine(section.url, folder, section.model, key, section.timeout_s, section.parallel, section.max_gap)
