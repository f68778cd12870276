"""`vla-wmrl demos`: demonstrations of the scripted experts as a LeRobotDataset; with a policy, DAgger.

The actions that run are noisy (so that the data shows how to recover) or the policy's (so that it shows the states the
policy reaches); the action of a frame is always the expert's. Beside the data set lie `traces/`: states at the control
rate with the actions that ran, which cost nothing more and train world models and vision.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sim.compose import env_spec, make_pool, policy_ref
from sim.expert import Expert
from sim.libero import EnvSpec, LiberoEnv
from sim.protocol import CAMERAS, CONTROL_HZ, STATE_KEY
from sim.quiet import quiet_lerobot
from sim.rollout import PolicyRef, begin
from sim.state import read_state, state_spec
from sim.workers import Context
from vla_wmrl.config_commands import DemosConfig
from vla_wmrl.errors import UserError
from vla_wmrl.policies.noise import generator
from vla_wmrl.progress import Progress
from vla_wmrl.tracking import JsonLines, read_jsonl
from vla_wmrl.types import Start
from vla_wmrl.world_model.looks import SCENES

FPS = CONTROL_HZ
JOB_EPISODES = 4  # episodes a job returns: large enough to keep a worker busy, small enough to show progress
EXPERT, POLICY = 1, 0


@dataclass(frozen=True)
class Demonstration:
    """One episode of T frames; frame t is what was seen before action t."""

    task_id: int
    init_id: int
    task: str
    success: bool
    frames: dict[str, np.ndarray]  # images [T, H, W, 3] uint8, state [T, 8] float32
    labels: np.ndarray  # [T, 7] float32, the expert's
    actions: np.ndarray  # [T, 7] float32, that ran
    states: np.ndarray  # [T + 1, S] float32
    layout: dict[str, tuple[int, int]]  # of S
    render_every: int = 1  # frames between two that were rendered


@dataclass(frozen=True)
class DemoJob:
    """Episodes of one task from the initial states `inits` of `split`."""

    spec: EnvSpec
    inits: tuple[int, ...]
    split: str
    seed: int
    noise: float
    beta: float
    policy: PolicyRef | None
    max_steps: int | None = None
    render_every: int = 1
    affinity: tuple = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "affinity", (self.spec,))

    def run(self, context: Context) -> list[Demonstration]:
        env = context.keep(("env", self.spec), lambda: LiberoEnv(self.spec))
        policy = None if self.policy is None else self.policy.load(context)
        return [demonstrate(env, self, init_id, policy) for init_id in self.inits]


def demonstrate(env: LiberoEnv, job: DemoJob, init_id: int, policy=None) -> Demonstration:
    """One episode. With `render_every` > 1 the frames between keep the image before them (cameras cost most of the time)."""
    expert = Expert(env.spec.suite, env.spec.task_id)
    key = (job.seed, env.spec.task_id, init_id)
    rng = generator((*key, 11))
    begin(env, Start(env.spec.task_id, init_id, split=job.split))
    looks, labels, actions, states = [], [], [], [read_state(env)]
    chunk: np.ndarray | None = None
    left, success = 0, False
    while len(actions) < (job.max_steps or env.max_steps) and not success:
        look = env.look() if len(actions) % job.render_every == 0 else {**looks[-1], STATE_KEY: env.robot_state()}
        if policy is not None and left == 0:
            left = policy.n_action_steps
            chunk = None if rng.random() < job.beta else _chunk(policy, env, look, (*key, len(actions)))
        label = np.asarray(expert.act(env.privileged()), dtype=np.float32)
        action = label.copy() if chunk is None else chunk[len(chunk) - left]
        action[:3] = np.clip(action[:3] + rng.normal(0.0, job.noise, 3), -1.0, 1.0)
        left -= 1
        looks.append(look)
        labels.append(label)
        actions.append(action.astype(np.float32))
        success = env.step(action, sample=len(actions) % job.render_every == 0)
        states.append(read_state(env))
    return Demonstration(
        task_id=env.spec.task_id,
        init_id=init_id,
        task=env.task.language,
        success=success,
        frames={k: np.stack([x[k] for x in looks]) for k in looks[0]},
        labels=np.stack(labels),
        actions=np.stack(actions),
        states=np.stack(states),
        layout={k: (s.start, s.stop) for k, s in state_spec(env).layout.items()},
        render_every=job.render_every,
    )


def _chunk(policy, env: LiberoEnv, look: dict[str, np.ndarray], key: tuple[int, ...]) -> np.ndarray:
    images = {k: torch.from_numpy(look[k])[None] for k in CAMERAS}
    inputs = policy.encode(images, torch.from_numpy(look[STATE_KEY])[None], [env.task.language])
    return policy.sample(inputs, [key], stochastic=False).actions[0, : policy.n_action_steps].numpy()


def features(image_size: int) -> dict[str, dict]:
    """Features named as in lerobot's LIBERO data sets."""
    image = {"dtype": "image", "shape": (image_size, image_size, 3), "names": ["height", "width", "channel"]}
    return {
        **{name: dict(image) for name in CAMERAS},
        STATE_KEY: {"dtype": "float32", "shape": (8,), "names": ["x", "y", "z", "rx", "ry", "rz", "gripper_l", "gripper_r"]},
        "action": {"dtype": "float32", "shape": (7,), "names": ["x", "y", "z", "rx", "ry", "rz", "gripper"]},
    }


class Writer:
    """Appends demonstrations to a LeRobotDataset (v3) and to `traces/` in the same folder."""

    def __init__(self, root: Path, image_size: int, resume: bool = False):
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        quiet_lerobot()
        self.root = root
        repo_id = f"local/{root.name}"
        if resume and (root / "meta" / "info.json").exists():
            self.dataset = LeRobotDataset.resume(repo_id, root=root)
        else:
            if root.exists():  # lerobot insists on making the folder itself; the config is all that may be there
                shutil.rmtree(root)
            self.dataset = LeRobotDataset.create(
                repo_id, fps=FPS, features=features(image_size), root=root, robot_type="panda", use_videos=False
            )
        (root / "traces").mkdir(exist_ok=True)

    def add(self, demo: Demonstration) -> None:
        index = self.dataset.meta.total_episodes
        for t in range(len(demo.labels)):
            frame = {k: v[t] for k, v in demo.frames.items()}
            self.dataset.add_frame({**frame, "action": demo.labels[t], "task": demo.task})
        self.dataset.save_episode()
        np.savez_compressed(
            self.root / "traces" / f"episode_{index:06d}.npz",
            states=demo.states,
            actions=demo.actions,
            labels=demo.labels,
            task_id=demo.task_id,
            init_id=demo.init_id,
            success=demo.success,
            layout=json.dumps(demo.layout),
            render_every=demo.render_every,
        )

    def close(self) -> None:
        self.dataset.finalize()


class SceneWriter:
    """Keeps of each demonstration what teaches vision where things are: rendered frames with the states there.

    A data set needs every frame; for vision other placements of the objects tell more than the next frame, so that a folder
    of many episodes with few images each is the better use of the same time.
    """

    def __init__(self, root: Path):
        self.folder = root / SCENES
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, demo: Demonstration) -> None:
        shown = slice(0, len(demo.labels), demo.render_every)
        np.savez_compressed(
            self.folder / f"t{demo.task_id}_i{demo.init_id}.npz",
            images=np.stack([demo.frames[name][shown] for name in CAMERAS], axis=1),
            state=demo.frames[STATE_KEY][shown],
            labels=demo.labels[shown],
            states=demo.states[:-1][shown],
            task=demo.task,
            task_id=demo.task_id,
            init_id=demo.init_id,
            layout=json.dumps(demo.layout),
        )

    def close(self) -> None:
        pass


def plan(cfg: DemosConfig, done: set[tuple[int, int]]) -> Iterator[DemoJob]:
    """Jobs for all (task, init) that are not in `done`, tasks interleaved."""
    policy = None if cfg.policy.path is None else policy_ref(cfg.policy, eta=0.0)
    ids = cfg.env.train_inits[: cfg.episodes_per_task]
    for first in range(0, len(ids), JOB_EPISODES):
        for task_id in cfg.env.task_ids:
            inits = tuple(i for i in ids[first : first + JOB_EPISODES] if (task_id, i) not in done)
            if inits:
                spec = env_spec(cfg.env, task_id)
                yield DemoJob(spec, inits, cfg.env.train_split, cfg.seed, cfg.noise, cfg.beta, policy, cfg.env.max_steps,
                              cfg.render_every)  # fmt: skip


def main(cfg: DemosConfig) -> int:
    """Records what `cfg` plans, in `cfg.output_dir`; resumes where it stopped."""
    for task_id in cfg.env.task_ids:
        Expert(cfg.env.suite, task_id)  # an unknown task fails before anything is written
    root = Path(cfg.output_dir)
    records = read_jsonl(root / "episodes.jsonl") if cfg.resume else []
    jobs = list(plan(cfg, {(r["task_id"], r["init_id"]) for r in records}))
    scenes = cfg.kind == "scenes"
    writer = SceneWriter(root) if scenes else Writer(root, cfg.env.image_size, cfg.resume)
    log = JsonLines(root / "episodes.jsonl")
    kept = sum(r["kept"] for r in records)
    with make_pool(cfg.workers) as pool, Progress(sum(len(j.inits) for j in jobs), "demonstrations") as bar:
        for _, demos in pool.run(jobs):
            for demo in demos:
                # Labels are the expert's, so an episode that a policy failed is still good data.
                keep = demo.success or cfg.keep_failures or cfg.policy.path is not None
                if keep:
                    writer.add(demo)
                    kept += 1
                record = {"task_id": demo.task_id, "init_id": demo.init_id, "success": demo.success,
                          "steps": len(demo.actions), "kept": keep}  # fmt: skip
                records.append(record)
                log.write(record)
                bar.update(1, f"success {np.mean([r['success'] for r in records]):.0%}")
    writer.close()
    if kept == 0:
        raise UserError(f"no demonstration succeeded of {len(records)}: lower --noise")
    print(f"{kept} episodes in {root}")
    return 0
