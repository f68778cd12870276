"""Who plays the user of tau2-bench: a script for tests, or a language model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from text_agents import tau2_data

STOP_WORDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # tau2's


class UserFailure(Exception):
    """The user could not answer: the episode has no reward (it is left out, not scored 0)."""


@dataclass(frozen=True)
class UserTurn:
    """What a user does next: calls tools of its own, or says something."""

    text: str = ""
    calls: tuple[tuple[str, dict], ...] = ()  # (tool, arguments)

    @property
    def stops(self) -> bool:
        return not self.calls and any(word in self.text for word in STOP_WORDS)


class User(Protocol):
    """A user: `begin` a task, then one turn per message of the agent, or per result of its own tool calls."""

    def begin(self, task, tools: list[dict]) -> UserTurn: ...

    def turn(self, heard: list[dict]) -> UserTurn:
        """heard: new messages, {"role": "assistant" | "tool", "content": str}. Raises UserFailure."""
        ...


@dataclass
class ScriptedUser:
    """Follows the task's own user actions: at each message of the agent the next run of them, then says goodbye.

    A run is what the task's list of actions has between two actions of the agent. For tests and replays: it answers no
    questions.
    """

    runs: list[list[tuple[str, dict]]] = field(default_factory=list)
    made: int = 0  # runs so far

    def begin(self, task, tools: list[dict]) -> UserTurn:
        self.runs, self.made = user_runs(task), 0
        instructions = task.user_scenario.instructions
        known = getattr(instructions, "known_info", None) or ""
        reason = getattr(instructions, "reason_for_call", None) or str(instructions)
        return UserTurn(f"{reason} {known}".strip())

    def turn(self, heard: list[dict]) -> UserTurn:
        if heard[-1]["role"] == "tool":
            return UserTurn(f"Done, that was step {self.made}.")
        if self.runs:
            self.made += 1
            return UserTurn(calls=tuple(self.runs.pop(0)))
        return UserTurn(f"Thank you. {STOP_WORDS[0]}")


def user_runs(task) -> list[list[tuple[str, dict]]]:
    """The task's user actions, grouped by the agent actions between them."""
    runs: list[list[tuple[str, dict]]] = []
    before = "assistant"
    for action in task.evaluation_criteria.actions or [] if task.evaluation_criteria else []:
        if action.requestor == "user":
            if before != "user":
                runs.append([])
            runs[-1].append((action.name, dict(action.arguments)))
        before = action.requestor
    return runs


Complete = Callable[[list[dict], list[dict]], dict]  # (messages, tools) -> an assistant message of the chat API


@dataclass
class ChatUser:
    """A language model as the user, with tau2's own instructions. `complete` answers in the chat API's form."""

    complete: Complete
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)

    def begin(self, task, tools: list[dict]) -> UserTurn:
        tau2_data.tau2()
        from tau2.user.user_simulator import SYSTEM_PROMPT, get_global_user_sim_guidelines

        guidelines = get_global_user_sim_guidelines(use_tools=bool(tools))
        prompt = SYSTEM_PROMPT.format(global_user_sim_guidelines=guidelines, instructions=task.user_scenario.instructions)
        self.messages, self.tools = [{"role": "system", "content": prompt}], tools
        return self.turn([{"role": "assistant", "content": "Hi! How can I help you today?"}])

    def turn(self, heard: list[dict]) -> UserTurn:
        ids = [call.get("id", "") for call in self.messages[-1].get("tool_calls") or ()]
        for message in heard:  # roles are seen from the user's side
            own = message["role"] == "tool"
            self.messages.append(
                {"role": "tool", "tool_call_id": ids.pop(0), "content": message["content"]}
                if own
                else {"role": "user", "content": message["content"]}
            )
        answer = self.complete(self.messages, self.tools)
        calls = answer.get("tool_calls") or []
        text = answer.get("content") or ""
        if not text.strip() and not calls:
            raise UserFailure("the user model answered nothing")
        self.messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        try:
            wanted = tuple((c["function"]["name"], json.loads(c["function"]["arguments"] or "{}")) for c in calls)
        except (KeyError, ValueError, TypeError) as error:
            raise UserFailure(f"the user model made a tool call that cannot be read: {error}") from error
        return UserTurn(text if not wanted else "", wanted)


def openai_endpoint(
    base_url: str, model: str, key: str = "none", temperature: float = 0.0, timeout_s: float = 60.0
) -> Complete:
    """`complete` for ChatUser over POST {base_url}/chat/completions. UserFailure when that does not answer."""

    def complete(messages: list[dict], tools: list[dict]) -> dict:
        body = {"model": model, "messages": messages, "temperature": temperature}
        body |= {"tools": tools} if tools else {}
        request = urllib.request.Request(
            base_url.rstrip("/") + "/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return json.load(reply)["choices"][0]["message"]
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserFailure(f"the user model at {base_url} did not answer: {error}") from error

    return complete
