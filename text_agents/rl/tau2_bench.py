"""tau2-bench for policy RL: episodes side by side with a user, tau2's evaluator as the reward, official splits.

Non-obvious behaviour
* Success is tau2's reward of 1. An episode cut by the limit of actions or of tokens scores 0, as tau2 has it.
* A user that fails leaves the episode without a reward, also where it fails before it has said anything; such episodes are
  left out of training and of rates, counted, and evaluated again by a resumed evaluation.
* Some tasks require no action: what doing nothing scores stands beside every rate (`do_nothing`).
* Each running episode has data bases of its own, tens of megabytes in retail and airline: `episodes.batch` bounds them.
* With a language model as the user, a run resumed is not bit-equal: what the server samples is not ours to key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from text_agents import tau2_data
from text_agents.protocol import Observation, StepResult
from text_agents.rl.config import Tau2Section, TextRlConfig
from text_agents.rl.episodes import EpisodeRollout
from text_agents.rl.forms import Service
from text_agents.tau2 import PROTOCOL, Tau2Env, Tau2Task
from text_agents.tau2_users import ChatUser, ScriptedUser, User, UserFailure, openai_endpoint
from vla_wmrl.errors import UserError, require
from vla_wmrl.stats import wilson
from vla_wmrl.types import Source, Start

AVERAGE = "average"  # of all tasks of all domains, as RWML's AVG weighs them


class Tau2World:
    """Episodes of `tasks`, side by side; `make_user` None: solo mode. A `rl.episodes.World`."""

    source: Source = "real"
    form = Service()

    def __init__(
        self, tasks: Sequence[Tau2Task], max_steps: int, make_user: Callable[[], User] | None = ScriptedUser, parallel: int = 1
    ):
        self.tasks, self.max_steps, self.make_user, self.parallel = tasks, max_steps, make_user, parallel
        self._envs: list[Tau2Env] = []
        self._failed: dict[int, str] = {}  # episodes whose user said nothing to begin with

    def reset(self, starts: Sequence[Start]) -> list[Observation]:
        solo = self.make_user is None
        self._envs = [Tau2Env(None if solo else self.make_user(), solo, self.max_steps) for _ in starts]
        self._failed = {}
        return self._map(self._open, range(len(starts)), [self.tasks[start.task_id] for start in starts])

    def _open(self, row: int, task: Tau2Task) -> Observation:
        env = self._envs[row]
        try:
            text = env.reset(task).text
        except UserFailure as error:
            self._failed[row], text = str(error), ""
        return Observation(text, env.system_prompt())

    def step(self, rows: Sequence[int], commands: Sequence[str], keys: Sequence[Sequence[int]]) -> list[StepResult]:
        return self._map(self._act, rows, commands)

    def _act(self, row: int, command: str) -> StepResult:
        if row in self._failed:
            return StepResult(
                Observation(""), None, False, True, {"kind": "missing", "source": "", "stop_reason": self._failed[row]}
            )
        return self._envs[row].step(command)

    def _map(self, work: Callable, *arguments: Sequence) -> list:
        """In threads where each waits for a server."""
        if self.parallel == 1:
            return list(map(work, *arguments))
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(work, *arguments))

    def close(self) -> None:
        self._envs, self._failed = [], {}


def user_maker(cfg: Tau2Section) -> Callable[[], User] | None:
    """Makes a user for an episode; None in solo mode. Raises UserError where the user's server does not answer."""
    if cfg.user == "solo":
        return None
    if cfg.user == "scripted":
        return ScriptedUser
    key = os.environ.get(cfg.user_key_variable) or "none"
    complete = openai_endpoint(cfg.user_url, cfg.user_model, key, cfg.user_temperature, cfg.user_timeout_s)
    try:
        complete([{"role": "user", "content": "Say hello."}], [])
    except UserFailure as error:
        raise UserError(str(error)) from error
    return lambda: ChatUser(complete)


def tasks_of(domain: str, split: str, limit: int | None) -> list[Tau2Task]:
    """Tasks of an official split; limit: this many, spread over it."""
    ids = tau2_data.task_ids(domain, split)
    if limit is not None and limit < len(ids):
        ids = [ids[i * len(ids) // limit] for i in range(limit)]
    return [Tau2Task(domain, i) for i in ids]


class Tau2Bench:
    """Tasks of one or more domains; held-out ones by domain. Raises UserError for tasks on both sides, and silent users."""

    def __init__(self, cfg: TextRlConfig):
        self.cfg, some = cfg, cfg.tau2
        self.train = [task for domain in some.domains for task in tasks_of(domain, some.split, some.limit)]
        asked = some.domains if cfg.evaluates() else []
        self.held = {domain: tasks_of(domain, some.eval_split, cfg.eval.limit) for domain in asked}
        both = {task for tasks in self.held.values() for task in tasks} & set(self.train)
        require(not both, f"{len(both)} tasks of {some.split} and {some.eval_split} are both trained on and evaluated")
        self.make_user = user_maker(some)
        for domain in some.domains:  # read before threads ask at once
            tau2_data.do_nothing_reward(domain, next(task.task_id for task in self.train if task.domain == domain))

    def _world(self, tasks: Sequence[Tau2Task], max_steps: int) -> Tau2World:
        parallel = self.cfg.tau2.user_parallel if self.cfg.tau2.user == "chat" else 1
        return Tau2World(tasks, max_steps, self.make_user, parallel)

    def world(self) -> Tau2World:
        return self._world(self.train, self.cfg.train_max_steps)

    def held_world(self, name: str) -> Tau2World:
        return self._world(self.held[name], self.cfg.eval.max_steps)

    def place(self, name: str, item: Tau2Task) -> tuple:
        return item.domain, item.task_id

    def place_of(self, row: dict) -> tuple:
        return row["domain"], row["task_id"]

    def row(self, name: str, item: Tau2Task, rollout: EpisodeRollout) -> dict:
        r = rollout
        return {
            "domain": item.domain, "task_id": item.task_id, "split": self.cfg.tau2.eval_split, "seed": self.cfg.seed,
            "user": self.cfg.tau2.user, "success": r.success, "reward": r.score, "steps": r.steps, "stop": r.stop_reason,
            "do_nothing": tau2_data.do_nothing_reward(item.domain, item.task_id), "calls": r.kinds.count("call"),
            "invalid": r.kinds.count("invalid"), "malformed": r.malformed, "cut": r.cut, "tokens": len(r.token_ids),
            "commands": list(r.commands), "observations": list(r.observations), "versions": tau2_data.versions(),
        }  # fmt: skip

    def summarize(self, rows: Sequence[dict]) -> dict[str, dict]:
        """By domain, and over all of them."""
        found = {domain: {"all": rates([r for r in rows if r["domain"] == domain])} for domain in self.held}
        if len(found) > 1:
            found[AVERAGE] = {"all": rates(rows)}
        facts = {"greedy": self.cfg.eval.greedy, "split": self.cfg.tau2.eval_split, "user": self.cfg.tau2.user}
        protocol = {"protocol": PROTOCOL.format(max_steps=self.cfg.eval.max_steps), "versions": tau2_data.versions()}
        return {name: one | facts | protocol for name, one in found.items()}

    def remark(self, rates: dict) -> str:
        return f"doing nothing {rates['do_nothing']:.3f}, {rates['invalid_calls']:.1%} of tool calls invalid"

    def manifest(self) -> dict:
        some = self.cfg.tau2
        return {
            "protocol": PROTOCOL.format(max_steps=self.cfg.eval.max_steps), "train_tasks": len(self.train),
            "evaluated": {domain: {"tasks": len(tasks), "split": some.eval_split} for domain, tasks in self.held.items()},
            "versions": tau2_data.versions(), "user": {"kind": some.user, "url": some.user_url, "model": some.user_model},
        }  # fmt: skip


def rates(rows: Sequence[dict]) -> dict:
    """Rates of N episodes. Those without a reward are counted, and are in no rate of success."""
    scored = [r for r in rows if r["reward"] is not None]
    n, successes, actions = len(scored), sum(r["success"] for r in scored), sum(r["steps"] for r in rows)
    low, high = wilson(successes, n) if n else (math.nan, math.nan)
    calls = sum(r["calls"] + r["invalid"] for r in rows)
    return {
        "episodes": n, "no_reward": len(rows) - n, "successes": successes, "success": successes / n if n else math.nan,
        "success_low": low, "success_high": high, "actions": actions,
        "do_nothing": sum(r["do_nothing"] for r in rows) / max(len(rows), 1),
        "invalid_calls": sum(r["invalid"] for r in rows) / max(calls, 1),
        "malformed": sum(r["malformed"] for r in rows) / max(actions, 1),
        "cut_replies": sum(r["cut"] for r in rows) / max(actions, 1),
        "turn_limit": sum(r["stop"] == "turn_limit" for r in rows),
        "token_limit": sum(r["stop"] == "token_limit" for r in rows),
    }  # fmt: skip
