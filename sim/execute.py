"""Real execution of groups in the worker pool, beside whatever the main process does meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from sim.libero import EnvSpec
from sim.rewards import mark
from sim.rollout import PolicyRef, Recorded, RolloutJob, Trace
from sim.workers import Pool
from vla_wmrl.config import GroupsConfig
from vla_wmrl.learner import Learner
from vla_wmrl.types import Rollout, Start

NO_LIMIT = 10**6  # control steps; a branch ends by its looks


class GroupExecutor:
    """Runs groups of the policy in training. Keeps what the world model and the bank of starts learn from."""

    def __init__(
        self, pool: Pool, specs: dict[int, EnvSpec], policy: PolicyRef, learner: Learner, groups: GroupsConfig,
        folder: Path, conjuncts: Mapping[int, int], max_steps: int | None = None,
    ):  # fmt: skip
        """`conjuncts`: of every task's goal."""
        self.pool, self.specs, self.policy, self.learner, self.conjuncts = pool, specs, policy, learner, conjuncts
        self.groups, self.max_steps = groups, max_steps
        self.weights = folder / "live_weights.safetensors"
        self.traces: list[Trace] = []
        self.reached: list[Start] = []

    def publish(self) -> PolicyRef:
        """Writes the policy's present weights where workers find them."""
        draft = self.weights.with_suffix(".tmp")
        save_file({name: p.detach().contiguous() for name, p in self.learner.policy.parameters_to_train()}, draft)
        draft.replace(self.weights)
        return replace(self.policy, weights=str(self.weights), version=self.learner.updates)

    def __call__(self, starts: Sequence[Start], group_size: int, seed: tuple[int, ...]) -> Future:
        """A future of one tuple of rollouts per start, in the order of `starts`."""
        policy = self.publish()
        branch = self.groups.kind == "branch"
        jobs = [
            RolloutJob(
                spec=self.specs[start.task_id], starts=(start,) * group_size, members=tuple(range(group_size)),
                policy=policy, seed=seed, explore_looks=self.groups.explore_looks if branch else None,
                max_looks=self.groups.looks if branch else None,
                until_next=branch and self.groups.reward == "next",
                max_steps=NO_LIMIT if branch else self.max_steps, width=group_size, record=True, keep_starts=branch,
            )
            for start in starts
        ]  # fmt: skip
        return self.pool.submit(jobs, self._keep)

    def _keep(self, results: list[list[Recorded]]) -> list[tuple[Rollout, ...]]:
        for group in results:
            self.traces += [r.trace for r in group if r.trace is not None]
            for r in group[:2]:  # two members: the rest look alike
                start = r.rollout.start
                self.reached += mark((start, *r.starts[1:]), r.rollout.progress, self.conjuncts[start.task_id])[1:]
        return [tuple(r.rollout for r in group) for group in results]

    def drain(self) -> tuple[list[Trace], list[Start]]:
        """Traces and reached states since the last call."""
        taken = self.traces, self.reached
        self.traces, self.reached = [], []
        return taken


def collect(
    pool: Pool, specs: dict[int, EnvSpec], policy: PolicyRef, init_ids: Sequence[int], split: str, seed: int,
    max_steps: int | None = None, on_result=lambda n: None,
) -> list[Recorded]:  # fmt: skip
    """Whole episodes of `policy` from `init_ids` of every task, with traces and a branch start for every look.

    They do not explore: noise at every look took a policy that solved 31 % of its episodes to 7 %, and starts would lie where
    the policy that is evaluated never comes.
    """
    size = 4
    jobs = [
        RolloutJob(
            spec=spec, starts=tuple(Start(task, i, split=split) for i in init_ids[first : first + size]),
            members=(0,) * len(init_ids[first : first + size]), policy=policy, seed=(seed, 9_999_999), stochastic=False,
            max_steps=max_steps, width=size, beyond=2, record=True, keep_starts=True,
        )
        for first in range(0, len(init_ids), size)
        for task, spec in specs.items()
    ]  # fmt: skip
    results: dict[int, list[Recorded]] = {}
    for index, recorded in pool.run(jobs):
        results[index] = recorded
        on_result(len(recorded))
    return [r for i in range(len(jobs)) for r in results[i]]
