"""A language model that grades predictions, for RWML's ablation (arXiv 2602.05842, Table 4): binary, or real-valued.

The paper's judge is given state, action, prediction and what came, and answers JSON with an analysis and a score. It lost to
the embedding's distance, and content-free sentences got 1.0 of it (appendix D).

Non-obvious behaviour
* An answer without a score in [0, 1] is no reward: the prediction is left out, never 0. So is a question that exceeds a local
  judge's context. An output without <next_state> scores 0 unasked.
* A server that fails now and then costs those rewards; one that answers nothing at all ends the run (it can be resumed).
* A local judge is not held to the form of its answer: free replies come in batches, constrained ones one by one.
* Judges answer at temperature 0, and equal questions are asked once: members of a group often predict the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from text_agents.config import JudgeSection
from text_agents.rwml.rewards import predicted_state
from text_agents.rwml.triplets import Triplet
from vla_wmrl.errors import UserError

SCHEMA = {
    "type": "object", "properties": {"analysis": {"type": "string"}, "score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["analysis", "score"],
}  # fmt: skip
KEPT = 100_000  # answers that a judge remembers
_SCORE = re.compile(r"\{.*\}", re.S)


def question(predicted: str, state: str, action: str, true: str, binary: bool) -> str:
    """What a judge is asked."""
    scale = "0 or 1" if binary else "a number from 0 to 1"
    return (
        "Compare a prediction of what an environment answers with what it answered.\n"
        f"State:\n{state}\nAction:\n{action}\nPredicted:\n{predicted}\nActual:\n{true}\n"
        f'Answer with JSON: {{"analysis": "...", "score": s}}, s being {scale}.'
    )


def score_in(answer: str, binary: bool) -> float | None:
    """The score in [0, 1] of a judge's answer (rounded to 0 or 1 if `binary`), None where it gives none."""
    found = _SCORE.search(answer)
    try:
        score = float(json.loads(found[0])["score"]) if found else math.nan
    except (ValueError, KeyError, TypeError):
        score = math.nan
    if not 0.0 <= score <= 1.0:
        return None
    return float(score >= 0.5) if binary else score


class Judge:
    """Rewards by a judge. `ask`: questions -> answers, "" where there is none."""

    def __init__(self, ask: Callable[[Sequence[str]], list[str]], binary: bool):
        self.ask, self.binary = ask, binary
        self.asked = 0  # questions so far
        self._known: dict[str, float | None] = {}

    def __call__(self, outputs: Sequence[str], triplets: Sequence[Triplet]) -> np.ndarray:
        """Rewards [N] of N outputs, each to a triplet; NaN where the judge gives no score."""
        predicted = [predicted_state(output) for output in outputs]
        asked = [
            None if p is None else question(p, t.observation.strip(), t.action, t.next_state.strip(), self.binary)
            for p, t in zip(predicted, triplets, strict=True)
        ]
        new = [q for q in dict.fromkeys(asked) if q is not None and q not in self._known]
        if len(self._known) + len(new) > KEPT:
            self._known, new = {}, [q for q in dict.fromkeys(asked) if q is not None]
        if new:
            self.asked += len(new)
            answers = self.ask(new)
            self._known |= {q: score_in(answer, self.binary) for q, answer in zip(new, answers, strict=True)}
        found = [0.0 if q is None else self._known[q] for q in asked]
        return np.array([math.nan if score is None else score for score in found])


def make_judge(cfg: JudgeSection, binary: bool, device: str = "cpu") -> Judge:
    """A judge behind a server, or a local one. Raises UserError where it does not answer, or is not there."""
    return Judge(_server(cfg) if cfg.url else _local(cfg, device), binary)


def _server(cfg: JudgeSection) -> Callable[[Sequence[str]], list[str]]:
    from text_agents.autoresearch.backends import ServerBackend

    key = os.environ.get(cfg.key_variable, "")
    server = ServerBackend(cfg.url, cfg.model, key=key, temperature=0.0, timeout_s=cfg.timeout_s, parallel=1)

    def one(prompt: str) -> str | UserError:
        try:
            return server.generate([prompt], SCHEMA, cfg.max_new_tokens)[0]
        except UserError as error:
            return error

    def ask(prompts: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(cfg.parallel) as pool:
            answers = list(pool.map(one, prompts))
        failures = [a for a in answers if isinstance(a, UserError)]
        if len(failures) == len(answers):
            raise UserError(f"the judge does not answer: {failures[0]}")
        return ["" if isinstance(a, UserError) else a for a in answers]

    ask([question("You see a pen 1.", "You are at a desk.", "look", "You see a pen 1.", True)])  # before a run has begun
    return ask


def _local(cfg: JudgeSection, device: str) -> Callable[[Sequence[str]], list[str]]:
    from text_agents.autoresearch.backends import TransformersBackend

    model = TransformersBackend(cfg.model, temperature=0.0, device=device)

    def ask(prompts: Sequence[str]) -> list[str]:
        room = model.context_tokens - cfg.max_new_tokens
        fits = [model.count_tokens(prompt) <= room for prompt in prompts]
        asked = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
        answers: list[str] = []
        for first in range(0, len(asked), cfg.parallel):
            answers += model.generate(asked[first : first + cfg.parallel], None, cfg.max_new_tokens)
        queue = iter(answers)
        return [next(queue) if fit else "" for fit in fits]

    return ask
