"""What a model still knows: perplexity of plain English, and simple questions with four answers each.

The text is Python's own documentation of its language (`pydoc_data.topics`), which every interpreter carries; the
questions (`questions.json`, 60, four kinds) are ours. Both are small: they show that a model has broken, not how good it is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

QUESTIONS = Path(__file__).parent / "questions.json"


def plain_text() -> str:
    """Long topics of Python's documentation, in the order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)


def questions() -> list[dict]:
    """Rows of {"kind", "text", "answers"}; the first answer is right, and continues the text."""
    return json.loads(QUESTIONS.read_text(encoding="utf-8"))


def token_losses(model: Any, ids: Sequence[int], window: int) -> np.ndarray:
    """Negative log-likelihoods [n] in nats of tokens, each window of text read on its own (its first token is not scored)."""
    import torch

    losses = []
    device = next(model.parameters()).device
    for first in range(0, len(ids) - 1, window):
        part = torch.tensor([list(ids[first : first + window])], device=device)
        if part.shape[1] < 2:
            continue
        with torch.no_grad():
            logp = torch.log_softmax(model(part).logits[0, :-1].float(), dim=-1)
        losses.append(-logp.gather(1, part[0, 1:, None])[:, 0].cpu().numpy())
    return np.concatenate(losses)


def perplexity(model: Any, tokenizer: Any, tokens: int, window: int = 512) -> dict:
    """Of the first `tokens` tokens of `plain_text`."""
    text = plain_text()
    # four characters make a token of English; eight are enough, and the rest of a megabyte is not encoded for nothing
    ids = tokenizer(text[: 8 * tokens], add_special_tokens=False)["input_ids"][:tokens]
    losses = token_losses(model, ids, window)
    digest = hashlib.sha256(tokenizer.decode(ids).encode()).hexdigest()[:12]
    return {"perplexity": math.exp(losses.mean()), "tokens": len(losses), "window": window, "text": digest}


def answer_scores(model: Any, tokenizer: Any, text: str, answers: Sequence[str]) -> list[float]:
    """Log-likelihood of each answer after the text, a character of the answer (lm-eval's acc_norm)."""
    import torch

    head = tokenizer(text, add_special_tokens=False)["input_ids"]
    scores = []
    for answer in answers:
        tail = tokenizer(" " + answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([head + tail], device=next(model.parameters()).device)
        with torch.no_grad():
            logp = torch.log_softmax(model(ids, logits_to_keep=len(tail) + 1).logits[0, :-1].float(), dim=-1)
        scores.append(float(logp.gather(1, ids[0, len(head) :, None]).sum()) / len(answer))
    return scores


def answer(model: Any, tokenizer: Any) -> list[dict]:
    """A row a question: kind, text, whether the right answer is the likeliest."""
    rows = []
    for question in questions():
        scores = answer_scores(model, tokenizer, question["text"], question["answers"])
        rows.append({"kind": question["kind"], "text": question["text"], "right": int(np.argmax(scores)) == 0})
    return rows
