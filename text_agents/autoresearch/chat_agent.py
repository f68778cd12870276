"""Any chat model as an agent: it reads the task, writes a program (or a specification), reads what became of it, and
writes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from text_agents.autoresearch.episode import Trajectory, observation


class ChatModel(Protocol):
    """A backend that answers conversations. With `context_tokens` and `count_tokens(text)`, they are kept within."""

    def chat(self, conversations: Sequence[list[dict]], max_tokens: int) -> list[str]: ...


class ChatAgent:
    """An `Agent` over a chat model. `counts_`: turns left out because a conversation outgrew the context, and
    trajectories where even the task does not fit ("too_long": the model is not asked, and its turn is malformed)."""

    def __init__(self, model: ChatModel, max_tokens: int = 2048):
        self.model, self.max_tokens = model, max_tokens
        self.counts_ = {"left_out": 0, "too_long": 0}

    def act(self, prompt: str, histories: Sequence[Trajectory], kind: str) -> list[str]:
        conversations = [self.fitting(prompt, history) for history in histories]
        asked = [c for c in conversations if c is not None]
        answers = iter(self.model.chat(asked, self.max_tokens) if asked else [])
        return ["" if c is None else next(answers) for c in conversations]

    def fitting(self, prompt: str, history: Trajectory) -> list[dict] | None:
        """The conversation so far, without its oldest turns where it would not fit; None where the task alone is too long."""
        limit = getattr(self.model, "context_tokens", None)
        turns = list(zip(history.texts, history.turns, strict=True))
        for dropped in range(len(turns) + 1):
            messages = [{"role": "user", "content": prompt}]
            for text, turn in turns[dropped:]:
                messages += [{"role": "assistant", "content": text}]
                messages += [{"role": "user", "content": f"{observation(turn)}\n\nImprove on it; the best turn counts."}]
            size = 0 if limit is None else self.model.count_tokens("\n".join(m["content"] for m in messages))
            if limit is None or size + self.max_tokens <= limit:
                self.counts_["left_out"] += dropped
                return messages
        self.counts_["too_long"] += 1
        return None
