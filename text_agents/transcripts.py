"""Multi-turn transcripts as token ids: what was sampled is kept as it was sampled, with masks that say who wrote what.

Text is decoded for the environment and never encoded again: encoding is not the inverse of decoding, and a token that
changed on the way makes ids and log-probabilities disagree (TRL issue 5224). Observations are encoded once, as what the
chat template puts between two replies.

Three masks, never one for another (TRL issue 4974):
* attention: the token exists (False: padding),
* policy: the model sampled it, so it carries gradient (False: prompt, observation, template),
* valid: the rollout counts at all (False: no reward, harness failure).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_wmrl.errors import UserError, require

StopReason = Literal["done", "turn_limit", "token_limit", "env_error", "parse_error", "running"]
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class TokenRollout:
    """One finished transcript of T tokens."""

    token_ids: np.ndarray  # [T] int64
    policy_mask: np.ndarray  # [T] bool, tokens the model sampled
    logp_old: np.ndarray  # [T] float32, log-probability at the sampling temperature over the full softmax; NaN elsewhere
    turn_id: np.ndarray  # [T] int64, which reply a token belongs to or leads up to
    group_id: int
    rollout_id: int
    reward: float | None  # None: absent, never 0
    stop_reason: StopReason
    policy_version: int = 0

    @property
    def valid(self) -> bool:
        """Does it count: a reward, and at least one sampled token."""
        return self.reward is not None and bool(np.isfinite(self.reward)) and bool(self.policy_mask.any())


@dataclass
class Transcript:
    """A transcript that grows: context and replies, in turns."""

    token_ids: list[int] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    logp_old: list[float] = field(default_factory=list)
    turn_id: list[int] = field(default_factory=list)
    turns: int = 0  # replies so far

    def add_context(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample."""
        self._append(ids, False, [float("nan")] * len(ids))

    def add_reply(self, ids: Sequence[int], logp: Sequence[float]) -> None:
        """Append sampled tokens [n] and their log-probabilities [n]. Raises ValueError where the lengths differ."""
        if len(ids) != len(logp):
            raise ValueError(f"{len(ids)} sampled tokens with {len(logp)} log-probabilities")
        self._append(ids, True, [float(x) for x in logp])
        self.turns += 1

    def _append(self, ids: Sequence[int], policy: bool, logp: list[float]) -> None:
        self.token_ids += [int(i) for i in ids]
        self.policy_mask += [policy] * len(ids)
        self.logp_old += logp
        self.turn_id += [self.turns] * len(ids)

    def room(self, max_tokens: int, extra: int = 0) -> int:
        """Tokens that still fit when `extra` more are about to be added; a transcript may fill `max_tokens` exactly."""
        return max_tokens - len(self.token_ids) - extra

    def finish(
        self, group_id: int, rollout_id: int, reward: float | None, stop_reason: StopReason, policy_version: int = 0
    ) -> TokenRollout:
        return TokenRollout(
            np.array(self.token_ids, np.int64), np.array(self.policy_mask, bool), np.array(self.logp_old, np.float32),
            np.array(self.turn_id, np.int64), group_id, rollout_id, reward, stop_reason, policy_version,
        )  # fmt: skip


@dataclass(frozen=True)
class TokenBatch:
    """B rollouts padded to T tokens, on the right: positions are the ones they were sampled at."""

    token_ids: np.ndarray  # [B, T] int64
    attention_mask: np.ndarray  # [B, T] bool
    policy_mask: np.ndarray  # [B, T] bool
    valid: np.ndarray  # [B] bool
    logp_old: np.ndarray  # [B, T] float32, 0 where the policy mask is False
    turn_id: np.ndarray  # [B, T] int64, -1 on padding


def pad(rollouts: Sequence[TokenRollout], pad_id: int) -> TokenBatch:
    """Rollouts as one batch. The pad token may be a token that also occurs in text: masks never look at ids."""
    require(len(rollouts) > 0, "no transcripts: nothing to put in a batch")
    length = max(len(r.token_ids) for r in rollouts)

    def stack(rows: Sequence[np.ndarray], fill) -> np.ndarray:
        return np.stack([np.pad(row, (0, length - len(row)), constant_values=fill) for row in rows])

    policy = stack([r.policy_mask for r in rollouts], False)
    return TokenBatch(
        token_ids=stack([r.token_ids for r in rollouts], pad_id),
        attention_mask=stack([np.ones(len(r.token_ids), bool) for r in rollouts], False),
        policy_mask=policy,
        valid=np.array([r.valid for r in rollouts]),
        logp_old=np.where(policy, stack([r.logp_old for r in rollouts], 0.0), 0.0).astype(np.float32),
        turn_id=stack([r.turn_id for r in rollouts], -1),
    )


class ChatFormat:
    """Prompts and what follows a reply, as token ids, by a tokenizer's chat template.

    template: text of a Jinja template instead of the tokenizer's own (`shipped("chatml")`). Raises UserError for a
    tokenizer without one, and for a template that renders a conversation differently once it goes on: under such a
    template a multi-turn transcript cannot be exact.
    """

    def __init__(self, tokenizer: Any, template: str | None = None):
        self.tokenizer = tokenizer
        self.template = template or getattr(tokenizer, "chat_template", None)
        require(
            bool(self.template),
            "the tokenizer has no chat template: use an instruct model, or pass a template (shipped: chatml)",
        )
        require(tokenizer.eos_token_id is not None, "the tokenizer has no end-of-turn token")
        self.end_id = int(tokenizer.eos_token_id)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._specials = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        check_prefix(self)

    def render(self, messages: Sequence[dict[str, str]], reply_next: bool = True) -> list[int]:
        """Token ids of a conversation; reply_next: up to where the model's reply begins."""
        clean = [m | {"content": self.neutral(m["content"])} for m in messages]
        text = self.tokenizer.apply_chat_template(
            clean, chat_template=self.template, tokenize=False, add_generation_prompt=reply_next
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def between(self, role: str, content: str, ended: bool = True) -> list[int]:
        """Ids from the end of a sampled reply to where the next begins, around one message.

        ended: the reply ends with the end-of-turn token, as sampled; otherwise (it ran into a limit) that comes first.
        """
        stem = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        whole = self.render([*stem, {"role": role, "content": content}])
        cut = self._end_of_reply(stem)
        return ([] if ended else [self.end_id]) + whole[cut:]

    def _end_of_reply(self, stem: list[dict[str, str]]) -> int:
        """Index just after the end-of-turn token of the last reply."""
        ids = self.render(stem, reply_next=False)
        ends = [i for i, token in enumerate(ids) if token == self.end_id]
        require(bool(ends), "the chat template does not end a reply with the tokenizer's end-of-turn token")
        return ends[-1] + 1

    def neutral(self, text: str) -> str:
        """Text in which special tokens are spelled so that they are text: no observation may end a turn."""
        for token in self._specials:
            if token in text:
                text = text.replace(token, token[:1] + " " + token[1:])
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """A reply as text, without the end-of-turn token."""
        return self.tokenizer.decode([i for i in ids if i != self.end_id], skip_special_tokens=False)


# Conversations that templates are known to render differently once they go on: thoughts dropped from earlier replies,
# a default system message, blanks stripped, several observations in a row.
CONVERSATIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("system", "You act in a room."),
        ("user", "look"),
        ("assistant", "<think>\nfirst\n</think>\n\n<action>go</action>"),
    ),
    (("user", "one"), ("assistant", "<think></think> two "), ("user", " three\n"), ("assistant", "four")),
    (("user", "one"), ("assistant", ""), ("user", "<tool_response>\n{}\n</tool_response>"), ("assistant", "<think>x")),
)


def check_prefix(chat: ChatFormat) -> None:
    """Raise UserError unless every conversation's ids are a prefix of the ids of its continuation."""
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        for n in range(1, len(messages) + 1):
            if messages[n - 1]["role"] != "assistant":
                continue
            before = chat.render(messages[:n], reply_next=False)
            after = chat.render([*messages[:n], {"role": "user", "content": "go on"}])
            if after[: len(before)] != before:
                raise UserError(
                    "the chat template changes earlier messages when a conversation goes on (it drops thoughts, or "
                    "adds a system message): train on single steps, or pass a template that does not (shipped: chatml)"
                )


def shipped(name: str) -> str:
    """A chat template of this package. Raises UserError for an unknown name."""
    path = TEMPLATES / f"{name}.jinja"
    known = sorted(p.stem for p in TEMPLATES.glob("*.jinja"))
    require(path.is_file(), f"no shipped chat template {name!r} (known: {', '.join(known)})")
    return path.read_text(encoding="utf-8")


def fit_history(render: Callable[[Sequence[Any]], list[int]], history: Sequence[Any], max_tokens: int) -> tuple[list[int], int]:
    """Prompt ids that fit, and how many of the oldest history entries were left out for that.

    render: history entries -> ids of the whole prompt. Raises UserError where it does not fit even without history.
    """
    for dropped in range(len(history) + 1):
        ids = render(history[dropped:])
        if len(ids) <= max_tokens:
            return ids, dropped
    raise UserError(f"a prompt of {len(ids)} tokens without any history exceeds the limit of {max_tokens}")
