"""`vla-wmrl text small-model`: a language model small enough to train from nothing on one CPU core, for ALFWorld's few words.

The class is an ordinary one (Llama) with random weights; the tokenizer is byte-level BPE learnt on what training games say, so
that a command is a handful of tokens, with ChatML's template. Such a model knows no English: what it does, it has learnt
from games. It makes experiments with imitation, policy RL, RWML and WMRL possible in minutes; figures of it are of *it*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from text_agents import alfworld
from text_agents.alfworld_games import Game, find_games
from text_agents.config import SmallModelConfig
from text_agents.rwml import prompts
from text_agents.transcripts import shipped
from vla_wmrl.tracking import write_json

SPECIAL = ("<|im_start|>", "<|im_end|>")  # the second ends a turn


def texts(games: Sequence[Game]) -> Iterator[str]:
    """What is said in the games' walkthroughs and asked around them."""
    for game in games:
        episode = alfworld.play(game, alfworld.walkthrough_agent(game), max_steps=len(game.walkthrough))
        seen = episode.observations
        yield prompts.act(game.task, (), seen[0], None)
        for i, command in enumerate(episode.commands):
            turns = list(zip(episode.commands[:i], seen[:i], strict=True))[-2:]
            yield prompts.act_label(command)
            yield prompts.go_on(seen[i + 1], None)
            yield prompts.act(game.task, turns, seen[i], None)
        game.release()


def learn_tokenizer(some: Iterator[str], vocabulary: int) -> Any:
    """Byte-level BPE of at most `vocabulary` tokens, with ChatML's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(some, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[1], pad_token=SPECIAL[1], chat_template=shipped("chatml"),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make(tokenizer: Any, layers: int, width: int, heads: int, positions: int, seed: int) -> Any:
    """A Llama of these sizes with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=positions, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(sizes)


def main(cfg: SmallModelConfig) -> None:
    games = find_games(cfg.split, cfg.data, cfg.task_types, cfg.limit)
    tokenizer = learn_tokenizer(texts(games), cfg.vocabulary)
    model = make(tokenizer, cfg.layers, cfg.width, cfg.heads, cfg.positions, cfg.seed)
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = sum(p.numel() for p in model.parameters())
    sizes = {"parameters": weights, "vocabulary": len(tokenizer), "games": len(games), "seed": cfg.seed}
    write_json(folder / "small_model.json", sizes | {"split": cfg.split, "task_types": cfg.task_types})
    print(f"{folder}: {weights / 1e6:.2f} M parameters, {len(tokenizer)} tokens learnt on {len(games)} games")
