"""The configurations of the commands beside `train`, which share its sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_wmrl.config import (
    TRAIN_INITS,
    EnvConfig,
    PolicyConfig,
    WorkersConfig,
    check_episodes,
    check_inits,
)
from vla_wmrl.errors import require


@dataclass
class EvalConfig:
    """Evaluate a lerobot checkpoint on LIBERO: one JSON line an episode, a table with Wilson intervals."""

    output_dir: str | None = None  # null: outputs/eval/<job_name>/<date_time>
    job_name: str | None = None  # null: the suite
    resume: bool = False  # keep the episodes that output_dir already holds and run the rest
    seed: int = 0
    episodes_per_task: int = 50  # official initial states a task, from 0
    init_ids: list[int] | None = None  # official initial states; null: by episodes_per_task
    noise: Literal["ode", "sde"] = "ode"  # the policy's deterministic sampler, or the one RL explores with
    videos: int = 0  # videos a task
    device: str = "auto"  # auto, cpu, cuda, mps
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    env: EnvConfig = field(default_factory=lambda: EnvConfig(split="official", stepping="exact", lod_mm=0.0, multisample=4))
    workers: WorkersConfig = field(default_factory=WorkersConfig)

    def ids(self) -> list[int]:
        """Initial states to run of every task, of the set `env.train_split`."""
        if self.init_ids is not None:
            return list(self.init_ids)
        return list(range(self.episodes_per_task))

    def validate(self) -> None:
        self.env.validate()
        self.policy.validate()
        self.workers.validate()
        require(self.env.init_ids is None, "eval takes --init_ids, not --env.init_ids")
        if self.env.train_split == "official":
            check_episodes("", self.init_ids, self.episodes_per_task)
        else:
            check_inits("init_ids", self.ids(), TRAIN_INITS)
        require(self.videos >= 0, f"videos={self.videos} is negative")


@dataclass
class DemosConfig:
    """Record demonstrations of the scripted experts as a LeRobotDataset, also on states a policy reaches (DAgger)."""

    output_dir: str | None = None  # data set folder; null: outputs/demos/<job_name>/<date_time>
    job_name: str | None = None  # null: the suite
    resume: bool = False  # continue the data set in output_dir
    seed: int = 0
    episodes_per_task: int = 50  # training initial states a task, from 0
    noise: float = 0.3  # standard deviation of the noise added to executed actions; labels stay clean
    beta: float = 0.0  # with --policy.path (DAgger: it acts, the expert labels): share of chunks the expert acts
    keep_failures: bool = False  # keep episodes that did not succeed
    kind: Literal["lerobot", "scenes"] = "lerobot"  # scenes: only rendered frames and where things are, to teach vision alone
    render_every: int = 1  # control steps between two rendered frames; those between repeat the image (2 halves the time)
    device: str = "auto"  # auto, cpu, cuda, mps
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)

    def validate(self) -> None:
        self.env.validate()
        self.workers.validate()
        require(
            self.env.train_split == "train" or self.env.allow_overlap,
            "demonstrations of official initial states leak into evaluation: use --env.split=train, "
            "or pass --env.allow_overlap=true",
        )
        limit = len(self.env.train_inits)
        require(
            1 <= self.episodes_per_task <= limit,
            f"episodes_per_task={self.episodes_per_task}: the split has {limit} initial states a task",
        )
        require(self.noise >= 0, f"noise={self.noise} is negative")
        require(0 <= self.beta <= 1, f"beta={self.beta} is outside 0..1")
        most = 64 if self.kind == "scenes" else 8
        require(1 <= self.render_every <= most, f"render_every={self.render_every} is outside 1..{most} (kind={self.kind})")


@dataclass
class SftDatasetConfig:
    root: list[str] = field(default_factory=list)  # folders of LeRobotDatasets, joined
    scenes: list[str] = field(default_factory=list)  # folders of `vla-wmrl demos --kind=scenes`: more for the vision warm-up
    action_episodes: int | None = None  # first episodes a task whose actions are imitated; all teach vision; null: all

    def validate(self) -> None:
        few = self.action_episodes
        require(few is None or few >= 1, f"dataset.action_episodes={few} must be at least 1, or null for all")
        require(len(self.root) > 0, "no data: pass --dataset.root=FOLDER (made by `vla-wmrl demos`)")


@dataclass
class SftPolicyConfig:
    path: str | None = None  # checkpoint to start from; null: a new, very small SmolVLA of the sizes below
    vision_path: str | None = None  # checkpoint whose vision a new policy takes over, instead of a warm-up
    layers: int = 3
    width: int = 96
    chunk_size: int = 16  # control steps a chunk
    n_action_steps: int = 8  # control steps of a chunk that run
    num_steps: int = 5  # denoising steps
    image_size: int = 64  # pixels of an image's side
    patch_size: int = 16  # pixels of a patch's side; smaller ones find things more precisely, and cost more
    pixel_shuffle: int = 1  # (image_size / patch_size / pixel_shuffle)^2 image tokens a camera reach the language model
    vision_width: int = 128  # of the vision tower, a multiple of its 4 heads
    vision_layers: int = 3  # of the vision tower

    def validate(self) -> None:
        sizes = (
            "layers", "width", "chunk_size", "n_action_steps", "num_steps", "image_size", "patch_size", "pixel_shuffle",
            "vision_width", "vision_layers",
        )  # fmt: skip
        for name in sizes:
            require(getattr(self, name) >= 1, f"policy.{name}={getattr(self, name)} must be at least 1")
        for name in ("width", "vision_width"):
            require(
                getattr(self, name) % 4 == 0, f"policy.{name}={getattr(self, name)} is no multiple of the 4 attention heads"
            )
        require(
            self.image_size % (self.patch_size * self.pixel_shuffle) == 0,
            f"policy.image_size={self.image_size} is no multiple of patch_size x pixel_shuffle="
            f"{self.patch_size * self.pixel_shuffle}",
        )
        require(self.n_action_steps <= self.chunk_size, "policy.n_action_steps exceeds policy.chunk_size")
        require(
            self.path is None or self.vision_path is None,
            "policy.vision_path is of a new policy, the checkpoint of policy.path has its own vision: give one of them",
        )


@dataclass
class SftConfig:
    """Train a policy on demonstrations with lerobot's training code."""

    output_dir: str | None = None  # null: outputs/sft/<job_name>/<date_time>
    job_name: str | None = None  # null: sft
    resume: bool = False  # continue the training in output_dir
    seed: int = 0
    steps: int = 5000  # gradient steps
    batch_size: int = 64
    lr: float = 1e-3  # learning rate
    vision: Literal["frozen", "trained"] = "frozen"  # after its warm-up; frozen: features are computed once (RL freezes it too)
    vision_warmup_steps: int = 2000  # of a new policy, before `steps`: learn from recorded states where things are
    save_every: int = 1000  # gradient steps between checkpoints
    device: str = "auto"  # auto, cpu, cuda, mps
    dataset: SftDatasetConfig = field(default_factory=SftDatasetConfig)
    policy: SftPolicyConfig = field(default_factory=SftPolicyConfig)

    def validate(self) -> None:
        self.dataset.validate()
        self.policy.validate()
        for name in ("steps", "batch_size", "save_every"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(self.lr > 0, f"lr={self.lr} must be positive")
        require(self.vision_warmup_steps >= 0, f"vision_warmup_steps={self.vision_warmup_steps} is negative")


@dataclass
class ReportConfig:
    """Write report.html from a run folder."""

    output_dir: str | None = None  # run folder

    def validate(self) -> None:
        require(self.output_dir is not None, "no run: pass --output_dir=FOLDER of a run")


@dataclass
class DoctorConfig:
    """Check this machine and environment: versions, assets, renderer, one real task."""

    quick: bool = False  # leave out the real task (about 15 s)
    policy: str | None = None  # also check that this checkpoint loads

    def validate(self) -> None:
        pass


@dataclass
class InfoConfig:
    """Print what a folder holds (checkpoint, run, data set), or the tasks of a suite."""

    path: str | None = None  # folder to describe
    suite: str | None = None  # suite whose tasks to list

    def validate(self) -> None:
        require(self.path is not None or self.suite is not None, "nothing to describe: pass --path or --suite")
        if self.suite is not None:
            EnvConfig(suite=self.suite).validate()
