"""Prompts of the two roles of one model: acting in ALFWorld or tau2-bench, and predicting what an action leads to.

Own words, after the description in RWML's tables A4 to A7 (arXiv 2602.05842): history, observation and potential action
in, thoughts in <think></think> and the observation in <next_state></next_state> out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from text_agents.rwml.triplets import Triplet

LAST_CHARACTERS = 30  # of an output without an action, sent as the command (verl-agent's convention, which RWML follows)
_ACTION = re.compile(r"<action>(.*?)</action>", re.S)


def history_lines(turns: Sequence[tuple[str, str]]) -> str:
    """Earlier (action, observation before it) turns, one line each; "(none)" at the start."""
    lines = [f"[{i}] saw: {seen.strip()}\n    did: {action}" for i, (action, seen) in enumerate(turns, start=1)]
    return "\n".join(lines) or "(none)"


def act(task: str, turns: Sequence[tuple[str, str]], observation: str, admissible: Sequence[str] | None) -> str:
    """The prompt of an ALFWorld agent; admissible None: the commands are not listed."""
    return (
        f"You act in a household, one command at a time. Your task: {task}\n\n"
        f"So far:\n{history_lines(turns)}\n\nNow you see:\n{observation.strip()}\n\n{_listed(admissible)}"
        "Think briefly in <think></think>, then give one command in <action></action>."
    )


def go_on(observation: str, admissible: Sequence[str] | None) -> str:
    """What a conversation that began with `act` says after each command."""
    return f"You see:\n{observation.strip()}\n\n{_listed(admissible)}Your next command?"


def act_label(command: str) -> str:
    """What imitation of a command teaches to say: no thoughts (the tags stay, for RL)."""
    return f"<think>\n\n</think>\n<action>{command}</action>"


def _listed(admissible: Sequence[str] | None) -> str:
    return "" if admissible is None else "Commands that do something now:\n" + "\n".join(admissible) + "\n\n"


def command_in(output: str) -> tuple[str, bool]:
    """(command, well-formed) of an agent's output. Without tags its last characters are the command."""
    found = _ACTION.findall(output)
    if not found:
        return output.strip()[-LAST_CHARACTERS:], False
    return " ".join(found[-1].split()), "<think>" in output and "</think>" in output


def serve(policy_and_tools: str) -> str:
    """The system message of a tau2-bench agent."""
    return (
        "You are a customer service agent. Keep to the policy; look things up and change them with the tools.\n\n"
        f"{policy_and_tools}\n\n"
        "In every turn, think briefly in <think></think>. Then either write a message to the user, or make one tool call:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\nNever both.'
    )


def service_action_in(output: str) -> tuple[str, bool]:
    """(message or tool call, well-formed) of a tau2-bench agent's output. Thoughts without an end are no message."""
    thoughts, ended, after = output.rpartition("</think>")
    if not ended and "<think>" in output:
        return "", False
    return after.strip(), bool(ended) and "<think>" in thoughts


def predict(triplet: Triplet, history: Sequence[tuple[str, str]] | None = None) -> str:
    """The prompt that asks for the next state. history: fewer turns than the triplet has, where they do not all fit."""
    turns = triplet.turns if history is None else history
    if triplet.kind == "alfworld":
        what, form = "the very next observation", "in the style of the observations above"
        before = f"You know households and the commands that act in them. The task: {triplet.task}"
    else:
        what = "the next message, of the user or of a tool"
        form = "a user's message as plain text; a tool's answer as a short status, or as its JSON schema without values"
        before = f"You know customer service with tools. About the user: {triplet.task or '(nothing known)'}"
    return (
        f"{before}\n\nSo far:\n{history_lines(turns)}\n\nNow:\n{triplet.observation.strip()}\n\n"
        f"Potential action:\n{triplet.action}\n\n"
        f"Predict {what}. First think briefly about the situation in <think></think>, then write the prediction in "
        f"<next_state></next_state>, {form}."
    )


def sft_label(triplet: Triplet) -> str:
    """What supervised training of the world model imitates: no thoughts, the state (the tags stay, for RL)."""
    return f"<think>\n\n</think>\n<next_state>{triplet.next_state.strip()}</next_state>"
