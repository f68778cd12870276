"""Configuration of `vla-wmrl text rl`. The sections of the method are the core's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from text_agents.config import DOMAINS, SPLITS, LoraSection, ModelSection, RolloutsSection, check_domains
from vla_wmrl import arms
from vla_wmrl.config import AnchorsConfig, DebiasConfig, FusionConfig, GrpoConfig, GuardConfig, LogConfig
from vla_wmrl.errors import nearest, require

TRAIN_STEPS = {"alfworld": 15, "tau2": 30}  # actions a training episode may take (RWML, arXiv 2602.05842, s3.1)
EVAL_STEPS = 30  # and one of evaluation


def _arm(name: str) -> dict[str, tuple]:
    """The core's switches of an arm. Groups have one kind of start here, and an imagined room lists no commands."""
    fixed = {k: v for k, v in arms.ARMS[name].items() if not k.startswith("groups.")}
    if name == "real":
        return fixed
    return {**fixed, "world_model.kind": ("language",), "episodes.list_commands": (False,)}


@dataclass
class GamesSection:
    data: str | None = None  # folder with the splits; null: $ALFWORLD_DATA
    split: Literal["train", "valid_seen", "valid_unseen", "valid_train"] = "train"
    limit: int | None = None  # this many games, spread over the split; null: all
    task_types: list[str] = field(default_factory=list)  # only these; empty: all six

    def validate(self) -> None:
        require(self.limit is None or self.limit >= 1, f"games.limit={self.limit} must be at least 1, or null")


@dataclass
class Tau2Section:
    domains: list[str] = field(default_factory=lambda: list(DOMAINS))
    split: str = "train"  # official split trained on
    eval_split: str = "test"  # official split evaluated on
    limit: int | None = None  # this many training tasks a domain, spread over the split; null: all
    user: Literal["chat", "scripted", "solo"] = "chat"  # a language model, the task's own actions (tests), nobody (telecom)
    user_url: str | None = None  # of user=chat: server of OpenAI's protocol, with its version
    user_model: str | None = None  # its name there
    user_temperature: float = 0.0
    user_timeout_s: float = 60.0  # for one answer; later, the episode has no reward
    user_parallel: int = 16  # episodes whose users answer at the same time
    user_key_variable: str = "OPENAI_API_KEY"  # environment variable that holds the server's key; may be unset

    def validate(self) -> None:
        check_domains(self.domains)
        require(self.limit is None or self.limit >= 1, f"tau2.limit={self.limit} must be at least 1, or null")
        solo = self.user != "solo" or self.domains == ["telecom"]
        require(solo, "tau2.user=solo exists for telecom only: --tau2.domains=telecom")
        named = self.user != "chat" or (self.user_url and self.user_model)
        require(bool(named), "tau2.user=chat needs tau2.user_url and tau2.user_model; without a server: scripted, or solo")
        require(self.user_parallel >= 1, f"tau2.user_parallel={self.user_parallel} must be at least 1")
        require(self.user_timeout_s > 0, f"tau2.user_timeout_s={self.user_timeout_s} must be positive")


@dataclass
class EpisodesSection:
    max_steps: int | None = None  # actions an episode of training may take; null: 15 in ALFWorld, 30 in tau2
    list_commands: bool = True  # of ALFWorld: commands that do something are in the prompt; a world model cannot list them
    invalid_penalty: float = 0.0  # times the share of invalid commands, taken off the reward
    batch: int = 64  # episodes that run side by side; memory only

    def validate(self) -> None:
        require(min(self.max_steps or 1, self.batch) >= 1, "episodes.max_steps and episodes.batch start at 1")
        require(self.max_steps is None or self.max_steps >= 1, "episodes.max_steps starts at 1; null: the default")
        require(0 <= self.invalid_penalty <= 1, f"episodes.invalid_penalty={self.invalid_penalty} is outside 0..1")


@dataclass
class StepLevelSection:
    weight: float = 0.0  # of advantages among turns that saw the same (GiGPO); 0: a trajectory has one advantage
    gamma: float = 0.95  # discount of a turn's return, a turn

    def validate(self) -> None:
        require(self.weight >= 0, f"step_level.weight={self.weight} is negative")
        require(0 < self.gamma <= 1, f"step_level.gamma={self.gamma} must lie in (0, 1]")


@dataclass
class LanguageWorldSection:
    kind: Literal["language", "none"] = "none"  # a language model that predicts next states, or none
    history: int | None = None  # latest turns in its prompt; null: all that fit
    model: ModelSection = field(default_factory=lambda: ModelSection(temperature=0.0))

    def validate(self) -> None:
        self.model.validate()
        require(self.history is None or self.history >= 0, f"world_model.history={self.history} is negative: null is all")


@dataclass
class TextEvalSection:
    before: bool = True  # evaluate the policy that training starts from
    after: bool = True  # evaluate the last policy
    every: int = 0  # updates between evaluations in between; 0: none
    splits: list[str] | None = None  # of ALFWorld; null: valid_seen and valid_unseen
    limit: int | None = None  # this many games a split, or tasks a domain; null: all
    max_steps: int = EVAL_STEPS  # commands an episode may take
    greedy: bool = True  # the likeliest tokens; otherwise sampled as in training

    def validate(self) -> None:
        for split in self.splits or ():
            require(split in SPLITS, f"unknown split {split!r}{nearest(split, SPLITS)}")
        asked = self.before or self.after or self.every > 0
        require(not asked or self.splits != [], "eval.splits is empty: name splits, or switch eval off")
        require(self.limit is None or self.limit >= 1, f"eval.limit={self.limit} must be at least 1, or null")
        require(self.max_steps >= 1, f"eval.max_steps={self.max_steps} must be at least 1")
        require(self.every >= 0, f"eval.every={self.every}: use 0 for none")


@dataclass
class TextRlConfig:
    """Train a language model to act in ALFWorld or tau2-bench by the success of its episodes, real or imagined."""

    ARMS: ClassVar[dict] = {name: _arm(name) for name in ("real", "wm", "mix", "debias", "denoise", "wmrl")}

    output_dir: str | None = None  # run folder: config, metrics, checkpoints, evaluations, model/
    env: Literal["alfworld", "tau2"] = "alfworld"
    method: Literal["rl", "sft", "rft"] = "rl"  # sft: imitates walkthroughs, a start for rl; rft: its own successes
    # Of method=sft. searching: in vain at first. slipping: also with commands that do nothing or lead astray, not imitated
    demonstrations: Literal["walkthrough", "searching", "slipping"] = "walkthrough"
    imitate: Literal["commands", "everything"] = "commands"  # of method=sft; everything: also prompts and what games say
    start: str | None = None  # folder of an earlier run's model/ to go on from; null: model.path as it is
    resume: bool = False  # continue the run in output_dir from its last checkpoint
    seed: int = 0
    steps: int = 300  # policy updates (RWML: 300). 0: evaluate only
    arm: Literal["real", "wm", "mix", "debias", "denoise", "wmrl"] = "real"  # fixes the switches that define it
    save_every: int = 10  # policy updates between checkpoints
    keep_checkpoints: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the network's weights; an adapter's are float32
    games: GamesSection = field(default_factory=GamesSection)  # of ALFWorld
    tau2: Tau2Section = field(default_factory=Tau2Section)
    episodes: EpisodesSection = field(default_factory=EpisodesSection)
    model: ModelSection = field(default_factory=lambda: ModelSection(max_prompt_tokens=6144))
    lora: LoraSection = field(default_factory=LoraSection)
    grpo: GrpoConfig = field(
        default_factory=lambda: GrpoConfig(n_groups=16, lr=1e-6, advantage_scale="std", minibatch_looks=8192)
    )
    rollouts: RolloutsSection = field(default_factory=RolloutsSection)
    step_level: StepLevelSection = field(default_factory=StepLevelSection)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    debias: DebiasConfig = field(default_factory=DebiasConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    world_model: LanguageWorldSection = field(default_factory=LanguageWorldSection)
    eval: TextEvalSection = field(default_factory=TextEvalSection)
    log: LogConfig = field(default_factory=lambda: LogConfig(tensorboard=False))

    def validate(self) -> None:
        for section in (
            self.games,
            self.episodes,
            self.model,
            self.lora,
            self.grpo,
            self.rollouts,
            self.step_level,
            self.anchors,
        ):
            section.validate()
        for section in (self.debias, self.fusion, self.guard, self.world_model, self.eval):
            section.validate()
        require(self.output_dir is not None, "no output: pass --output_dir=FOLDER for the run")
        require(self.steps >= 0, f"steps={self.steps} is negative")
        require(self.save_every >= 1 and self.keep_checkpoints >= 1, "save_every and keep_checkpoints start at 1")
        require(self.model.temperature > 0, "model.temperature must be above 0: a group of equal episodes teaches nothing")
        exact = self.dtype == "float32" or self.lora.rank > 0
        require(exact, "bfloat16 weights round small steps away: train an adapter (its weights are float32), or dtype=float32")
        arms.check_arm(self)
        real = self.method == "rl" or self.arm == "real"
        require(real, f"method={self.method} imitates what was executed: arm={self.arm} is for method=rl")
        require(
            self.anchors.minimum <= self.grpo.n_groups,
            f"anchors.minimum={self.anchors.minimum} exceeds grpo.n_groups={self.grpo.n_groups}",
        )
        require(
            self.step_level.weight == 0 or self.grpo.advantage_scale != "shared",
            "step_level.weight has no shared scale: use grpo.advantage_scale=none or std",
        )
        if self.env == "tau2":
            self.tau2.validate()
            require(self.arm == "real", f"arm={self.arm}: no rule judges an imagined tau2 episode; env=tau2 has arm=real")
            require(self.method != "sft", "method=sft imitates ALFWorld's walkthroughs: env=tau2 has method=rl and rft")
            require(self.eval.splits is None, "eval.splits are ALFWorld's: env=tau2 has tau2.eval_split")
        else:
            both = self.games.split in self.evaluated()
            require(not both, f"games of {self.games.split} are both trained on and evaluated")

    @property
    def train_max_steps(self) -> int:
        """Actions an episode of training may take."""
        return self.episodes.max_steps or TRAIN_STEPS[self.env]

    def evaluates(self) -> bool:
        """Is there any evaluation?"""
        return self.eval.before or self.eval.after or self.eval.every > 0

    def evaluated(self) -> list[str]:
        """ALFWorld's splits that are evaluated on."""
        if not self.evaluates():
            return []
        return ["valid_seen", "valid_unseen"] if self.eval.splits is None else self.eval.splits
