"""Backends of the language world model and of chat agents: a local transformers model, or a server that speaks OpenAI's
protocol (vLLM, SGLang, llama.cpp, ...).

Both have `generate`; the local one also `choice_logprobs`, from which the world model takes its distribution. A server
gets the JSON schema as `response_format`, so that engines with guided decoding use it."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from text_agents.autoresearch import guided
from text_agents.server import Server, TooLong
from vla_wmrl.world_model.language import consistent


class TransformersBackend:
    """A causal language model on this machine. `context_tokens`: what fits into it."""

    def __init__(self, path: str | None = None, *, temperature: float = 0.7, seed: int = 0, device: str = "cpu"):
        """path: checkpoint folder or name; None: the packaged SmolLM2-135M-Instruct. Raises UserError without weights."""
        from text_agents.language_model import DEFAULT_MODEL, load_model

        if path is not None and (Path(path) / "adapter_config.json").is_file():  # what training an adapter has left
            from text_agents.language_policy import LanguagePolicy

            trained = LanguagePolicy.from_pretrained(path, device=device)
            loaded = trained.model, trained.tokenizer
        else:
            loaded = load_model(path or DEFAULT_MODEL, device)
        self._take(*loaded, temperature, seed)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, temperature: float = 0.7, seed: int = 0) -> TransformersBackend:
        """Around a model that is loaded already, and perhaps training."""
        made = cls.__new__(cls)
        made._take(model, tokenizer, temperature, seed)
        return made

    def _take(self, model: Any, tokenizer: Any, temperature: float, seed: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.temperature, self.seed, self.calls = temperature, seed, 0
        self.context_tokens = int(getattr(model.config, "max_position_embeddings", 2048))

    def ids(self, messages: list[dict]) -> list[int]:
        """Tokens of a conversation, ready for the reply."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count_tokens(self, text: str) -> int:
        return len(self.ids(_said(text)))

    def generate(self, prompts: Sequence[str], schema: dict | None, max_tokens: int) -> list[str]:
        """Replies, one a prompt; with a schema by constrained decoding, so that none is broken."""
        if schema is None:
            return self.chat([_said(p) for p in prompts], max_tokens)
        self.calls += 1
        found = []
        for i, prompt in enumerate(prompts):
            seed = (self.seed, self.calls, i)
            decoder = guided.Decoder(self.model, self.tokenizer, self.ids(_said(prompt)), self.temperature, seed)
            found.append(guided.answer(decoder, schema, max_tokens, consistent))
        return found

    def chat(self, conversations: Sequence[list[dict]], max_tokens: int) -> list[str]:
        """Replies to conversations of {"role", "content"}."""
        from text_agents.language_model import sample

        self.calls += 1  # so that a second try of the same prompt is another one
        end = self.tokenizer.eos_token_id
        tokens = [self.ids(c) for c in conversations]
        replies = sample(self.model, tokens, end, max_tokens, self.temperature, seed=self.seed + self.calls)
        return [self.tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in replies]

    def choice_logprobs(self, prompts: Sequence[str], choices: Sequence[str]) -> np.ndarray:
        """Log-probabilities [n, k] of k choices (each up to its closing quote) as the beginning of a reply.

        What follows a prompt's last line break counts as the reply's beginning where it starts with "{".
        """
        import torch

        rows = np.zeros((len(prompts), len(choices)))
        for i, prompt in enumerate(prompts):
            message, begun = _begun_reply(prompt)
            head = self.ids(_said(message)) + list(self.tokenizer(begun, add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                read = self.model(torch.tensor([head]), use_cache=True, logits_to_keep=1)  # once for all choices
                for j, choice in enumerate(choices):
                    tail = list(self.tokenizer(choice + '"', add_special_tokens=False)["input_ids"])
                    logits = read.logits[0, -1:]
                    if len(tail) > 1:
                        cache = copy.deepcopy(read.past_key_values)  # reading a choice writes into it
                        more = self.model(torch.tensor([tail[:-1]]), past_key_values=cache, use_cache=True).logits[0]
                        logits = torch.cat([logits, more])
                    logp = torch.log_softmax(logits.float(), -1)
                    rows[i, j] = float(logp[torch.arange(len(tail)), torch.tensor(tail)].sum())
        return rows


def _said(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def _begun_reply(prompt: str) -> tuple[str, str]:
    """(message, beginning of the reply) of a prompt that ends within a JSON object."""
    at = prompt.rfind("\n{")
    return (prompt[: at + 1], prompt[at + 1 :]) if at >= 0 else (prompt, "")


class ServerBackend:
    """A server of OpenAI's chat protocol. Several requests at a time, since engines batch them. `too_long`: prompts that the
    server refused as longer than its context; their answers are empty."""

    def __init__(self, url: str, model: str | None = None, *, key: str = "", temperature: float = 0.7, timeout_s: float = 600.0,
                 parallel: int = 16):  # fmt: skip
        """url: with the version, e.g. http://localhost:8000/v1. model: None asks the server. Raises UserError when silent."""
        self.server = Server(url, key, timeout_s)
        self.temperature, self.parallel, self.too_long = temperature, parallel, 0
        self.name = model or self.server.first_model()

    def generate(self, prompts: Sequence[str], schema: dict | None, max_tokens: int) -> list[str]:
        """Replies, one a prompt; an empty one where the server gave none."""
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda p: self._one(_said(p), schema, max_tokens), prompts))

    def chat(self, conversations: Sequence[list[dict]], max_tokens: int) -> list[str]:
        """Replies to conversations of {"role", "content"}."""
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda m: self._one(m, None, max_tokens), conversations))

    def _one(self, messages: list[dict], schema: dict | None, max_tokens: int) -> str:
        content = {"model": self.name, "messages": messages, "max_tokens": max_tokens, "temperature": self.temperature}
        if schema is not None:
            content["response_format"] = {"type": "json_schema", "json_schema": {"name": "prediction", "schema": schema}}
        try:
            choices = self.server.ask("/chat/completions", content).get("choices") or [{}]
        except TooLong:  # of one prompt, which only the server can tell: an empty answer, counted, and the others go on
            self.too_long += 1
            return ""
        return str((choices[0].get("message") or {}).get("content") or "")


def language_backend(path: str | None, url: str | None) -> TransformersBackend | ServerBackend:
    """The backend of a config: a server where `url` is given (its key in $OPENAI_API_KEY, if it wants one), else a local
    model."""
    return ServerBackend(url, path, key=os.environ.get("OPENAI_API_KEY", "")) if url else TransformersBackend(path)
