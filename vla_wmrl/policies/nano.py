"""Builds a very small SmolVLA from nothing: a SmolVLM config, tokenizer and processor in a folder, random weights.

The result is an ordinary lerobot checkpoint that carries its language-model folder as `vlm/`. lerobot resolves
`vlm_model_name` against the working directory (or a hub), so the stored value is the relative `vlm`: plain lerobot
users run from inside the checkpoint folder (`cd CHECKPOINT && lerobot-eval --policy.path=. ...`); our own loader
(`checkpoint_io.load`) points it at the folder wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
from transformers.models.smolvlm import SmolVLMVideoProcessor

from vla_wmrl.policies import checkpoint_io

CAMERAS = ("observation.images.image", "observation.images.image2")  # as lerobot's LIBERO data set names them
SPECIAL_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


@dataclass(frozen=True)
class NanoSpec:
    """Sizes of the small policy. Images are square, `image_size` pixels; the expert's width is a share of `width`."""

    image_size: int = 64
    patch_size: int = 16
    pixel_shuffle: int = 1  # image tokens per camera: (image_size / patch_size / pixel_shuffle)^2
    vision_width: int = 128
    vision_layers: int = 3
    vision_heads: int = 4
    width: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    expert_share: float = 0.75
    chunk_size: int = 16
    n_action_steps: int = 8
    denoising_steps: int = 5
    state_dim: int = 8
    action_dim: int = 7
    language_tokens: int = 24
    vocabulary: int = 768
    init_std: float = 0.08  # transformers' 0.02 is for widths near 768: about 1/sqrt(width) is the same gain at this size


def _tokenizer(sentences: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE learned from the task sentences: few tokens for them, and still able to write any text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", *SPECIAL_TOKENS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(set(sentences)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        extra_special_tokens=SPECIAL_TOKENS,
    )


def build_vlm(folder: str | Path, spec: NanoSpec, sentences: Sequence[str]) -> None:
    """Writes the config, tokenizer and processor of a SmolVLM of `spec`'s size to `folder` (no weights)."""
    tokenizer = _tokenizer(sentences, spec.vocabulary)
    side = spec.image_size // spec.patch_size
    if side * spec.patch_size != spec.image_size or side % spec.pixel_shuffle:
        raise ValueError(f"image_size {spec.image_size} must be a multiple of patch_size x pixel_shuffle")
    config = SmolVLMConfig(
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS["image_token"]),
        scale_factor=spec.pixel_shuffle,
        vision_config={
            "hidden_size": spec.vision_width,
            "intermediate_size": 4 * spec.vision_width,
            "num_hidden_layers": spec.vision_layers,
            "num_attention_heads": spec.vision_heads,
            "image_size": spec.image_size,
            "patch_size": spec.patch_size,
            "initializer_range": spec.init_std,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": spec.width,
            "intermediate_size": 256 * max(1, round(spec.width * 8 / 3 / 256)),
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.width // spec.heads,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "max_position_embeddings": 512,
            "initializer_range": spec.init_std,
        },
    )
    config.save_pretrained(folder)
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=(side // spec.pixel_shuffle) ** 2,
    )
    processor.save_pretrained(folder)


def policy_config(vlm: str | Path, spec: NanoSpec, device: str = "cpu") -> SmolVLAConfig:
    """lerobot's config of the small policy; everything trains, since nothing is pre-trained."""
    images = {name: PolicyFeature(FeatureType.VISUAL, (3, spec.image_size, spec.image_size)) for name in CAMERAS}
    return SmolVLAConfig(
        vlm_model_name=str(vlm),
        load_vlm_weights=False,
        chunk_size=spec.chunk_size,
        n_action_steps=spec.n_action_steps,
        num_steps=spec.denoising_steps,
        num_vlm_layers=spec.layers,
        expert_width_multiplier=spec.expert_share,
        resize_imgs_with_padding=(spec.image_size, spec.image_size),
        max_state_dim=spec.state_dim,
        max_action_dim=spec.action_dim,
        freeze_vision_encoder=False,
        train_expert_only=False,
        tokenizer_max_length=spec.language_tokens,
        pad_language_to="max_length",
        push_to_hub=False,
        device=device,
        input_features={**images, "observation.state": PolicyFeature(FeatureType.STATE, (spec.state_dim,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (spec.action_dim,))},
    )


def build_policy(
    folder: str | Path,
    spec: NanoSpec,
    sentences: Sequence[str],
    stats: dict[str, dict[str, torch.Tensor]],
    seed: int = 0,
) -> None:
    """Writes an ordinary lerobot checkpoint with random weights and its processors to `folder`.

    `stats`: {"observation.state" | "action": {"mean", "std"}}, as lerobot's dataset statistics.
    """
    folder = Path(folder)
    build_vlm(folder / checkpoint_io.VLM_FOLDER, spec, sentences)
    config = policy_config(folder / checkpoint_io.VLM_FOLDER, spec)
    torch.manual_seed(seed)
    policy = SmolVLAPolicy(config)
    checkpoint_io.save(folder, policy, *make_smolvla_pre_post_processors(config, stats))
