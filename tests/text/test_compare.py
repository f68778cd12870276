"""What training changed: counted as the paper counts, and a model that has broken is seen to have."""

import json

import pytest
import torch

from text_agents.compare import forgetting
from text_agents.compare.weights import change_ratios, changed, place_of, pooled
from vla_wmrl import cli


def test_a_weight_has_changed_beyond_a_thousandth_of_itself_and_zeros_do_not_count():
    before = torch.tensor([1.0, 1.0, -2.0, 0.0, 3.0, float("nan")])
    after = torch.tensor([1.0005, 1.002, -2.1, 5.0, 0.0, 1.0])
    assert changed(before, after) == (2, 3)
    assert changed(before, before.clone()) == (0, 4)
    assert changed(before, after, eta=0.1) == (0, 3)
    half = torch.tensor([1.0], dtype=torch.bfloat16)  # its next number is 0.8 % away: any change counts
    assert changed(half, torch.nextafter(half, 2 * half)) == (1, 1)


def test_changes_are_told_apart_by_layer_and_module_and_different_models_are_refused():
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.11.mlp.up_proj.weight")
    assert [place_of(n) for n in names] == [(None, "embed_tokens"), (0, "q_proj"), (11, "up_proj")]
    assert place_of("transformer.h.2.attn.c_attn.bias") == (2, "c_attn")
    before = {n: torch.ones(4) for n in names}
    after = {n: w.clone() for n, w in before.items()}
    after[names[1]][:3] = 2.0
    rows = change_ratios(before, after)
    assert pooled(rows, "layer") == {"outside layers": 0.0, "0": 0.75, "11": 0.0}
    assert pooled(rows, "module") == {"embed_tokens": 0.0, "q_proj": 0.75, "up_proj": 0.0}
    with pytest.raises(ValueError, match="different weights"):
        change_ratios(before, {names[0]: torch.ones(4)})
    with pytest.raises(ValueError, match="float32 before"):
        change_ratios(before, {n: w.double() for n, w in after.items()})


def test_questions_are_sixty_with_four_different_answers():
    rows = forgetting.questions()
    assert len(rows) == 60 and all(len(set(r["answers"])) == 4 for r in rows)
    assert len({r["text"] for r in rows}) == 60


def test_losses_are_those_of_every_window_alone(tiny):
    ids = list(range(11))
    losses = forgetting.token_losses(tiny, ids, 4)
    assert losses.shape == (8,)  # windows of 4, 4 and 3 tokens, without their first
    with torch.no_grad():
        logp = torch.log_softmax(tiny(torch.tensor([ids[4:8]])).logits[0].float(), -1)
    assert losses[3] == pytest.approx(-float(logp[0, ids[5]]), abs=1e-5)


@pytest.fixture(scope="module")
def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()


def test_the_command_compares_a_model_with_its_trained_adapter(tiny_model, tmp_path, capsys):
    from text_agents.language_policy import LanguagePolicy

    policy = LanguagePolicy.from_pretrained(str(tiny_model), lora_rank=2)
    with torch.no_grad():
        for name, p in policy.parameters_to_train():
            if "lora_B" in name and ".layers.0." in name:
                p.fill_(0.1)
    policy.save(tmp_path / "model")
    argv = ["text", "compare", f"--before={tiny_model}", f"--after={tmp_path / 'model'}", "--tokens=64", "--dtype=float32"]
    assert cli.main([*argv, f"--output_dir={tmp_path / 'out'}"]) == 0
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    by_module, by_layer = (found["weights"]["changed"][k] for k in ("by_module", "by_layer"))
    assert by_module["q_proj"] > 0.2 and by_module["down_proj"] == 0 and by_layer["0"] > 0 and by_layer["1"] == 0
    before, after = found["text"]
    assert before["tokens"] == after["tokens"] == 63 and before["perplexity"] != after["perplexity"]
    assert found["questions"]["n"] == 60 and (tmp_path / "out" / "weights.png").stat().st_size > 5_000
    assert "questions right" in capsys.readouterr().out
    # a model beside itself: nothing changed, nothing forgotten
    assert cli.main([*argv[:3], f"--after={tiny_model}", "--tokens=64", f"--output_dir={tmp_path / 'same'}"]) == 0
    same = json.loads((tmp_path / "same" / "compare.json").read_text())
    assert same["weights"]["changed"]["all"] == 0 and same["questions"]["p"] == 1.0
    assert same["text"][0] == same["text"][1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "--after=RUN/model"),
        (["--after=no/such"], "no language model at"),
        (["--after=x", "--eta=0"], "eta=0.0 must lie"),
        (["--after=x", "--tokens=1"], "at least 2"),
    ],
)
def test_mistakes_are_one_line(more, words, tmp_path, capsys):
    assert cli.main(["text", "compare", *more, f"--output_dir={tmp_path / 'out'}"]) == 2
    assert words in capsys.readouterr().err


def test_lm_eval_that_is_missing_says_how_to_get_it(tiny_model, tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    argv = ["text", "compare", f"--before={tiny_model}", f"--after={tiny_model}", "--tokens=0", "--questions=false"]
    assert cli.main([*argv, "--lm_eval=[arc_easy]", f"--output_dir={tmp_path / 'out'}"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err
