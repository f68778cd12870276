"""A small model of the games' words: an ordinary model folder that the other commands take, the same for the same seed."""

import json

import pytest

from text_agents.language_model import load_model
from text_agents.transcripts import ChatFormat
from vla_wmrl import cli


@pytest.fixture(scope="module")
def argv(games_folder):
    return [
        "text",
        "small-model",
        f"--data={games_folder}",
        "--limit=2",
        "--vocabulary=400",
        "--layers=2",
        "--width=32",
        "--heads=2",
    ]


def test_a_small_model_says_any_text_and_is_the_same_for_the_same_seed(argv, tmp_path):
    for name in ("a", "b"):
        assert cli.main([*argv, f"--output_dir={tmp_path / name}"]) == 0
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    model, tokenizer = load_model(str(tmp_path / "a"))
    chat = ChatFormat(tokenizer)  # raises where a conversation would not be a prefix of its continuation
    assert chat.end_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "go to drawer 1 — café 東京\n\t<action>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < model.config.vocab_size == len(tokenizer) <= 400
    assert json.loads((tmp_path / "a" / "small_model.json").read_text())["games"] == 2
    assert cli.main([*argv, "--seed=1", f"--output_dir={tmp_path / 'c'}"]) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--vocabulary=200"], "at least 300"),
        (["--width=33"], "even multiple of heads"),
        (["--limit=0"], "at least 1"),
        (["--data=no/such"], "no folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(change, words, argv, tmp_path, capsys):
    argv = [a for a in argv if a.split("=")[0] not in [c.split("=")[0] for c in change]]
    assert cli.main([*argv, *change, f"--output_dir={tmp_path / 'out'}"]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
