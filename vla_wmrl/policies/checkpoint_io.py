"""Loads and saves ordinary lerobot SmolVLA checkpoints that carry their language-model folder (`vlm/`) with them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.processor import PolicyProcessorPipeline

from vla_wmrl.errors import UserError

VLM_FOLDER = "vlm"
PREPROCESSOR = "policy_preprocessor.json"


def load_config(path: str | Path, device: str = "cpu") -> PreTrainedConfig:
    """The checkpoint's config with `vlm_model_name` pointing at its own `vlm/` folder where it has one."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a lerobot checkpoint: it holds no config.json; give a folder that does")
    config = PreTrainedConfig.from_pretrained(path)
    if config.type != "smolvla":
        raise UserError(f"{path} holds a {config.type!r} policy; only 'smolvla' checkpoints can be post-trained")
    if (path / VLM_FOLDER).is_dir():
        config.vlm_model_name = str((path / VLM_FOLDER).resolve())
    config.device = str(torch.device(device))
    config.pretrained_path = path
    return config


def load(path: str | Path, device: str = "cpu") -> tuple[SmolVLAPolicy, PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """The policy and its pre- and postprocessor from a checkpoint folder, without a hub, from any working directory."""
    config = load_config(path, device)
    with contextlib.redirect_stdout(io.StringIO()):  # lerobot prints what it does, in every worker
        policy = SmolVLAPolicy.from_pretrained(path, config=config)
    overrides = {
        "tokenizer_processor": {"tokenizer_name": config.vlm_model_name},
        "device_processor": {"device": config.device},
    }
    before, after = make_pre_post_processors(config, pretrained_path=str(path), preprocessor_overrides=overrides)
    return policy, before, after


def save(path: str | Path, policy: SmolVLAPolicy, before: PolicyProcessorPipeline, after: PolicyProcessorPipeline) -> None:
    """Writes a checkpoint that lerobot loads, its processors and, if it is local, the `vlm/` folder."""
    path = Path(path)
    policy.save_pretrained(path)
    before.save_pretrained(path)
    after.save_pretrained(path)
    make_portable(path, policy.config.vlm_model_name)


def make_portable(path: str | Path, vlm: str | Path) -> None:
    """Copies a local `vlm` folder into the checkpoint and refers to it as `vlm`: no absolute path is left."""
    path, vlm = Path(path), Path(vlm)
    if not vlm.is_dir():
        return  # a hub name: lerobot's business
    target = path / VLM_FOLDER
    if vlm.resolve() != target.resolve():
        shutil.copytree(vlm, target, dirs_exist_ok=True)
    _rewrite(path / "config.json", lambda config: config.update(vlm_model_name=VLM_FOLDER, pretrained_path=None))
    _rewrite(path / PREPROCESSOR, _relative_tokenizer)
    if (path / "train_config.json").is_file():
        _rewrite(path / "train_config.json", _relative_training)


def _relative_tokenizer(processor: dict) -> None:
    for step in processor["steps"]:
        if step.get("registry_name") == "tokenizer_processor":
            step["config"]["tokenizer_name"] = VLM_FOLDER


def _relative_training(config: dict) -> None:
    config["policy"].update(vlm_model_name=VLM_FOLDER, pretrained_path=None)


def _rewrite(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=2) + "\n")
