"""What the text environments share: three calls and what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Observation:
    """What the agent sees."""

    text: str
    task: str = ""  # the task in words
    admissible: tuple[str, ...] = ()  # actions that do something here; () where the environment does not list them


@dataclass(frozen=True)
class StepResult:
    """What one action led to. A reward that could not be determined is None, never 0."""

    observation: Observation
    reward: float | None
    terminated: bool  # the task ended
    truncated: bool  # a limit ended it
    info: dict[str, Any] = field(default_factory=dict)


class TextEnv(Protocol):
    """A text environment: synchronous, one episode at a time."""

    def reset(self, task: Any, seed: int = 0) -> Observation: ...

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...
