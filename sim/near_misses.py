"""Near misses, made: actions around a grasp or a release, perturbed and replayed open loop in MuJoCo without rendering.

Closed-loop actors aim well, so their data holds few missed grasps, and a world model fitted on it takes every closing
of the gripper for a grasp. Here a snapshot is taken some steps before the gripper closes (or opens), and the actions
that were executed from there run again with an offset, another height, another timing or noise. They cannot react, so
what happens is the physics' answer alone. No plan is needed: the offset is spread over the steps before the event.
The episodes are a noisy expert's, or a policy's that were recorded: what RL explores lies around the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sim.expert import Expert
from sim.libero import EnvSpec, LiberoEnv, Snapshot
from sim.progress import progress
from sim.rollout import OPEN_HAND, Trace, begin
from sim.state import read_state
from sim.workers import Context
from vla_wmrl.errors import UserError
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Start

STEPS = 64  # control steps of a segment: the lead, the grasp, and long enough to see whether it lifts
GRASP, RELEASE = "grasp", "release"
LEADS = {GRASP: (5, 26), RELEASE: (5, 16)}  # control steps before the event, a half-open range
METRES_PER_ACTION = 0.0125  # what a control step moves the hand per unit of action, once it moves (measured)
REACHES = (0.008, 0.02, 0.045)  # m, sideways offsets at most: flat boxes are missed by the first, cans by the last
ROOM_M = 0.085  # between the centres of a shifted object and the next one
CLOSING = 8  # control steps that the fingers take to close, about
STREAM = 23  # of the noise key
ARRAYS = ("states", "actions", "progress", "success", "previous")  # of a Trace


@dataclass(frozen=True)
class Segment:
    """One replay. Segments of one `group` share their snapshot and their unperturbed actions."""

    trace: Trace
    group: tuple[int, int, int, int]  # task, init, episode, control step of the snapshot
    kind: str  # "grasp" or "release"
    event: int  # control steps from the start of the segment to the unperturbed event


@dataclass(frozen=True)
class Moment:
    """A snapshot that a replay can start from, and what was done from there.

    `moved` [2] is how far the grasped object was shifted (m): what would succeed is then not what was done, so that a
    grader that sees actions and no object cannot take small perturbations for successes.
    """

    snapshot: Snapshot
    previous: np.ndarray  # [7] the action before it
    actions: np.ndarray  # [STEPS, 7] that ran next
    kind: str
    event: int  # index into `actions` at which the gripper starts to close or open
    step: int  # control step of the snapshot in its episode
    moved: np.ndarray = field(default_factory=lambda: np.zeros(2))


@dataclass(frozen=True)
class NearMissJob:
    """Episodes from training initial states, and `per_moment` perturbed replays of their moments.

    `recorded`: by initial state, the actions [T, 7] of an episode that ran; the noisy expert's without.
    """

    spec: EnvSpec
    inits: tuple[int, ...]
    seed: int
    recorded: dict[int, np.ndarray] | None = None
    noise: float = 0.15  # of the expert's episode
    moments_per_event: int = 1
    per_moment: int = 8
    moments: int = 8  # of one episode at most: an expert that fumbles closes its gripper again and again
    displace_m: float = 0.025  # how far the object to be grasped is shifted at most, one draw a moment
    press: float = 0.0  # action units: down on top of the rest until the hand has closed, at most
    split: str = "train"
    affinity: tuple = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if self.split != "train":
            raise UserError("near misses are training data: they start from training states, never from the official ones")
        object.__setattr__(self, "affinity", (self.spec,))

    def run(self, context: Context) -> list[Segment]:
        env = context.keep(("env", self.spec), lambda: LiberoEnv(self.spec))
        return [segment for init in self.inits for segment in near_misses(env, self, init)]


def near_misses(env: LiberoEnv, job: NearMissJob, init_id: int) -> list[Segment]:
    """All segments of one initial state."""
    key = (job.seed, env.spec.task_id, init_id)
    begin(env, Start(env.spec.task_id, init_id, split=job.split))
    recorded = None if job.recorded is None else job.recorded[init_id]
    snapshots, actions = expert_episode(env, job.noise, key) if recorded is None else again(env, recorded)
    rng = generator((*key, 1), STREAM)
    found = moments(snapshots, actions, rng, job.moments_per_event)
    if len(found) > job.moments:
        found = [found[i] for i in sorted(rng.choice(len(found), job.moments, replace=False))]
    segments = []
    for m in found:
        draws = generator((*key, 2, m.step), STREAM)
        if m.kind == GRASP and job.displace_m > 0:
            m = displaced(env, m, job.displace_m * np.sqrt(draws.random()), 2 * np.pi * draws.random())
        segments += replays(env, m, (init_id, 0), job.per_moment, draws, job.press)
    return segments


def again(env: LiberoEnv, actions: np.ndarray) -> tuple[list[Snapshot], np.ndarray]:
    """Runs recorded actions [T, 7] from where `env` is. T snapshots, one before every action, and the actions."""
    snapshots = []
    for action in actions:
        snapshots.append(env.snapshot())
        env.step(action)
    return snapshots, np.asarray(actions, dtype=np.float32)


def expert_episode(env: LiberoEnv, noise: float, key: tuple[int, ...]) -> tuple[list[Snapshot], np.ndarray]:
    """Runs the noisy expert to the end. T snapshots, one before every action, and the actions [T, 7] that ran."""
    expert, rng = Expert(env.spec.suite, env.spec.task_id), generator((*key, 0), STREAM)
    snapshots, actions = [], []
    while len(actions) < env.max_steps:
        snapshots.append(env.snapshot())
        action = np.asarray(expert.act(env.privileged()), dtype=np.float32)
        action[:3] = np.clip(action[:3] + rng.normal(0.0, noise, 3), -1.0, 1.0)
        actions.append(action)
        if env.step(action):
            break
    return snapshots, np.stack(actions)


def moments(snapshots: list[Snapshot], actions: np.ndarray, rng: np.random.Generator, per_event: int) -> list[Moment]:
    """Starts of replays before every closing and opening of the gripper that its command held for a while."""
    closed = actions[:, 6] > 0
    tail = np.zeros((STEPS, 7), dtype=np.float32)  # past the end: stand still
    tail[:, 6] = actions[-1, 6]
    padded = np.concatenate([actions, tail])
    found = []
    for t in range(1, len(actions)):
        if closed[t] == closed[t - 1]:
            continue
        kind = GRASP if closed[t] else RELEASE
        low, high = LEADS[kind]
        same = np.flatnonzero(closed[:t] == closed[t])
        steady = t - (same[-1] + 1 if len(same) else 0)  # control steps that the command before the event held
        leads = np.arange(low, min(high, steady + 1))  # the lead must not hold an earlier event
        for lead in rng.choice(leads, min(per_event, len(leads)), replace=False):
            s = t - int(lead)
            previous = actions[s - 1] if s else OPEN_HAND
            found.append(Moment(snapshots[s], previous, padded[s : s + STEPS], kind, int(lead), s))
    return found


def displaced(env: LiberoEnv, moment: Moment, radius: float, angle: float) -> Moment:
    """`moment` with the object nearest to where the hand closes shifted on its support, if there is room for it."""
    env.restore(moment.snapshot)
    for action in moment.actions[: moment.event]:
        env.step(action)
    hand = env.privileged().eef_pos
    env.restore(moment.snapshot)
    objects, movable = env.privileged().objects, env.indices["movable"]
    name = min(movable, key=lambda n: float(np.linalg.norm(objects[n].pos - hand)))
    shift = radius * np.array([np.cos(angle), np.sin(angle)])
    place = objects[name].pos[:2] + shift
    if min(np.linalg.norm(pose.pos[:2] - place) for n, pose in objects.items() if n != name) < ROOM_M:
        return moment
    qpos, _ = movable[name]
    env.data.qpos[qpos : qpos + 2] += shift
    return replace(moment, snapshot=replace(env.snapshot(), observation={}), moved=shift)


def perturb(moment: Moment, rng: np.random.Generator, press: float = 0.0) -> np.ndarray:
    """[STEPS, 7] float32: the moment's actions with an offset, another timing and noise, by the draws of `rng`.

    press: the most that every action up to the event goes down besides (RL finds that first where a model lets fingers pass).
    """
    actions, lead = moment.actions.astype(np.float64).copy(), moment.event
    offset = np.zeros(3)
    reach = 0.10 if moment.kind == RELEASE else REACHES[int(rng.integers(len(REACHES)))]
    radius, angle = reach * rng.random(), 2 * np.pi * rng.random()
    offset[:2] = radius * np.cos(angle), radius * np.sin(angle)
    if rng.random() < 0.7:  # aimed at where the object is; the rest at where it was
        offset[:2] += moment.moved
    if rng.random() < 0.4:  # too high closes above the object, too low lands the fingers on it or on the table
        offset[2] = rng.uniform(-0.010, 0.035 if reach > REACHES[0] else 0.015)
    actions[:lead, :3] += offset / (METRES_PER_ACTION * lead)
    if moment.kind == GRASP and rng.random() < 0.15:  # opens again before it has lifted
        again = lead + int(rng.integers(2, 12))
        actions[again : again + 12, 6] = -1.0
    if rng.random() < 0.3:  # too early or too late
        shift = int(rng.integers(-4, 9))
        index = np.clip(np.arange(len(actions)) - shift, 0, len(actions) - 1)
        actions[:, 6] = actions[index, 6]
    spread = (0.0, 0.1, 0.2, 0.35)[int(rng.integers(4))]
    if rng.random() < 0.5:  # as a policy's chunks err: constant for the steps of a chunk
        bias = rng.normal(0.0, spread, (-(-len(actions) // 8), 3))
        actions[:, :3] += np.repeat(bias, 8, axis=0)[: len(actions)]
    else:
        actions[:, :3] += rng.normal(0.0, spread, (len(actions), 3))
    actions[:, 3:6] += rng.normal(0.0, 0.3 * spread, (len(actions), 3))
    if press > 0 and rng.random() < 0.5:
        actions[: lead + CLOSING, 2] -= press * rng.random()
    return np.clip(actions, -1.0, 1.0).astype(np.float32)


def replay(env: LiberoEnv, snapshot: Snapshot, previous: np.ndarray, actions: np.ndarray, init_id: int) -> Trace:
    """Runs `actions` [T, 7] open loop from `snapshot`."""
    env.restore(snapshot)
    states, grades, success = [read_state(env)], [progress(env.privileged())], [False]
    for action in actions:
        success.append(env.step(action))
        states.append(read_state(env))
        grades.append(progress(env.privileged()))
    return Trace(
        task_id=env.spec.task_id,
        init_id=init_id,
        states=np.stack(states),
        actions=np.asarray(actions, dtype=np.float32),
        progress=np.array(grades, dtype=np.float32),
        success=np.array(success),
        previous=np.asarray(previous, dtype=np.float32),
    )


def replays(
    env: LiberoEnv, moment: Moment, origin: tuple[int, int], n: int, rng: np.random.Generator, press: float = 0.0
) -> list[Segment]:
    """`n` perturbed replays of `moment`, whose episode is `origin` (init, episode)."""
    group = (env.spec.task_id, *origin, moment.step)
    return [
        Segment(
            replay(env, moment.snapshot, moment.previous, perturb(moment, rng, press), origin[0]),
            group,
            moment.kind,
            moment.event,
        )
        for _ in range(n)
    ]


def save_segments(file: str | Path, segments: list[Segment]) -> None:
    """Writes segments of one task as one compressed npz file."""
    traces = [s.trace for s in segments]
    np.savez_compressed(
        file,
        **{name: np.stack([getattr(t, name) for t in traces]) for name in ARRAYS},
        group=np.array([s.group for s in segments]),
        kind=np.array([s.kind for s in segments]),
        event=np.array([s.event for s in segments]),
    )


def load_segments(file: str | Path) -> list[Segment]:
    """What `save_segments` wrote."""
    data = np.load(file)
    found = []
    for i, group in enumerate(data["group"]):
        task_id, init_id, *_ = (int(n) for n in group)
        trace = Trace(task_id, init_id, **{name: data[name][i] for name in ARRAYS})
        found.append(Segment(trace, tuple(int(n) for n in group), str(data["kind"][i]), int(data["event"][i])))
    return found
