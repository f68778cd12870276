"""Token rollouts through the shared learner: one row a sampled token, prompts read once, the same gradient however split."""

import numpy as np
import pytest
import torch

from text_agents import language_model
from text_agents.language_policy import LanguagePolicy
from text_agents.transcripts import Transcript
from vla_wmrl import grpo
from vla_wmrl.config import GrpoConfig
from vla_wmrl.errors import UserError
from vla_wmrl.learner import Learner

PROMPTS = [[5, 6, 7, 8, 9], [11, 12]]


def policy(tiny_model, **more):
    return LanguagePolicy.from_pretrained(str(tiny_model), **more)


def group(policy, prompts=PROMPTS, copies=2, tokens=6, seed=0):
    """Rollouts of `copies` replies to each prompt."""
    rollouts = []
    for i, reply in enumerate(policy.sample(prompts, copies, tokens, seed)):
        transcript = Transcript()
        transcript.add_context(prompts[i // copies])
        transcript.add_reply(reply.token_ids, reply.logp)
        rollouts.append(transcript.finish(i // copies, i % copies, 1.0, "done"))
    return rollouts


def two_turns(first, context, second):
    transcript = Transcript()
    transcript.add_context([5, 6, 7])
    transcript.add_reply(first, [0.0] * len(first))
    transcript.add_context(context)
    transcript.add_reply(second, [0.0] * len(second))
    return transcript.finish(0, 0, 1.0, "done")


def scored(policy, rollouts, size=1000):
    """[R] log-probabilities of each rollout's sampled tokens."""
    rows = policy.collate(rollouts, np.ones(len(rollouts)), np.ones(len(rollouts), bool))
    parts = rows.split(torch.arange(len(rows.mask)), size)
    logp = torch.cat([policy.log_prob(*rows.rows(part)) for part in parts])
    return [logp[rows.rollout == i] for i in range(len(rollouts))]


ONES = np.ones(4, bool)
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5])


def test_a_prompt_read_once_scores_like_every_transcript_alone(tiny_model):
    policy_ = policy(tiny_model, temperature=0.7)
    rollouts = [*group(policy_), two_turns([20, 21], [30, 31, 32], [22])]
    with torch.no_grad():
        for rollout, found in zip(rollouts, scored(policy_, rollouts), strict=True):
            ids = torch.from_numpy(rollout.token_ids)[None]
            alone = language_model.score(policy_.model, ids, torch.ones_like(ids), 0.7)[0][rollout.policy_mask]
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_the_sampler_and_the_trainer_agree_on_log_probabilities(tiny_model):
    policy_ = policy(tiny_model)
    rollouts = group(policy_, copies=3)
    for rollout, found in zip(rollouts, scored(policy_, rollouts), strict=True):
        np.testing.assert_allclose(found.detach().numpy(), rollout.logp_old[rollout.policy_mask], atol=1e-4)


def test_copies_of_a_prompt_are_the_replies_to_repeated_prompts(tiny_model):
    policy_ = policy(tiny_model)
    shared = policy_.sample(PROMPTS, 3, 6, 1)
    repeated = language_model.sample(policy_.model, [p for p in PROMPTS for _ in range(3)], policy_.chat.end_id, 6, seed=1)
    assert [r.token_ids for r in shared] == [r.token_ids for r in repeated]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_gradient_does_not_depend_on_the_minibatch(tiny_model, size, rank):
    gradients = []
    for minibatch in (size, 12):
        policy_ = policy(tiny_model, lora_rank=rank)
        learner = Learner(policy_, GrpoConfig(minibatch_looks=minibatch, target_kl=None, lr=1e-3, grad_clip=1e9))
        metrics = learner.update(group(policy_), ADVANTAGES, ONES, 4)
        assert metrics["grad_norm"] > 0 and metrics["log_ratio_abs_max"] < 1e-5
        gradients.append(torch.cat([p.grad.flatten() for p in learner.parameters if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def test_a_part_of_a_batch_reads_no_more_tokens_than_asked_prompts_included(tiny_model):
    """It counted sampled tokens only, and four prompts of 400 tokens with short labels took 6.5 GB."""
    policy_ = policy(tiny_model)
    rollouts = group(policy_, [[5] * 20, [6] * 20], copies=2, tokens=4)
    rows = policy_.collate(rollouts, np.ones(4), np.ones(4, bool))
    parts = rows.split(torch.arange(len(rows.mask)), 28)
    assert [set(rows.rollout[part].tolist()) for part in parts] == [{0, 1}, {2, 3}]
    assert torch.equal(torch.cat(parts), torch.arange(len(rows.mask)))
    assert len(rows.split(torch.arange(len(rows.mask)), 1)) == 4


def test_only_sampled_tokens_carry_gradient_and_a_context_in_between_is_no_row(tiny_model):
    policy_ = policy(tiny_model)
    rows = policy_.collate([two_turns([20, 21], [30, 31, 32], [22])], np.ones(1), np.ones(1, bool))
    assert rows.column.tolist() == [0, 1, 5] and rows.mask.all()


def test_a_long_reply_weighs_what_a_short_one_weighs(tiny_model):
    policy_ = policy(tiny_model)
    rows = policy_.collate([two_turns([20] * 9, [30], [22]), two_turns([20], [30], [22])], np.ones(2), np.ones(2, bool))
    weights = grpo.look_weights(rows.rollout, rows.mask, 2)
    assert weights[rows.rollout == 0].sum() == pytest.approx(0.5) and weights[rows.rollout == 1].sum() == pytest.approx(0.5)


def test_a_rollout_without_reward_or_advantage_trains_nothing(tiny_model):
    policy_ = policy(tiny_model)
    rollouts = group(policy_)
    rows = policy_.collate(rollouts, np.array([1.0, 0.0, -1.0, 1.0]), np.array([True, True, True, False]))
    assert set(rows.rollout[rows.mask].tolist()) == {0, 2}


def test_updates_raise_what_was_rewarded(tiny_model):
    policy_ = policy(tiny_model, lora_rank=4)
    learner = Learner(policy_, GrpoConfig(lr=1e-2, target_kl=None))
    rollouts = group(policy_)
    before = [x.sum().item() for x in scored(policy_, rollouts)]
    for _ in range(3):
        learner.update(rollouts, ADVANTAGES, ONES, 4)
    after = [x.sum().item() for x in scored(policy_, rollouts)]
    assert after[0] > before[0] and after[1] < before[1]


def test_the_reference_of_an_adapter_is_the_model_without_it_and_costs_no_copy(tiny_model):
    policy_ = policy(tiny_model, lora_rank=2)
    learner = Learner(policy_, GrpoConfig(lr=1e-2, kl_beta=0.1, target_kl=None))
    assert learner.reference is None
    rollouts = group(policy_)
    assert learner.update(rollouts, ADVANTAGES, ONES, 4)["kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert learner.update(rollouts, ADVANTAGES, ONES, 4)["kl_ref"] > 0
    full = Learner(policy(tiny_model), GrpoConfig(lr=1e-2, kl_beta=0.1))
    assert full.reference is not None


def test_a_saved_adapter_is_loaded_merged_and_gets_a_fresh_one(tiny_model, tmp_path):
    trained = policy(tiny_model, lora_rank=2)
    Learner(trained, GrpoConfig(lr=1e-1, target_kl=None)).update(group(trained), ADVANTAGES, ONES, 4)
    trained.save(tmp_path / "adapter")
    again = policy(tmp_path / "adapter", lora_rank=2)
    rollouts = group(trained, seed=3)
    with torch.no_grad():
        for a, b in zip(scored(trained, rollouts), scored(again, rollouts), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        with again.without_adapter():
            torch.testing.assert_close(scored(again, rollouts)[0], scored(trained, rollouts)[0], rtol=1e-4, atol=1e-5)
    again.save(tmp_path / "whole")  # on top of a merged one: the whole model
    whole = policy(tmp_path / "whole")
    torch.testing.assert_close(scored(whole, rollouts)[0], scored(again, rollouts)[0], rtol=1e-4, atol=1e-5)


def test_a_resumed_learner_of_an_adapter_goes_on_bit_equal(tiny_model):
    def make():
        return Learner(policy(tiny_model, lora_rank=2), GrpoConfig(lr=1e-2, kl_beta=0.1))

    whole, first, second = make(), make(), make()
    rollouts = group(whole.policy)
    whole.update(rollouts, ADVANTAGES, ONES, 4), whole.update(rollouts, ADVANTAGES, ONES, 4)
    first.update(rollouts, ADVANTAGES, ONES, 4)
    second.load_state_dict(first.state_dict())
    second.update(rollouts, ADVANTAGES, ONES, 4)
    for a, b in zip(whole.parameters, second.parameters, strict=True):
        assert torch.equal(a, b)


def test_mistakes_are_named(tiny_model, tmp_path):
    with pytest.raises(UserError, match="no layers"):
        policy(tiny_model, lora_rank=2, lora_targets=["query"])
    with pytest.raises(UserError, match="temperature"):
        policy(tiny_model, temperature=0.0)
    with pytest.raises(UserError, match="no language model at"):
        policy(tmp_path / "none")
    transcript = Transcript()
    transcript.add_reply([5], [0.0])
    with pytest.raises(UserError, match="prompt"):
        policy(tiny_model).collate([transcript.finish(0, 0, 1.0, "done")], np.ones(1), np.ones(1, bool))


def test_small_steps_of_an_adapter_are_not_rounded_away_by_16_bits(tiny_model):
    """Weights in bfloat16 do not move at lr 1e-6: an adapter's are kept in float32, and full training is refused."""
    policy_ = policy(tiny_model, lora_rank=2, dtype="bfloat16")
    assert policy_.dtype == torch.bfloat16
    learner = Learner(policy_, GrpoConfig(lr=1e-6, target_kl=None))
    assert {p.dtype for p in learner.parameters} == {torch.float32}
    before = [p.detach().clone() for p in learner.parameters]
    learner.update(group(policy_), ADVANTAGES, ONES, 4)
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))


@pytest.mark.slow
def test_the_packaged_model_takes_a_step_from_its_own_samples():
    policy_ = LanguagePolicy.from_pretrained(language_model.DEFAULT_MODEL, lora_rank=4, template="chatml")
    asked = [policy_.chat.render([{"role": "user", "content": text}]) for text in ("Name a colour.", "Where is the cup?")]
    rollouts = group(policy_, asked, copies=2, tokens=8)
    with torch.no_grad():
        for rollout, found in zip(rollouts, scored(policy_, rollouts), strict=True):
            np.testing.assert_allclose(found.numpy(), rollout.logp_old[rollout.policy_mask], atol=1e-3)
    metrics = Learner(policy_, GrpoConfig(lr=1e-4)).update(rollouts, ADVANTAGES, ONES, 4)
    assert metrics["grad_norm"] > 0 and metrics["log_ratio_abs_max"] < 1e-5 and 0 < metrics["kl_step"] <= 0.05
