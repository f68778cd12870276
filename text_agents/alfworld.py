"""ALFWorld (arXiv 2010.03768) as an environment, an episode and a result: 30 steps, admissible commands, real games.

The games run on TextWorld's grammar and Fast Downward's translation, stepped here (`alfworld_games`) instead of in
TextWorld: the transcripts are the same, several tens of times faster, and a state can be continued from.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

from text_agents.alfworld_games import Game, GameState, games_hash
from text_agents.protocol import Observation, StepResult
from vla_wmrl.errors import UserError, require

MAX_STEPS = 30  # RWML's limit in evaluation (arXiv 2602.05842, s3.1); 15 while its policies train
INEFFICIENT = ("look", "inventory", "help", "examine")  # first words of commands that change nothing in the world
PROTOCOL = "ALFWorld, TextWorld games, at most {max_steps} steps, success = goal reached, one command a step"


class AlfworldEnv:
    """One game at a time. The reward is 1 when the goal is reached and 0 otherwise.

    A command that is not admissible costs a step, changes nothing, and is answered "Nothing happens.".
    """

    def __init__(self, max_steps: int = MAX_STEPS):
        require(max_steps >= 1, f"max_steps={max_steps} must be at least 1")
        self.max_steps = max_steps
        self.game: Game | None = None
        self.state: GameState | None = None
        self.steps = 0

    def reset(self, task: Game, seed: int = 0) -> Observation:
        """Start a game; `seed` changes nothing, games are deterministic."""
        self.game, self.steps = task, 0
        self.state, text = task.start()
        return self._observe(text)

    def continue_from(self, game: Game, state: GameState, steps: int) -> Observation:
        """Go on from a state that an earlier episode passed through (a branch start), `steps` into the episode."""
        self.game, self.state, self.steps = game, state, steps
        return self._observe("")

    def step(self, action: str) -> StepResult:
        """Raises UserError before a reset."""
        if self.game is None:
            raise UserError("step before reset: start a game first")
        command = action.strip()
        kind = kind_of(command, self.state.commands)
        self.state, text = self.game.step(self.state, command)
        self.steps += 1
        won = self.game.won(self.state)
        return StepResult(
            self._observe(text), float(won), won, not won and self.steps >= self.max_steps, {"kind": kind, "won": won}
        )

    def close(self) -> None:
        self.game = self.state = None

    def _observe(self, text: str) -> Observation:
        return Observation(text.strip(), self.game.task, tuple(self.state.admissible))


def kind_of(command: str, admissible: Sequence[str]) -> str:
    """ "invalid" (nothing happens), "inefficient" (it only looks) or "effective".

    RWML (s4.1) counts "invalid (e.g. format errors) or inefficient (e.g. look, examine)" actions and gives no closer
    definition; ours is `INEFFICIENT`. The three are counted apart, so that other definitions can be computed.
    """
    if command not in admissible:
        return "invalid"
    return "inefficient" if command.split(maxsplit=1)[0] in INEFFICIENT else "effective"


@dataclass(frozen=True)
class Episode:
    """One game played: a row of the results file."""

    game: str
    task_type: str
    digest: str  # sha256 of the game's file
    split: str
    seed: int
    success: bool
    steps: int
    truncated: bool
    invalid: int  # commands that did nothing
    inefficient: int  # commands that only looked
    commands: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)


Agent = Callable[[Observation, list[str], np.random.Generator], str]  # (now, commands so far, random numbers) -> command


def play(game: Game, agent: Agent, split: str = "", seed: int = 0, max_steps: int = MAX_STEPS) -> Episode:
    """One episode. Random numbers are keyed by (seed, game), so order and sharding change nothing."""
    env = AlfworldEnv(max_steps)
    rng = np.random.default_rng([seed, int(game.digest[:8], 16)])
    observation, commands, observations, kinds = env.reset(game), [], [], []
    observations.append(observation.text)
    while True:
        commands.append(agent(observation, commands, rng))
        result = env.step(commands[-1])
        observation = result.observation
        observations.append(observation.text)
        kinds.append(result.info["kind"])
        if result.terminated or result.truncated:
            break
    return Episode(
        game.name, game.task_type, game.digest, split, seed, result.terminated, len(commands), result.truncated,
        kinds.count("invalid"), kinds.count("inefficient"), commands, observations,
    )  # fmt: skip


def random_agent(observation: Observation, commands: list[str], rng: np.random.Generator) -> str:
    """A uniformly random admissible command."""
    return observation.admissible[rng.integers(len(observation.admissible))]


def walkthrough_agent(game: Game) -> Agent:
    """The plan that the game's file carries; after its end it looks."""
    plan = game.walkthrough
    require(len(plan) > 0, f"{game.path} carries no walkthrough")
    return lambda observation, commands, rng: plan[len(commands)] if len(commands) < len(plan) else "look"


RETURN, EXPLORE = 0.45, 0.1  # shares of commands of `returning_agent`


def returning_agent(game: Game) -> Agent:
    """Follows the walkthrough, and now and then goes back to one of the last places it was at, or does anything at all.

    For triplets of which the next state can be known: a random agent mostly goes where it has never been. Away from where
    the plan's next command can be given, it first goes back there. A random command may undo a step of the plan; where
    the plan cannot go on for that, the agent is random.
    """
    plan = game.walkthrough
    require(len(plan) > 0, f"{game.path} carries no walkthrough")
    done = [0]  # commands of the plan that have been given

    def act(observation: Observation, commands: list[str], rng: np.random.Generator) -> str:
        if not commands:
            done[0] = 0
        admissible = observation.admissible
        been = list(dict.fromkeys(c for c in reversed(commands) if c.startswith("go to ")))  # latest first
        back = [c for c in been[:3] if c in admissible]  # not where it is now
        draw = rng.random()
        if back and draw < RETURN:
            return back[rng.integers(len(back))]
        if draw < RETURN + EXPLORE:
            return random_agent(observation, commands, rng)
        if done[0] < len(plan) and plan[done[0]] in been[:1]:  # it is where the plan goes next
            done[0] += 1
        if done[0] < len(plan) and plan[done[0]] in admissible:
            done[0] += 1
            return plan[done[0] - 1]
        left = [c for c in plan[: done[0]] if c.startswith("go to ")][-1:]
        return left[0] if left and left[0] in admissible else random_agent(observation, commands, rng)

    return act


def summarize(episodes: Sequence[Episode], games: Sequence[Game], max_steps: int = MAX_STEPS) -> dict:
    """Success, steps and the share of invalid or inefficient actions, overall and by task type, with versions and hash.

    Raises UserError for an empty list: a rate of nothing is no result.
    """
    require(len(episodes) > 0, "no episodes: nothing to summarize")
    kinds = sorted({e.task_type for e in episodes})
    return {
        "protocol": PROTOCOL.format(max_steps=max_steps),
        "versions": versions(),
        "games_hash": games_hash(games),
        "all": _rates(episodes),
        "by_task_type": {kind: _rates([e for e in episodes if e.task_type == kind]) for kind in kinds},
    }


def _rates(episodes: Sequence[Episode]) -> dict:
    actions = sum(e.steps for e in episodes)
    invalid, inefficient = sum(e.invalid for e in episodes), sum(e.inefficient for e in episodes)
    return {
        "episodes": len(episodes),
        "successes": sum(e.success for e in episodes),
        "success": sum(e.success for e in episodes) / len(episodes),
        "actions": actions,
        "invalid": invalid / actions,
        "inefficient": inefficient / actions,
        "invalid_or_inefficient": (invalid + inefficient) / actions,
    }


def versions() -> dict[str, str]:
    """Versions that a score depends on."""
    names = ("alfworld", "textworld", "fast-downward-textworld")
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def row(episode: Episode) -> dict:
    """An episode as a row of a JSON-lines file."""
    return asdict(episode) | {"versions": versions()}


def shipped_grammar() -> tuple[str, str]:
    """The PDDL domain and the grammar that the alfworld package ships, for games made here.

    Raises UserError where the package is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("alfworld")
    require(spec is not None, "alfworld is not installed: pip install 'vla-wmrl[text]'")
    data = Path(spec.submodule_search_locations[0]) / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()
