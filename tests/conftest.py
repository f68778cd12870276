"""Shared set-up: no hub, one thread, the renderer chosen before anything imports mujoco."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402

from sim.gl import setup_gl  # noqa: E402

setup_gl()


@pytest.fixture(autouse=True)
def seeds():
    """Tests that draw without a seed of their own still repeat."""
    import random

    import numpy as np

    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A random small SmolVLA whose normalised actions are environment actions."""
    import torch

    from vla_wmrl.policies import nano

    torch.manual_seed(0)
    spec = nano.NanoSpec(
        image_size=32, vision_width=24, vision_layers=1, vision_heads=2, width=48, layers=2, heads=2, kv_heads=1,
        denoising_steps=4,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("policy")
    stats = {
        "observation.state": {"mean": torch.zeros(8), "std": torch.ones(8)},
        "action": {"mean": torch.zeros(7), "std": torch.full((7,), 0.3)},
    }
    nano.build_policy(folder, spec, ["put both the alphabet soup and the tomato sauce in the basket"], stats)
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-pair tokenizer trained on the spot, so that ids of a text are not unique."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(
        ["You arrive at desk 1. On the desk 1, you see a pen 1.", "go to desk 1 look <action>"] * 20, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")


@pytest.fixture(scope="session")
def tiny_long_model(tiny_model, tmp_path_factory):
    """The tiny model with positions for whole prompts: its tokens are hardly longer than characters."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tokenizer, tmp_path_factory):
    """Folder of a random two-layer causal model with that tokenizer and our ChatML template."""
    import copy

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from text_agents.transcripts import shipped

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)).save_pretrained(folder)
    own = copy.deepcopy(tokenizer)
    own.chat_template = shipped("chatml")
    own.save_pretrained(folder)
    return folder
