"""A causal language model as a policy that the shared `Learner` trains: sample, score sampled tokens, name what trains.

Full training, or LoRA (arXiv 2106.09685, by peft) on the attention's projections. Log-probabilities are those at the
sampling temperature over the full softmax, in float32, of the sampled ids (text is never encoded again).

Non-obvious behaviour
* A fresh adapter starts as the identity, so the policy without it *is* the one that training began with: it serves as the
  reference of the KL term, and costs no copy. To go on from a trained adapter, its folder is loaded, merged, and gets a
  fresh adapter on top; the merge is done once and never undone (TRL issue 6688: repeated merges drift).
* The network is in evaluation mode throughout: dropout would make ratios noise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from text_agents import language_model
from text_agents.config import ModelSection
from text_agents.dialogues import Dialogues, Reply
from text_agents.served import Engine, ServedDialogues
from text_agents.token_rows import Passes, TokenRows, token_rows
from text_agents.transcripts import ChatFormat, TokenRollout, shipped
from vla_wmrl.errors import require

ADAPTER = "adapter_config.json"
BASE = "base_model.json"  # which model an adapter belongs to, by the name it was given


class LanguagePolicy:
    """A causal language model with its chat format. `lora_rank` 0 trains all weights."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_targets: Sequence[str] = ("q_proj", "v_proj"),
        template: str | None = None,
        name: str = "",
        seed: int = 0,
    ):
        """temperature: of sampling, and so of the log-probabilities. lora_alpha: None is 2 * rank. name: for `save`.

        template: a shipped chat template instead of the tokenizer's own. seed: of the adapter's first weights. Raises
        UserError for a model without the layers named, without a chat template, or for temperature 0.
        """
        require(temperature > 0, f"temperature={temperature}: a policy that trains needs a temperature above 0")
        self.tokenizer, self.temperature, self.name = tokenizer, float(temperature), name
        self.chat = ChatFormat(tokenizer, shipped(template) if template else None)
        self.dtype = next(model.parameters()).dtype
        self.adapted = lora_rank > 0
        self.model = (_with_adapter(model, lora_rank, lora_alpha, lora_targets, seed) if self.adapted else model).eval()
        self.engine: Engine | None = None  # samples in this network's place, by `serve`

    @classmethod
    def from_pretrained(cls, path: str, *, device: str = "cpu", dtype: str = "float32", **more: Any) -> LanguagePolicy:
        """From a folder, a hub name, "package:NAME", or a folder that `save` wrote. Raises UserError where none is there."""
        folder, base = Path(path), path
        if (folder / ADAPTER).is_file():
            require((folder / BASE).is_file(), f"{path} holds an adapter without {BASE}: which model is it for?")
            base = json.loads((folder / BASE).read_text(encoding="utf-8"))["base"]
        model, tokenizer = language_model.load_model(base, device, dtype)
        if base != path:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, path).merge_and_unload()
        # An adapter on top of a merged one cannot be loaded on the plain base: `save` writes whole models then.
        return cls(model, tokenizer, name="" if base != path else path, **more)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # ---- sampling
    def serve(self, engine: Engine | None) -> None:
        """Lets a server sample. Raises UserError for a policy whose weights it could not get."""
        base = "serve a model with the earlier run's adapter merged into it, and name that as model.path"
        require(engine is None or self.adapted, "rollouts.url: a server loads adapters only; set lora.rank")
        require(engine is None or bool(self.name), f"rollouts.url: this policy goes on from an adapter: {base}")
        self.engine = engine

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        max_new_tokens: int,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        greedy: bool = False,
    ) -> list[Reply]:
        """`copies` replies to each prompt, those of one prompt in a row; `keys` [len(prompts) * copies] draw them."""
        temperature = 0.0 if greedy else self.temperature
        if self.engine is not None:
            rngs = [np.random.default_rng([seed, key]) for key in keys or range(len(prompts) * copies)]
            return self.dialogues(greedy).reply(prompts, max_new_tokens, rngs, copies)
        return language_model.sample(
            self.model, prompts, self.chat.end_id, max_new_tokens, temperature, seed, keys, copies=copies
        )

    def dialogues(self, greedy: bool = False) -> Dialogues | ServedDialogues:
        """Conversations of several turns."""
        temperature = 0.0 if greedy else self.temperature
        if self.engine is not None:
            self.engine.update(self)
            return ServedDialogues(self.engine, self, temperature)
        return Dialogues(self.model, self.chat.end_id, temperature)

    # ---- what the learner asks for
    def parameters_to_train(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def without_adapter(self) -> AbstractContextManager | None:
        return self.model.disable_adapter() if self.adapted else None

    def collate(
        self, rollouts: Sequence[TokenRollout], advantages: Sequence[float | np.ndarray], valid: np.ndarray
    ) -> TokenRows:
        return token_rows(rollouts, advantages, valid, self.chat.end_id)

    def log_prob(self, rows: Passes) -> Tensor:
        """Log-probabilities [b] float32 of the scored tokens, on the CPU, with gradient."""
        to = self.device
        prompt_mask, owner = rows.prompt_mask.to(to), rows.owner.to(to)
        positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(
            rows.prompts.to(to), attention_mask=prompt_mask, position_ids=positions, use_cache=True, logits_to_keep=1
        )
        logits = out.logits[:, -1:][owner]  # [S, 1, V], what predicts a tail's first token
        if rows.tails.shape[1] > 1:
            cache = out.past_key_values
            cache.batch_select_indices(owner)
            length, before = rows.tails.shape[1] - 1, prompt_mask[owner]
            positions = before.sum(1, keepdim=True) + torch.arange(length, device=to)
            more = self.model(
                rows.tails[:, :-1].to(to),
                attention_mask=torch.cat([before, rows.tail_mask[:, :-1].to(to)], dim=1),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            logits = torch.cat([logits, more.logits], dim=1)
        sequence, column = rows.sequence.to(to), rows.column.to(to)
        scores = torch.log_softmax(logits[sequence, column].float() / self.temperature, dim=-1)
        return scores.gather(1, rows.tails.to(to)[sequence, column][:, None])[:, 0].cpu()

    def save(self, path: str | Path) -> None:
        """Write a folder that `from_pretrained` reads: the adapter where its base has a name, else the whole model."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        if self.adapted and self.name:
            self.model.peft_config["default"].base_model_name_or_path = self.name
            self.model.save_pretrained(path, save_embedding_layers=False)  # no embedding is trained
            (path / BASE).write_text(json.dumps({"base": self.name}) + "\n", encoding="utf-8")
        else:
            whole = self.model
            if self.adapted:
                import copy

                whole = copy.deepcopy(self.model).merge_and_unload()
            whole.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def check_context(policy: LanguagePolicy, section: ModelSection, name: str) -> None:
    """Raises UserError where a prompt and a reply may exceed the positions that a model knows."""
    known = getattr(policy.model.config, "max_position_embeddings", None)
    asked = section.max_prompt_tokens + section.max_new_tokens
    require(known is None or asked <= known, f"{name}.max_prompt_tokens and a reply: {asked}; the model has {known} positions")


def _with_adapter(model: Any, rank: int, alpha: float | None, targets: Sequence[str], seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in targets if name not in names]
    require(not missing, f"the model has no layers {missing} for LoRA (it has {', '.join(sorted(names))})")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=list(targets))
        return get_peft_model(model, config)
