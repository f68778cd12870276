"""How a conversation with the policy is worded: what it reads first, how its action is read, what it reads after that.

ALFWorld: one user message with the task, then what is seen. tau2-bench: a system message with the domain's policy and the
agent's tools, the user's words, and tools' answers in <tool_response></tool_response>, as the models' own templates have them.
"""

from __future__ import annotations

from typing import Protocol

from text_agents.protocol import Observation, StepResult
from text_agents.rwml import prompts


class Form(Protocol):
    def opening(self, now: Observation, listed: bool) -> list[dict[str, str]]:
        """Messages before the first reply. listed: with what can be done, where the environment says it."""
        ...

    def action_in(self, output: str) -> tuple[str, bool]:
        """(action, well-formed) of a reply."""
        ...

    def more(self, result: StepResult, listed: bool) -> str:
        """The user message after an action."""
        ...


class Household:
    """ALFWorld's commands."""

    def opening(self, now: Observation, listed: bool) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompts.act(now.task, (), now.text, now.admissible if listed else None)}]

    def action_in(self, output: str) -> tuple[str, bool]:
        return prompts.command_in(output)

    def more(self, result: StepResult, listed: bool) -> str:
        now = result.observation
        return prompts.go_on(now.text, now.admissible if listed else None)


class Service:
    """tau2-bench's messages and tool calls. An opening's `task` is the domain's policy with the tools."""

    def opening(self, now: Observation, listed: bool) -> list[dict[str, str]]:
        return [{"role": "system", "content": prompts.serve(now.task)}, {"role": "user", "content": now.text}]

    def action_in(self, output: str) -> tuple[str, bool]:
        return prompts.service_action_in(output)

    def more(self, result: StepResult, listed: bool) -> str:
        text = result.observation.text
        return text if result.info["source"] == "user" else f"<tool_response>\n{text}\n</tool_response>"
