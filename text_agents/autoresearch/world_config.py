"""Configuration of `vla-wmrl research world`. The sections are those of the other language models' training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from text_agents.config import LoraSection, ModelSection
from vla_wmrl.config import GrpoConfig
from vla_wmrl.errors import require


@dataclass
class WorldTrainConfig:
    """Train a language model to foretell executions: RWML (GRPO), or supervised; judged on held-out tasks."""

    output_dir: str | None = None  # run folder: config, metrics, checkpoints, eval_before.json, eval_after.json, model/
    data: str = "results/autoresearch/fidelity.jsonl.gz"  # past executions (benchmarks/research_fidelity.py)
    method: Literal["sft", "rwml"] = "sft"  # imitation of true outcomes, or reinforcement by them
    start: str | None = None  # folder of an earlier run's model/ to go on from; null: model.path as it is
    resume: bool = False  # continue the run in output_dir from its last checkpoint
    seed: int = 0
    steps: int = 100  # updates. 0: judge only
    save_every: int = 20  # updates between checkpoints
    keep_checkpoints: int = 1
    eval_per_task: int = 4  # programs of each held-out task that are judged before and after; 0: none
    model: ModelSection = field(default_factory=lambda: ModelSection(max_new_tokens=320, max_prompt_tokens=3072))
    lora: LoraSection = field(default_factory=LoraSection)
    grpo: GrpoConfig = field(default_factory=lambda: GrpoConfig(n_groups=8, lr=1e-4, minibatch_looks=4096))

    def validate(self) -> None:
        require(self.output_dir is not None, "no folder for the run: pass --output_dir=FOLDER")
        for section in (self.model, self.lora, self.grpo):
            section.validate()
        require(self.model.temperature > 0, "model.temperature must be above 0: a group of equal answers teaches nothing")
        require(min(self.steps, self.eval_per_task) >= 0, "steps and eval_per_task start at 0")
        require(min(self.save_every, self.keep_checkpoints) >= 1, "save_every and keep_checkpoints start at 1")
