"""Supervised next-state prediction (RWML's WM SFT): the true next state behind an empty think block."""

from __future__ import annotations

import math
from collections.abc import Sequence

from text_agents.language_policy import LanguagePolicy
from text_agents.rwml import prompts
from text_agents.rwml.triplets import Triplet
from text_agents.transcripts import TokenRollout, Transcript


def label(policy: LanguagePolicy, triplet: Triplet, prompt: Sequence[int]) -> TokenRollout:
    """What imitation of a triplet teaches, after the ids of its prompt."""
    transcript = Transcript()
    transcript.add_context(prompt)
    text = policy.chat.neutral(prompts.sft_label(triplet))
    ids = list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    transcript.add_reply([*ids, policy.chat.end_id], [math.nan] * (len(ids) + 1))
    return transcript.finish(0, 0, 1.0, "done")
