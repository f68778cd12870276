"""Attention without copied keys is the attention that transformers computes, in sampling, in scoring and in training."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from text_agents.attention import NAME, use_grouped
from text_agents.language_model import load_model, sample


@pytest.fixture(scope="module")
def models():
    """The same model of 6 query heads and 2 key heads: as transformers runs it, and grouped."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()
    grouped = copy.deepcopy(stock)
    use_grouped(grouped)
    assert grouped.config._attn_implementation == NAME != stock.config._attn_implementation
    return stock, grouped


@pytest.mark.parametrize("padded", [False, True])
def test_outputs_and_gradients_are_those_of_copied_keys(models, padded):
    ids = torch.arange(21).reshape(3, 7)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 4:] = 0
    results = []
    for model in models:
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        results.append((logits, model.model.layers[0].self_attn.k_proj.weight.grad))
    for stock, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, stock)


def test_replies_are_those_of_copied_keys(models):
    prompts = [[5, 6, 7, 8, 9], [11], [5, 6, 7]]
    stock, grouped = (sample(model, prompts, 0, 12, seed=3, copies=2) for model in models)
    assert [r.token_ids for r in grouped] == [r.token_ids for r in stock]
    for one, other in zip(grouped, stock, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-5)


def test_a_model_on_a_cpu_is_loaded_grouped_and_saved_as_it_came(models, tmp_path):
    models[1].save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()  # whoever loads it elsewhere does not know the name
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(kinds.WordLevel({"a": 0}, unk_token="a"))).save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[0].config._attn_implementation == NAME
