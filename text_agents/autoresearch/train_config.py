"""Configuration of `vla-wmrl research train`. The sections of the method are the core's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from text_agents.autoresearch.config import SandboxConfig
from text_agents.config import LoraSection, ModelSection
from vla_wmrl import arms
from vla_wmrl.config import AnchorsConfig, DebiasConfig, FusionConfig, GrpoConfig, GuardConfig, LogConfig
from vla_wmrl.errors import require

_PREDICTED = {"world_model.kind": ("outcomes", "language")}


def _arm(name: str) -> dict[str, tuple]:
    """The core's switches of an arm, with a world model that predicts outcomes and without kinds of starts."""
    fixed = {k: v for k, v in arms.ARMS[name].items() if not k.startswith("groups.")}
    return fixed if name == "real" else {**fixed, **_PREDICTED}


@dataclass
class PolicyConfig:
    kind: Literal["spec", "chat"] = "spec"  # a small network over the grammar, or a causal language model (section chat)
    path: str | None = None  # folder of a trained policy to start from; null: uniform over the grammar, or chat.model.path
    width: int = 128  # spec: of the hidden layer

    def validate(self) -> None:
        require(self.width >= 1, f"policy.width={self.width} must be at least 1")


@dataclass
class ChatConfig:
    """Of policy.kind=chat: a language model that trains."""

    mode: Literal["pipeline", "code"] = "code"  # it writes specifications, or whole programs
    model: ModelSection = field(default_factory=lambda: ModelSection(max_new_tokens=1024, max_prompt_tokens=7168))
    lora: LoraSection = field(default_factory=LoraSection)
    batch: int = 64  # conversations that run side by side; memory only

    def validate(self) -> None:
        self.model.validate()
        self.lora.validate()
        require(self.model.temperature > 0, "chat.model.temperature must be above 0: a group of equal replies teaches nothing")
        require(self.batch >= 1, f"chat.batch={self.batch} must be at least 1")


@dataclass
class LateAnchorsConfig(AnchorsConfig):
    lag: int = 0  # updates later that an anchor trains, with its own importance ratio; its execution overlaps with them
    pairs: Literal["executed", "twins"] = "executed"  # of the calibration: a trajectory judged twice, or with its imagined twin

    def validate(self) -> None:
        super().validate()
        require(self.lag >= 0, f"anchors.lag={self.lag} is negative")
        mixed = 0 < self.fraction < 1
        require(self.lag == 0 or mixed, "anchors.lag needs an arm with both sources: imagined groups train meanwhile")


@dataclass
class OutcomeModelConfig:
    kind: Literal["outcomes", "language", "none"] = "outcomes"  # fitted to past executions, a language model, or none
    data: str | None = "results/autoresearch/fidelity.jsonl.gz"  # past executions (benchmarks/research_fidelity.py)
    form: Literal["boosting", "forest"] = "boosting"
    folds: int = 4  # a task is predicted by a model of the past of other folds' tasks only; 1: of all training tasks
    learn: bool = False  # fitted again after every update, with what became of the anchors
    path: str | None = None  # language: checkpoint folder or name; null: the packaged SmolLM2-135M
    url: str | None = None  # language: address of an OpenAI-compatible server, e.g. http://localhost:8000/v1
    max_tokens: int = 512  # language: of an answer

    def validate(self) -> None:
        require(self.folds >= 1, f"world_model.folds={self.folds} must be at least 1")
        require(not self.learn or self.kind != "language", "world_model.learn: a language model trains by `research world`")
        require(self.kind != "outcomes" or self.data is not None, "world_model.data: name a file of past executions")
        require(self.max_tokens >= 64, f"world_model.max_tokens={self.max_tokens}: an answer needs at least 64")


@dataclass
class ResearchEvalSection:
    before: bool = True  # evaluate the policy that training starts from
    after: bool = True  # evaluate the last policy
    tasks: list[str] = field(default_factory=lambda: ["held_out"])  # names, or train, held_out, all
    task_dirs: list[str] = field(default_factory=list)  # task folders, held out
    episodes: int = 8  # trajectories a task

    def validate(self) -> None:
        require(
            len(self.tasks) + len(self.task_dirs) > 0 or not (self.before or self.after),
            "eval.tasks is empty: name tasks, or switch eval off",
        )
        require(self.episodes >= 1, f"eval.episodes={self.episodes} must be at least 1")


@dataclass
class ResearchTrainConfig:
    """Train an agent: groups of trajectories graded by a world model and by the sandbox."""

    ARMS: ClassVar[dict] = {name: _arm(name) for name in ("real", "wm", "mix", "debias", "denoise", "wmrl")}

    output_dir: str | None = None  # run folder
    resume: bool = False  # continue the run in output_dir from its last checkpoint
    seed: int = 0
    steps: int = 20  # policy updates
    arm: Literal["real", "wm", "mix", "debias", "denoise", "wmrl"] = "wmrl"  # fixes the switches that define it
    save_every: int = 5  # policy updates between checkpoints
    keep_checkpoints: int = 2  # checkpoints kept
    tasks: list[str] = field(default_factory=lambda: ["train"])  # names, or train
    turns: int = 4  # programs a trajectory; the best counts
    memory: str | None = None  # JSON-lines file of sandbox outcomes by content, shared by runs; null: in output_dir
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    grpo: GrpoConfig = field(default_factory=lambda: GrpoConfig(n_groups=8, lr=1e-2, minibatch_looks=4096))
    anchors: LateAnchorsConfig = field(default_factory=LateAnchorsConfig)
    debias: DebiasConfig = field(default_factory=DebiasConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    world_model: OutcomeModelConfig = field(default_factory=OutcomeModelConfig)
    sandbox: SandboxConfig = field(default_factory=lambda: SandboxConfig(cpu_s=20, wall_s=600.0))
    eval: ResearchEvalSection = field(default_factory=ResearchEvalSection)
    log: LogConfig = field(default_factory=lambda: LogConfig(tensorboard=False))

    def validate(self) -> None:
        for section in (
            self.policy,
            self.chat,
            self.grpo,
            self.anchors,
            self.debias,
            self.fusion,
            self.guard,
            self.world_model,
        ):
            section.validate()
        self.sandbox.validate()
        self.eval.validate()
        require(self.output_dir is not None, "no folder for the run: pass --output_dir=FOLDER")
        require(self.steps >= 1, f"steps={self.steps} must be at least 1")
        require(self.save_every >= 1 and self.keep_checkpoints >= 1, "save_every and keep_checkpoints start at 1")
        require(1 <= self.turns <= 8, f"turns={self.turns} is outside 1..8")
        require(len(self.tasks) > 0, "no task: pass --tasks")
        arms.check_arm(self)
        late = self.policy.kind == "spec" or self.anchors.lag == 0
        require(
            not self.world_model.learn or self.anchors.lag == 0,
            f"anchors.lag={self.anchors.lag} with world_model.learn: on a resume, groups that were imagined would be imagined "
            "again by a world model that knows more",
        )
        require(late, "anchors.lag: a chat model's anchors cannot be late, it is one network that writes for all groups")
        require(
            self.anchors.minimum + (self.anchors.lag > 0) <= self.grpo.n_groups,
            f"anchors.minimum={self.anchors.minimum} exceeds grpo.n_groups={self.grpo.n_groups}",
        )

    @property
    def mode(self) -> Literal["pipeline", "code"]:
        """What the agent writes."""
        return self.chat.mode if self.policy.kind == "chat" else "pipeline"
