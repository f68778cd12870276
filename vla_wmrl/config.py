"""The configuration of training and its sections: dataclasses with lerobot's flag names, and one `validate()` each.

Imports nothing heavy. The other commands' are in `vla_wmrl.config_commands`. Reading them from YAML and the command line is
`vla_wmrl.arguments`; a comment beside a field is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from math import inf
from typing import Literal

from vla_wmrl.arms import check_arm
from vla_wmrl.errors import UserError, nearest, require

SUITE_TASKS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
SUITE_ALIASES = {"libero_long": "libero_10", "long": "libero_10"}
OFFICIAL_INITS = 50  # initial states LIBERO ships for each task
TRAIN_INITS = 2000  # initial states of our own a task, sampled from its placement regions
PAPERS_TRAIN_INITS = 16  # the papers train on official states 0-15 and evaluate on 16-49


def base_suite(suite: str) -> str | None:
    """The LIBERO suite that `suite` is, or that it perturbs (LIBERO-PRO's libero_10_swap: libero_10); None for neither."""
    return next((base for base in SUITE_TASKS if suite == base or suite.startswith(f"{base}_")), None)


Arm = Literal["real", "real_branch", "wm", "mix", "debias", "denoise", "wmrl"]


@dataclass
class EnvConfig:
    suite: str = "libero_10"  # LIBERO suite, or one of LIBERO-PRO's: libero_10_swap, libero_goal_object, ...
    task_ids: list[int] = field(default_factory=lambda: [0])  # tasks of the suite, from 0; "0-9" and "0,3" also work
    image_size: int = 64  # pixels of a camera image's side
    stepping: Literal["robosuite", "exact", "near", "fast"] = "fast"  # robosuite's own; natively: its bits, near them, fastest
    lod_mm: float = 8.0  # meshes are simplified to this error in mm before rendering; 0: as LIBERO ships them
    multisample: int = 0  # samples a pixel of antialiasing; 0: none
    markers: bool = False  # draw robosuite's marks of the grip site, which LIBERO's images do not have
    max_steps: int | None = None  # control steps an episode may take; null: the suite's own limit
    split: Literal["train", "official", "papers"] = "train"  # initial states to train on (papers: official 0-15)
    init_ids: list[int] | None = None  # initial states to train on; null: all of the split
    allow_overlap: bool = False  # train on initial states that evaluation uses too

    def validate(self) -> None:
        base = base_suite(self.suite)
        if base is None:
            hint = SUITE_ALIASES.get(self.suite)
            raise UserError(
                f"unknown suite {self.suite!r}"
                + (f" (did you mean {hint}?)" if hint else nearest(self.suite, list(SUITE_TASKS)))
            )
        n = SUITE_TASKS[base]
        require(len(self.task_ids) > 0, "env.task_ids is empty: name at least one task")
        require(len(set(self.task_ids)) == len(self.task_ids), f"env.task_ids={self.task_ids} names a task twice")
        for task_id in self.task_ids:
            require(0 <= task_id < n, f"env.task_ids: {self.suite} has tasks 0 to {n - 1}, not {task_id}")
        require(16 <= self.image_size <= 1024, f"env.image_size={self.image_size} is outside 16..1024 pixels")
        require(0 <= self.lod_mm < inf, f"env.lod_mm={self.lod_mm} is no size in mm: use 0 for the original meshes")
        require(self.multisample >= 0, f"env.multisample={self.multisample} is negative: use 0 for none")
        require(self.max_steps is None or self.max_steps > 0, f"env.max_steps={self.max_steps} must be positive")
        require(self.init_ids is None or len(self.init_ids) > 0, "env.init_ids is empty: leave it out for all")
        limit = TRAIN_INITS if self.split == "train" else OFFICIAL_INITS
        check_inits("env.init_ids", self.init_ids, limit)

    @property
    def train_split(self) -> str:
        """The stored set ("train" or "official") that training ids point into."""
        return "train" if self.split == "train" else "official"

    @property
    def train_inits(self) -> list[int]:
        if self.init_ids is not None:
            return list(self.init_ids)
        return list(range({"train": TRAIN_INITS, "official": OFFICIAL_INITS, "papers": PAPERS_TRAIN_INITS}[self.split]))


def check_inits(name: str, ids: list[int] | None, limit: int) -> None:
    for i in ids or []:
        require(0 <= i < limit, f"{name}: initial state {i} is out of range, ids run from 0 to {limit - 1}")
    require(len(set(ids or [])) == len(ids or []), f"{name} names an initial state twice")


@dataclass
class PolicyConfig:
    path: str | None = None  # folder of a lerobot checkpoint (pretrained_model)
    n_action_steps: int | None = None  # control steps of a chunk that run before the next look; null: the checkpoint's
    num_steps: int | None = None  # denoising steps of a chunk; null: the checkpoint's
    eta: float = 0.3  # noise scale while training; 0: the deterministic sampler
    sde: Literal["smooth", "hybrid", "all"] = "smooth"  # smooth noise on the result, or Flow-SDE (one random step, or all)
    noise_components: int = 1  # smooth: cosines over the executed steps of a chunk; 1: a constant offset
    noise_design: Literal["orthogonal", "independent"] = "orthogonal"  # smooth: opposite pairs at right angles in a group
    noise_scale: list[float] | None = None  # smooth: factor an action dimension, 0: not explored; null: all 1
    train: Literal["all_but_vision"] = "all_but_vision"  # parameters that RL moves: what the checkpoint trains, less vision

    def validate(self) -> None:
        require(self.path is not None, "no policy: pass --policy.path=FOLDER with a lerobot checkpoint")
        require(self.eta >= 0, f"policy.eta={self.eta} is negative")
        require(self.noise_components >= 1, f"policy.noise_components={self.noise_components} must be at least 1")
        positive = self.noise_scale is None or (min(self.noise_scale, default=0) >= 0 and max(self.noise_scale, default=0) > 0)
        require(positive, "policy.noise_scale needs numbers of 0 or more, one of them positive")
        require(self.num_steps is None or self.num_steps >= 1, "policy.num_steps must be at least 1, or null")
        require(self.n_action_steps is None or self.n_action_steps > 0, "policy.n_action_steps must be at least 1")


@dataclass
class GrpoConfig:
    optimizer: Literal["adamw", "lbfgs"] = "adamw"  # a step an epoch, or L-BFGS on the whole batch (small policies)
    lr: float = 1e-5  # learning rate of AdamW
    weight_decay: float = 0.0
    n_groups: int = 16  # groups a policy update, anchors included
    group_size: int = 8  # rollouts a group (G)
    epochs: int = 1  # passes over a step's rollouts; of lbfgs: iterations
    minibatch_looks: int = 256  # looks (text: tokens) a forward pass holds; memory only, the gradient is accumulated
    eps_low: float = 0.2  # clip of the ratio downwards
    eps_high: float = 0.28  # clip of the ratio upwards
    dual_clip: float | None = 3.0  # bound of the loss for negative advantages; null: none
    kl_beta: float = 0.0  # weight of the KL to the first policy, where there is advantage
    kl_old: float = 0.0  # weight of the KL to the policy before the update, at looks drawn from all that were made
    kl_old_looks: int = 128  # how many looks that is
    grad_clip: float = 1.0  # norm of the gradient
    target_kl: float | None = 0.05  # nats a look that one step may move the policy; a longer step is halved; null: no limit
    advantage_scale: Literal["none", "shared", "std"] = "none"  # centre only, one std for all groups, or each group's own

    def validate(self) -> None:
        require(
            self.group_size >= 2,
            f"grpo.group_size={self.group_size}: a group needs at least 2 rollouts, a single one has no baseline",
        )
        for name in ("n_groups", "epochs", "minibatch_looks", "kl_old_looks"):
            require(getattr(self, name) >= 1, f"grpo.{name}={getattr(self, name)} must be at least 1")
        require(self.lr > 0, f"grpo.lr={self.lr} must be positive")
        require(0 < self.eps_low < 1 and self.eps_high > 0, "grpo.eps_low must lie in (0, 1) and eps_high above 0")
        require(self.dual_clip is None or self.dual_clip > 1, f"grpo.dual_clip={self.dual_clip} must exceed 1")
        require(self.grad_clip > 0, f"grpo.grad_clip={self.grad_clip} must be positive")
        require(self.target_kl is None or self.target_kl > 0, f"grpo.target_kl={self.target_kl} must be positive, or null")
        for name in ("kl_beta", "kl_old", "weight_decay"):
            require(getattr(self, name) >= 0, f"grpo.{name}={getattr(self, name)} is negative")


@dataclass
class AnchorsConfig:
    fraction: float = 0.1  # share of groups that run for real
    minimum: int = 1  # anchor groups a step, at least

    def validate(self) -> None:
        require(0 <= self.fraction <= 1, f"anchors.fraction={self.fraction} is outside 0..1")
        require(self.minimum >= 0, f"anchors.minimum={self.minimum} is negative")


@dataclass
class DebiasConfig:
    kind: Literal["none", "isotonic", "released"] = "isotonic"  # released: the authors' buckets and constants
    min_pairs: int = 40  # pairs (r_wm, r_env) before the calibration acts
    wait: bool = True  # imagined groups count for nothing until then; false: with the world model's own rewards (the papers)
    max_pairs: int = 2000  # pairs kept, oldest dropped first
    refit_every: int = 1  # new pairs between two fits
    shrink: bool = True  # towards the base rate, by the out-of-fold slope within groups
    task_strength: float | None = None  # k: a task of n pairs has its own curve with weight n / (n + k); null: one curve

    def validate(self) -> None:
        require(self.min_pairs >= 2, f"debias.min_pairs={self.min_pairs}: a calibration needs at least 2 pairs")
        require(self.max_pairs >= self.min_pairs, "debias.max_pairs is below debias.min_pairs")
        require(self.task_strength is None or self.task_strength > 0, "debias.task_strength must be positive, or null")
        require(self.refit_every >= 1, f"debias.refit_every={self.refit_every} must be at least 1")


@dataclass
class FusionConfig:
    kind: Literal["none", "inverse_variance", "released", "mse", "reliability", "ppi"] = "inverse_variance"
    min_groups: int = 4  # anchor groups before weights leave 1
    half_life_groups: float = 64.0  # of the running residual variance
    max_weight: float | None = None  # bound of an anchor group's weight over an imagined one's; null: none

    def validate(self) -> None:
        require(self.min_groups >= 1, f"fusion.min_groups={self.min_groups} must be at least 1")
        require(self.half_life_groups > 0, "fusion.half_life_groups must be positive")
        require(self.max_weight is None or self.max_weight >= 1, f"fusion.max_weight={self.max_weight} must be at least 1")


@dataclass
class GuardConfig:
    enabled: bool = True  # give the world model weight 0 while anchors show it useless
    min_pairs: int = 64  # pairs before it may act
    min_groups: int = 8  # anchor groups with contrast before the rank test may act
    min_rank_correlation: float = 0.2  # within groups; the world model is useless while surely below
    max_false_positives: float = 0.4  # share of real failures it may call successes; useless while surely above
    window_groups: int = 64  # latest anchor groups that are judged

    def validate(self) -> None:
        require(self.min_pairs >= 2 and self.min_groups >= 1, "guard.min_pairs starts at 2, guard.min_groups at 1")
        require(self.window_groups >= 1, f"guard.window_groups={self.window_groups} must be at least 1")
        require(0 <= self.max_false_positives <= 1, "guard.max_false_positives is outside 0..1")


@dataclass
class WorldModelConfig:
    kind: Literal["state_space", "none"] = "state_space"  # steps the simulator's state, or none
    path: str | None = None  # folder of a fitted world model; null: fit one on the rollouts that fill the bank of starts
    fit_steps: int = 2000  # gradient steps of the first fit
    decoder_steps: int = 0  # gradient steps of fitting the feature decoder to the run's own looks, after the first fit
    refit_every: int = 0  # policy updates between two refits on the run's own data; 0: never
    refit_steps: int = 200  # gradient steps of a refit
    noise: bool = True  # imagination draws the dynamics' own noise, which says how sure they are
    look_noise: bool = False  # imagined looks carry what the decoder leaves out of real ones

    def validate(self) -> None:
        counts = (self.fit_steps, self.refit_steps, self.decoder_steps)
        require(min(counts) >= 0, "world_model.fit_steps, refit_steps and decoder_steps are counts")
        require(self.refit_every >= 0, f"world_model.refit_every={self.refit_every}: use 0 for never")


@dataclass
class GroupsConfig:
    kind: Literal["branch", "episode"] = "branch"  # groups start at stored real states, or at initial states
    looks: int = 8  # looks a branch rollout makes
    explore_looks: int | None = None  # first looks of a branch that explore, the rest being deterministic; null: all
    reward: Literal["progress", "stage", "milestone", "next"] = "next"  # of a branch: see sim.rewards
    score: Literal["reward", "margin"] = "reward"  # what the calibration reads off imagined branches: see sim.rewards
    start_episodes: int = 12  # episodes a task that fill the bank of branch starts before the first update
    dream_resets: int = 0  # initial states a task from which the world model dreams starts for imagined groups; 0: none
    dream_episodes: int = 60  # of them, dreamt at a time
    dream_every: int = 3  # policy updates between dreams
    dream_looks: int = 36  # looks of a dream
    start_steps: int | None = None  # control steps of those episodes; null: the suite's limit

    def validate(self) -> None:
        require(self.looks >= 1, f"groups.looks={self.looks} must be at least 1")
        few = self.explore_looks is None or self.explore_looks >= 1
        require(few, f"groups.explore_looks={self.explore_looks} must be at least 1, or null for all")
        require(self.start_steps is None or self.start_steps >= 1, f"groups.start_steps={self.start_steps} must be at least 1")
        require(self.start_episodes >= 1, f"groups.start_episodes={self.start_episodes} must be at least 1")
        require(self.dream_resets >= 0, f"groups.dream_resets={self.dream_resets} is negative")
        require(
            self.dream_resets == 0 or self.kind == "branch",
            "groups.dream_resets needs groups.kind=branch: groups of whole episodes start at initial states",
        )
        for name in ("dream_episodes", "dream_every", "dream_looks"):
            require(getattr(self, name) >= 1, f"groups.{name}={getattr(self, name)} must be at least 1")


@dataclass
class EvalSection:
    before: bool = True  # evaluate the policy that training starts from
    after: bool = True  # evaluate the last policy
    every: int = 0  # policy updates between evaluations in between; 0: none
    episodes_per_task: int = 50  # official initial states a task, from 0 (papers: from 16)
    init_ids: list[int] | None = None  # official initial states; null: by episodes_per_task
    videos: int = 2  # videos a task

    def ids(self, split: str = "train") -> list[int]:
        """Official initial states to evaluate on."""
        if self.init_ids is not None:
            return list(self.init_ids)
        first = PAPERS_TRAIN_INITS if split == "papers" else 0
        return list(range(first, min(first + self.episodes_per_task, OFFICIAL_INITS)))

    def validate(self) -> None:
        check_episodes("eval.", self.init_ids, self.episodes_per_task)
        require(self.every >= 0, f"eval.every={self.every}: use 0 for none")
        require(self.videos >= 0, f"eval.videos={self.videos} is negative")


def check_episodes(prefix: str, init_ids: list[int] | None, episodes_per_task: int) -> None:
    check_inits(f"{prefix}init_ids", init_ids, OFFICIAL_INITS)
    require(init_ids is None or len(init_ids) > 0, f"{prefix}init_ids is empty: leave it out to use episodes_per_task")
    require(
        1 <= episodes_per_task <= OFFICIAL_INITS,
        f"{prefix}episodes_per_task={episodes_per_task}: a task has {OFFICIAL_INITS} official initial states",
    )


@dataclass
class WorkersConfig:
    pool: Literal["processes", "ray"] = "processes"  # simulators on this machine, or as actors of Ray (extra [ray])
    n: int | None = None  # simulator processes; null: one a core
    timeout_s: float = 300.0  # a worker silent for this long is rebuilt
    rebuilds: int = 3  # rebuilds a run may make before it stops
    ray_address: str | None = None  # a cluster's, or auto for the one this machine belongs to; null: Ray on this machine alone
    gpus: float = 0.0  # share of a GPU that an actor of Ray reserves to render on; 0: software renders

    def validate(self) -> None:
        installed = self.pool != "ray" or find_spec("ray") is not None
        require(installed, "workers.pool=ray, but Ray is not installed: run `make env EXTRAS=dev,ray`, or `pip install ray`")
        alone = self.pool == "ray" or (self.ray_address is None and self.gpus == 0)
        require(alone, "workers.ray_address and workers.gpus are for workers.pool=ray")
        require(self.gpus >= 0, f"workers.gpus={self.gpus} is negative")
        require(self.n is None or self.n >= 1, f"workers.n={self.n} must be at least 1, or null for one a core")
        require(self.timeout_s > 0 and self.rebuilds >= 0, "workers.timeout_s must be positive and rebuilds a count")


@dataclass
class LogConfig:
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "vla-wmrl"


@dataclass
class TrainConfig:
    """Post-train a policy: groups graded by a world model and by real anchors."""

    output_dir: str | None = None  # run folder; null: outputs/train/<job_name>/<date_time>
    job_name: str | None = None  # null: the arm
    resume: bool = False  # continue the run in output_dir from its last checkpoint
    seed: int = 0
    steps: int = 100  # policy updates
    arm: Arm = "wmrl"  # ablation arm: fixes the switches that define it
    save_every: int = 10  # policy updates between checkpoints
    keep_checkpoints: int = 2  # checkpoints kept
    device: str = "auto"  # auto, cpu, cuda, mps
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    debias: DebiasConfig = field(default_factory=DebiasConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    world_model: WorldModelConfig = field(default_factory=WorldModelConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    eval: EvalSection = field(default_factory=EvalSection)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def overlap(self) -> list[int]:
        """Initial states that training and evaluation share (per task; the two sets are the same for all tasks)."""
        if self.env.train_split != "official":
            return []
        return sorted(set(self.env.train_inits) & set(self.eval.ids(self.env.split)))

    def validate(self) -> None:
        for section in (self.env, self.grpo, self.anchors, self.debias, self.fusion, self.guard, self.groups):
            section.validate()
        for section in (self.eval, self.workers, self.policy, self.world_model):
            section.validate()
        require(self.steps >= 1, f"steps={self.steps} must be at least 1")
        require(self.save_every >= 1 and self.keep_checkpoints >= 1, "save_every and keep_checkpoints start at 1")
        require(self.policy.eta > 0, "policy.eta=0 has no log-probability to train on: use a positive eta")
        check_arm(self)
        require(
            self.groups.dream_resets == 0 or self.world_model.kind != "none",
            f"groups.dream_resets={self.groups.dream_resets}: without a world model nothing dreams, use 0",
        )
        require(
            not self.world_model.look_noise or self.world_model.kind == "none" or self.groups.kind == "branch",
            "world_model.look_noise takes its noise from the real episodes that fill the bank of starts: it needs "
            "groups.kind=branch",
        )
        require(
            self.groups.score == "reward" or (self.groups.kind == "branch" and self.groups.reward == "next"),
            "groups.score=margin measures how far a branch came beyond the next milestone: it needs groups.kind=branch and "
            "groups.reward=next",
        )
        require(
            self.groups.score == "reward" or self.debias.wait,
            "groups.score=margin is no reward: with debias.wait=false imagined groups would train on it uncalibrated",
        )
        require(
            self.anchors.minimum <= self.grpo.n_groups,
            f"anchors.minimum={self.anchors.minimum} exceeds grpo.n_groups={self.grpo.n_groups}",
        )
        shared = self.overlap() if (self.eval.before or self.eval.after or self.eval.every) else []
        require(
            not shared or self.env.allow_overlap,
            f"training and evaluation share {len(shared)} initial states (first: {shared[:3]}): choose others, "
            "or pass --env.allow_overlap=true",
        )
