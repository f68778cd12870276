"""Closed-loop rollouts of a policy in LIBERO, several at a time in one simulator by switching its state between looks.

Everything that is random is keyed by (seed, task, init, episode, look, member), and the policy is always called with the
same batch shape, so a rollout does not depend on which others run beside it, on the number of workers or on a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sim.libero import EnvSpec, LiberoEnv, Snapshot
from sim.progress import progress
from sim.protocol import STATE_KEY
from sim.rewards import passes
from sim.state import read_state
from sim.user_env import UserEnv, UserSpec
from sim.workers import Context
from vla_wmrl.errors import require
from vla_wmrl.policies.base import Policy
from vla_wmrl.policies.noise import lineage
from vla_wmrl.types import Rollout, Start


@dataclass(frozen=True)
class PolicyRef:
    """A policy by name: a checkpoint folder, and (for a policy in training) a file with newer weights."""

    path: str
    eta: float = 0.0
    sde: str = "hybrid"
    n_action_steps: int | None = None
    components: int = 1
    scale: tuple[float, ...] | None = None
    design: str = "orthogonal"
    num_steps: int | None = None
    weights: str | None = None  # safetensors of the parameters that train
    version: int = 0

    def build(self) -> Policy:
        """The checkpoint's policy, without the newer weights."""
        from vla_wmrl.policies.flow import FlowPolicy

        return FlowPolicy.from_pretrained(
            self.path,
            self.eta,
            self.sde,
            self.n_action_steps,
            components=self.components,
            scale=self.scale,
            design=self.design,
            num_steps=self.num_steps,
        )

    @property
    def base(self) -> PolicyRef:
        return replace(self, weights=None, version=0)

    def paths(self) -> dict[str, int]:
        """What `load` may read from the disk of whoever made this, with the version of each."""
        return {self.path: 0} | ({} if self.weights is None else {self.weights: self.version})

    def at(self, here: Mapping[str, str]) -> PolicyRef:
        """The same with `paths` somewhere else."""
        return replace(self, path=here[self.path], weights=None if self.weights is None else here[self.weights])

    def reads(self, context: Context) -> list[str]:
        """The paths that `load(context)` will read: what the worker does not have yet."""
        paths = [] if ("policy", self.base) in context.kept else [self.path]
        newest = self.weights is None or context.kept.get(("weights", self.base)) == (self.weights, self.version)
        return paths if newest else [*paths, self.weights]

    def load(self, context: Context) -> Policy:
        new_weights = self.weights is not None and self.weights in self.reads(context)
        policy = context.keep(("policy", self.base), self.base.build)
        if new_weights:
            from safetensors.torch import load_file

            policy.policy.load_state_dict(load_file(self.weights), strict=False)
            context.kept[("weights", self.base)] = (self.weights, self.version)
        return policy


@dataclass(frozen=True)
class Trace:
    """One real trajectory at the control rate, for fitting world models. T control steps, S state dimensions."""

    task_id: int
    init_id: int
    states: np.ndarray  # [T + 1, S] float32
    actions: np.ndarray  # [T, 7] float32, as executed
    progress: np.ndarray  # [T + 1] float32
    success: np.ndarray  # [T + 1] bool, the goal holds at that step
    previous: np.ndarray  # [7] float32, the action before the first


@dataclass(frozen=True)
class Recorded:
    """What one rollout left behind."""

    rollout: Rollout
    trace: Trace | None = None
    starts: tuple[Start, ...] = ()  # a branch start for every look
    frames: np.ndarray | None = None  # [T, H, W, 3] uint8, for people


@dataclass
class _Member:
    """One rollout in progress; `snapshot` is its state at the last look."""

    start: Start
    member: int
    snapshot: Snapshot
    state: np.ndarray
    progress: float
    previous: np.ndarray
    steps: int = 0
    success: bool = False
    beyond: int = 0  # looks left to run after success
    inputs: list = field(default_factory=list)
    chains: list = field(default_factory=list)
    sde_steps: list = field(default_factory=list)
    executed: list = field(default_factory=list)
    states: list = field(default_factory=list)
    progresses: list = field(default_factory=list)
    dense: list = field(default_factory=list)  # (state, action, progress, success) of every control step
    starts: list = field(default_factory=list)
    frames: list = field(default_factory=list)


OPEN_HAND = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)  # the action that precedes every episode (settling)


@dataclass(frozen=True)
class RolloutJob:
    """Rollouts from `starts` (with `members` as the last part of the noise key) by one policy in one task."""

    spec: EnvSpec | UserSpec
    starts: tuple[Start, ...] = field(repr=False)
    members: tuple[int, ...]
    policy: PolicyRef
    seed: tuple[int, ...]
    stochastic: bool = True
    explore_looks: int | None = None  # only the first looks explore, the rest run the deterministic sampler; None: all
    max_looks: int | None = None  # ends a branch; None: the suite's limit of control steps
    until_next: bool = False  # ends a branch at the look that passes a milestone which its start had not
    max_steps: int | None = None  # control steps, counted from the start of the episode; None: the suite's
    beyond: int = 0  # looks to go on after success (for world-model data)
    width: int = 8  # rollouts side by side; the policy's batch shape
    record: bool = False  # keep traces
    keep_starts: bool = False  # keep a branch start for every look
    video_size: int = 0  # pixels of the frames kept for people; 0: none

    @property
    def affinity(self) -> tuple:
        return (self.spec,)

    def run(self, context: Context) -> list[Recorded]:
        env = context.keep(("env", self.spec), self.spec.build)
        return run(env, self.policy.load(context), self)


def run(env: LiberoEnv | UserEnv, policy: Policy, job: RolloutJob) -> list[Recorded]:
    """One Recorded per start, in the order of `job.starts`."""
    queue = deque(enumerate(zip(job.starts, job.members, strict=True)))
    active: dict[int, _Member] = {}
    results: dict[int, Recorded] = {}
    while queue or active:
        while queue and len(active) < job.width:
            index, (start, member) = queue.popleft()
            active[index] = _begin(env, job, start, member)
        inputs, sample = _ask(env, policy, job, list(active.values()))
        for row, index in enumerate(list(active)):
            member = active[index]
            member.inputs.append({k: v[row].numpy() for k, v in inputs.items()})
            member.chains.append(sample.chain[row].numpy())
            member.sde_steps.append(int(sample.sde_step[row]))
            if _advance(env, job, member, sample.actions[row].numpy(), policy.n_action_steps):
                results[index] = _finish(job, member)
                del active[index]
    return [results[i] for i in range(len(results))]


def begin(env: LiberoEnv | UserEnv, start: Start, split_key: Sequence[int] = ()) -> None:
    """Puts `env` where `start` says: an initial state of its split, or a stored state of the simulator."""
    require(start.task_id == env.spec.task_id, f"a start of task {start.task_id} in a simulator of task {env.spec.task_id}")
    if start.snapshot is not None:
        env.restore(start.snapshot)
        if not env.has_look:
            env.observe()
        return
    if isinstance(env, UserEnv):
        env.start(start)
        return
    official = start.split == "official"
    init = env.official_states[start.init_id] if official else env.sample_state(start.init_id)
    env.reset(init, key=(start.task_id, start.init_id, start.episode, *split_key))


def measure(env: LiberoEnv | UserEnv) -> tuple[np.ndarray, float]:
    """(state vector [S], progress) of this moment."""
    return env.measure() if isinstance(env, UserEnv) else (read_state(env), progress(env.privileged()))


def _begin(env: LiberoEnv | UserEnv, job: RolloutJob, start: Start, member: int) -> _Member:
    begin(env, start)
    previous = OPEN_HAND if start.previous is None else start.previous
    made = _Member(start, member, env.snapshot(), *measure(env), previous)
    made.states.append(made.state)
    made.progresses.append(made.progress)
    if job.video_size:
        made.frames.append(env.render("agentview", job.video_size))
    return made


def _ask(env: LiberoEnv | UserEnv, policy: Policy, job: RolloutJob, members: list[_Member]):
    """The policy's answer to all looks at once, padded to `job.width` rows so that the batch shape never changes."""
    rows = members + [members[-1]] * (job.width - len(members))
    looks = [m.snapshot.observation for m in rows]
    images = {k: torch.from_numpy(np.stack([o[k] for o in looks])) for k in looks[0] if k != STATE_KEY}
    state = torch.from_numpy(np.stack([o[STATE_KEY] for o in looks]))
    inputs = policy.encode(images, state, [env.task.language] * len(rows))
    keys = [(*job.seed, *m.start.key, len(m.chains), m.member) for m in rows]
    explores = [job.stochastic and (job.explore_looks is None or len(m.chains) < job.explore_looks) for m in rows]
    return inputs, policy.sample(inputs, keys, explores)


def _advance(env: LiberoEnv | UserEnv, job: RolloutJob, m: _Member, actions: np.ndarray, n_action_steps: int) -> bool:
    """Runs one chunk of `m`; returns whether its rollout is over."""
    limit = (job.max_steps or env.max_steps) - m.snapshot.steps
    env.restore(m.snapshot)
    env.episode = (*m.start.key, m.member)
    if job.keep_starts:
        look = m.start.look + len(m.executed)
        # A start's own rollouts make further starts, without end: their numbers may not grow with the generations.
        episode = lineage(*job.seed, *m.start.key, m.member)
        m.starts.append(replace(m.start, episode=episode, look=look, snapshot=m.snapshot, state=m.state,
                                progress=m.progress, previous=m.previous))  # fmt: skip
    executed = np.zeros(len(actions), dtype=bool)
    n, before = min(n_action_steps, limit), m.success
    for i in range(n):
        success = env.step(actions[i], sample=i == n - 1)
        if not before:
            executed[i] = not m.success
            m.steps += not m.success
        m.success |= success
        m.previous = actions[i].astype(np.float32)
        if job.record:
            state, now = measure(env)
            m.dense.append((state, m.previous, now, success))
        if job.video_size:
            m.frames.append(env.render("agentview", job.video_size))
        if m.success and job.beyond == 0:
            break
    m.snapshot, (m.state, m.progress) = env.snapshot(), measure(env)
    if before:  # looks after success are data for the world model, not part of the rollout
        m.inputs.pop(), m.chains.pop(), m.sde_steps.pop()
        m.beyond = m.beyond - 1
        return m.beyond == 0 or env.steps >= (job.max_steps or env.max_steps)
    m.executed.append(executed)
    m.states.append(m.state)
    m.progresses.append(1.0 if m.success else m.progress)
    if m.success:
        m.beyond = job.beyond
        return job.beyond == 0
    over = job.max_looks is not None and len(m.executed) >= job.max_looks
    over |= job.until_next and passes(m.start, m.progress, len(env.privileged().goal))
    return over or env.steps >= (job.max_steps or env.max_steps)


def _finish(job: RolloutJob, m: _Member) -> Recorded:
    rollout = Rollout(
        start=m.start,
        member=m.member,
        source="real",
        inputs={k: np.stack([i[k] for i in m.inputs]) for k in m.inputs[0]},
        chain=np.stack(m.chains),
        sde_step=np.array(m.sde_steps),
        executed=np.stack(m.executed),
        states=np.stack(m.states),
        progress=np.array(m.progresses, dtype=np.float32),
        success=m.success,
        terminated=m.success,
        truncated=not m.success,
        steps=m.steps,
    )
    trace = None
    if job.record:
        states, actions, progresses, successes = zip(*m.dense, strict=True)
        previous = OPEN_HAND if m.start.previous is None else m.start.previous
        trace = Trace(
            task_id=m.start.task_id,
            init_id=m.start.init_id,
            states=np.stack([m.states[0], *states]),
            actions=np.stack(actions),
            progress=np.array([m.progresses[0], *progresses], dtype=np.float32),
            success=np.array([False, *successes]),
            previous=previous,
        )
    return Recorded(rollout, trace, tuple(m.starts), np.stack(m.frames) if m.frames else None)
