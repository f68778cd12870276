"""The small policy over the grammar: samples what the grammar allows, scores what it sampled, sees what became of it."""

import numpy as np
import pytest
import torch

from text_agents.autoresearch import vocabulary
from text_agents.autoresearch.episode import Trajectory
from text_agents.autoresearch.execute import Executed
from text_agents.autoresearch.pipeline import COMMON, PARAMS, choices, from_choices, sample, to_choices
from text_agents.autoresearch.policy_agent import PolicyAgent, tokens_of
from text_agents.autoresearch.spec_policy import FACTS, INPUTS, SpecPolicy, State
from vla_wmrl.errors import UserError

KINDS = ("classification", "regression")


def states(n=6):
    rng = np.random.default_rng(0)
    return [State(rng.normal(size=FACTS).astype(np.float32), KINDS[i % 2]) for i in range(n)]


def policy(seed=0):
    made = SpecPolicy(16, seed)
    with torch.no_grad():
        made.net[2].weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return made


def uniforms(n, seed=0):
    return np.random.default_rng(seed).random((n, vocabulary.MAX_CHOICES))


def test_every_specification_has_its_tokens_and_back():
    assert len(vocabulary.INDEX) == len(vocabulary.TOKENS), "two values of a slot share a token"
    rng = np.random.default_rng(0)
    for kind in KINDS:
        for _ in range(50):
            spec, chosen = sample(kind, rng), []
            for value in to_choices(spec):
                slot, options = vocabulary.open_slot(kind, chosen)
                assert value in [vocabulary.TOKENS[i][1] for i in options]
                assert {vocabulary.TOKENS[i][0] for i in options} == {vocabulary.SLOTS[slot]}
                chosen.append(value)
            assert vocabulary.open_slot(kind, chosen) is None and len(chosen) <= vocabulary.MAX_CHOICES
    assert list(choices("regression"))[: len(COMMON)] == list(COMMON), "the model must follow the common slots"
    assert set(PARAMS) == set(vocabulary.MODELS)


def test_samples_obey_the_grammar_and_score_again_as_they_were_sampled():
    made, seen = policy(), states()
    drawn = made.sample(seen, uniforms(len(seen)))
    for state, turn in zip(seen, drawn, strict=True):
        spec = from_choices(state.kind, turn.values)
        assert spec.kind == state.kind and turn.allowed[np.arange(len(turn.tokens)), turn.tokens].all()
        assert turn.x.shape == (len(turn.tokens), INPUTS)
        logp = made.log_prob(*(torch.from_numpy(a) for a in (turn.x, turn.allowed, turn.tokens)))
        assert torch.isfinite(logp).all() and (logp < 0).any()


def test_frequencies_follow_the_probabilities():
    made, state = policy(), states(1)
    drawn = made.sample(state * 4000, uniforms(4000))
    row = drawn[0]
    logits = made.net(torch.from_numpy(row.x[:1])).masked_fill(~torch.from_numpy(row.allowed[:1]), -torch.inf)
    expected = torch.softmax(logits, 1)[0].detach().numpy()
    found = np.bincount([d.tokens[0] for d in drawn], minlength=len(expected)) / 4000
    np.testing.assert_allclose(found, expected, atol=0.04)


def test_a_new_policy_is_uniform_and_temperature_zero_is_the_likeliest():
    fresh = SpecPolicy(8).sample(states(1) * 2000, uniforms(2000))
    first = np.bincount([d.tokens[0] for d in fresh])[:3] / 2000
    np.testing.assert_allclose(first, 1 / 3, atol=0.05)
    greedy = policy().sample(states(1) * 5, uniforms(5), temperature=0.0)
    assert len({tuple(d.tokens) for d in greedy}) == 1


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Twins in the world model are sampled in other batches than the real ones."""
    made, seen, u = policy(), states(), uniforms(6)
    together = made.sample(seen, u)
    for i in (0, 3):
        alone = made.sample([seen[i]], u[i : i + 1])[0]
        assert alone.values == together[i].values
        np.testing.assert_array_equal(alone.x, together[i].x)


def test_what_became_of_a_turn_reaches_the_next_one():
    state = states(1)[0]
    before = state.vector()
    state.see((3, 40), "runtime_error", float("nan"), 0.1)
    state.see((5, 41), "valid", 0.6, 0.8)
    state.see((7, 42), "ungraded", float("nan"), float("nan"))
    after = state.vector()
    assert (state.turn, state.best, state.best_rank, state.rank) == (3, (5, 41), 0.6, 0.0)
    assert np.isfinite(after).all() and not np.array_equal(before, after)


def test_rollouts_without_advantage_or_reward_carry_no_gradient():
    made = policy()
    turns = made.sample(states(3), uniforms(3))
    batch = made.collate(turns, np.array([0.5, 0.0, 0.7]), np.array([True, True, False]))
    lengths = [len(t.tokens) for t in turns]
    assert batch.mask.tolist() == [True] * lengths[0] + [False] * (lengths[1] + lengths[2])
    assert batch.rollout.tolist() == np.repeat(np.arange(3), lengths).tolist()
    parts = batch.split(torch.nonzero(batch.mask).flatten(), 4)
    assert sum(len(p) for p in parts) == lengths[0]
    assert made.log_prob(*batch.rows(parts[0])).requires_grad


def test_as_an_agent_it_has_seen_what_its_rollouts_would_have_seen():
    state, rng = states(2)[1], np.random.default_rng(3)
    history = Trajectory("t", 1)
    for status, rank, reward in (("valid", 0.4, 0.7), ("runtime_error", float("nan"), 0.1)):
        spec = sample("regression", rng)
        tokens = tokens_of(spec.to_json(), "regression")
        assert [vocabulary.TOKENS[i][1] for i in tokens] == to_choices(spec)
        history.texts.append(spec.to_json())
        history.turns.append(Executed(status, reward, "", "", rank=rank))
        state.see(tokens, status, rank, reward)
    agent = PolicyAgent(policy(), {"t": state.task}, seed=5)
    np.testing.assert_array_equal(agent.state(history, "regression").vector(), state.vector())
    assert agent.act("", [history], "regression") == agent.act("", [Trajectory("t", 0), history], "regression")[1:]


def test_a_saved_policy_is_the_same_and_a_foreign_folder_is_one_clear_line(tmp_path):
    made = policy()
    made.save(tmp_path / "policy")
    again = SpecPolicy.load(tmp_path / "policy")
    for (_, a), (_, b) in zip(made.parameters_to_train(), again.parameters_to_train(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match="holds no policy"):
        SpecPolicy.load(tmp_path)
