"""Sampling and scoring agree, whatever stands beside a row; the real packaged model loads and talks."""

import numpy as np
import pytest

from text_agents import language_model
from vla_wmrl.errors import UserError


@pytest.fixture(scope="module")
def tiny():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()


PROMPTS = [[5, 6, 7, 8, 9], [11], [5, 6, 7]]


def test_log_probabilities_of_the_sampler_are_those_of_the_trainer(tiny):
    import torch

    for temperature in (1.0, 0.6):
        replies = language_model.sample(tiny, PROMPTS, 0, 12, temperature, seed=3)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            ids = torch.tensor([prompt + reply.token_ids])
            logp = language_model.score(tiny, ids, torch.ones_like(ids), temperature)[0, len(prompt) :]
            np.testing.assert_allclose(logp.detach().numpy(), reply.logp, atol=1e-4)


def test_a_reply_does_not_depend_on_the_rows_beside_it(tiny):
    together = language_model.sample(tiny, PROMPTS, 0, 8, seed=1)
    for i, prompt in enumerate(PROMPTS):
        alone = language_model.sample(tiny, [prompt], 0, 8, seed=1, keys=[i])[0]
        assert alone.token_ids == together[i].token_ids


def test_members_of_a_group_differ_and_the_greedy_reply_does_not(tiny):
    group = language_model.sample(tiny, [PROMPTS[0]] * 4, 0, 8, seed=1)
    assert len({tuple(reply.token_ids) for reply in group}) > 1
    greedy = language_model.sample(tiny, [PROMPTS[0]] * 2, 0, 8, temperature=0.0, seed=1)
    assert greedy[0].token_ids == greedy[1].token_ids


def test_a_reply_that_hits_the_limit_is_marked_and_one_that_ends_keeps_its_end(tiny):
    cut = language_model.sample(tiny, [PROMPTS[0]], end_id=-1, max_new_tokens=3)[0]
    assert len(cut.token_ids) == 3 and not cut.ended
    ends = language_model.sample(tiny, [PROMPTS[0]], end_id=cut.token_ids[0], max_new_tokens=3)[0]
    assert ends.ended and ends.token_ids == cut.token_ids[:1]


def test_padding_does_not_change_scores(tiny):
    import torch

    ids = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    alone = language_model.score(tiny, ids[:1, :3], mask[:1, :3])
    np.testing.assert_allclose(
        language_model.score(tiny, ids, mask)[0, :3].detach().numpy(), alone[0].detach().numpy(), atol=1e-5
    )


def test_a_missing_model_is_one_clear_line():
    with pytest.raises(UserError, match="not installed"):
        language_model.gguf_file("package:no-such-model")
    with pytest.raises(UserError, match="no language model at"):
        language_model.load_model("/no/such/folder")


@pytest.mark.slow
def test_the_packaged_model_loads_and_answers():
    from text_agents.transcripts import ChatFormat

    model, tokenizer = language_model.load_model()
    chat = ChatFormat(tokenizer)
    prompt = chat.render([{"role": "user", "content": "What is the capital of France?"}])
    reply = language_model.sample(model, [prompt], chat.end_id, 12, temperature=0.0)[0]
    assert "Paris" in chat.decode(reply.token_ids)
