"""Episodes as transcripts: what is sampled stays as sampled, who wrote what, one game a group, rewards, limits."""

import numpy as np
import pytest

from text_agents import language_model
from text_agents.alfworld_games import NOTHING_HAPPENS
from text_agents.dialogues import Dialogues, Reply
from text_agents.language_policy import LanguagePolicy
from text_agents.rl import imitate as imitate_module
from text_agents.rl.config import EpisodesSection, TextRlConfig
from text_agents.rl.episodes import GameWorld, describe, roll
from text_agents.rl.imitate import demonstration
from text_agents.rl.train import GameStarts, StepCredit
from text_agents.rwml.prompts import act_label
from vla_wmrl.errors import UserError
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Start


@pytest.fixture(scope="module")
def policy(tiny_model):
    return LanguagePolicy.from_pretrained(str(tiny_model))


class Script:
    """Dialogues that say what they are told: one list of commands a conversation, then "look"."""

    def __init__(self, policy, scripts):
        self.policy, self.left = policy, [list(s) for s in scripts]
        self.said: list[list[int]] = []

    def reply(self, contexts, max_new_tokens, rngs, copies=1, last=False):
        replies = []
        for script in self.left:
            command = script.pop(0) if script else "look"
            ids = self.policy.tokenizer(f"<think>x</think><action>{command}</action>")["input_ids"]
            self.said.append([*ids, self.policy.chat.end_id])
            replies.append(Reply(self.said[-1], [-1.0] * len(self.said[-1]), True))
        return replies

    def keep(self, rows):
        self.left = [self.left[i] for i in rows]


def play(policy, games, scripts, monkeypatch=None, steps=20, room=10**6, **cfg):
    """One group in the first game, a member a script."""
    talk = Script(policy, scripts)
    monkeypatch.setattr(policy, "dialogues", lambda greedy: talk)
    world = GameWorld(games, steps)
    [group] = roll(policy, world, [Start(0, 7)], len(scripts), (0, 0), EpisodesSection(**cfg), 64, room)
    return group, talk


def test_a_group_shares_its_game_and_success_is_the_games(policy, games, monkeypatch):
    (won, lost), _ = play(policy, games, [games[0].walkthrough, ["dance"]], monkeypatch)
    assert won.observations[0] == lost.observations[0] and {won.start.key, lost.start.key} == {(0, 7, 0, 0)}
    assert (won.success, won.reward, won.stop_reason, won.steps) == (True, 1.0, "done", len(games[0].walkthrough))
    assert (lost.success, lost.reward, lost.stop_reason, lost.steps) == (False, 0.0, "turn_limit", 20)
    assert lost.observations[1] == NOTHING_HAPPENS and lost.kinds[:2] == ("invalid", "inefficient")
    told = describe([won, lost])
    assert told["success"] == 0.5 and told["invalid"] == 1 / (20 + won.steps) and told["no_reward"] == 0


def test_sampled_tokens_stay_as_sampled_and_only_they_are_the_policys(policy, games, monkeypatch):
    (episode,), talk = play(policy, games, [games[0].walkthrough], monkeypatch)
    assert [t for said in talk.said for t in said] == episode.token_ids[episode.policy_mask].tolist()
    assert np.isfinite(episode.logp_old[episode.policy_mask]).all() and np.isnan(episode.logp_old[~episode.policy_mask]).all()
    whole = policy.tokenizer.decode(episode.token_ids)
    for text in episode.observations[1:-1]:
        assert text in whole
    assert episode.observations[-1] not in whole.rpartition("<|im_start|>")[2]  # nothing is read after the last reply
    assert set(episode.turn_id[episode.policy_mask]) == set(range(episode.steps))
    context = policy.tokenizer.decode(episode.token_ids[~episode.policy_mask])
    assert "<action>go" not in context and episode.valid


def test_invalid_commands_cost_their_share(policy, games, monkeypatch):
    (bad, good), _ = play(policy, games, [["a", "b"], ["look"]], monkeypatch, steps=4, invalid_penalty=0.5)
    assert (bad.reward, good.reward) == (-0.25, 0.0)


def test_an_episode_that_outgrows_the_context_ends_and_says_so(policy, games, monkeypatch):
    (whole,), _ = play(policy, games, [["look"]], monkeypatch, steps=3)
    before_last_reply = np.flatnonzero(whole.policy_mask & (whole.turn_id == 2))[0]
    (fits,), _ = play(policy, games, [["look"]], monkeypatch, steps=3, room=int(before_last_reply))
    (cut,), _ = play(policy, games, [["look"]], monkeypatch, steps=3, room=int(before_last_reply) - 1)
    assert (fits.stop_reason, fits.steps) == ("turn_limit", 3) and (cut.stop_reason, cut.steps) == ("token_limit", 2)
    assert cut.reward == 0.0 and cut.policy_mask[-1]
    with pytest.raises(UserError, match="first prompt"):
        play(policy, games, [["look"]], monkeypatch, room=9)


def test_conversations_turn_by_turn_say_what_reading_everything_at_once_says(policy):
    talk, rngs = Dialogues(policy.model, policy.chat.end_id), lambda turn, rows: [generator((turn, row)) for row in rows]
    first = talk.reply([[5, 6, 7, 8], [11, 12]], 5, rngs(0, range(4)), copies=2)
    assert len({tuple(r.token_ids) for r in first}) > 1
    talk.keep([1, 2])
    second = talk.reply([[20, 21, 22], [30]], 5, rngs(1, (1, 2)))
    for row, prompt, more, reply in zip((1, 2), ([5, 6, 7, 8], [11, 12]), ([20, 21, 22], [30]), second, strict=True):
        read = [*prompt, *first[row].token_ids, *more]
        [alone] = Dialogues(policy.model, policy.chat.end_id).reply([read], 5, rngs(1, [row]), last=True)
        assert alone.token_ids == reply.token_ids
        np.testing.assert_allclose(alone.logp, reply.logp, atol=1e-4)


def test_an_episode_depends_on_its_key_and_not_on_what_runs_beside_it(policy, games):
    starts, cfg = [Start(0, 3), Start(1, 4)], {"max_steps": 2}

    def sampled(starts, batch, seed=(5, 6)):
        world = GameWorld(games, 2)
        return roll(policy, world, starts, 2, seed, EpisodesSection(batch=batch, **cfg), 6, 2000)

    together, alone = sampled(starts, 64), sampled(starts[1:], 1)
    for a, b in zip(together[1], alone[0], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.commands == b.commands
    assert together[0][0].commands != together[0][1].commands
    assert sampled(starts[:1], 64, (5, 7))[0][0].commands != together[0][0].commands


def test_the_samplers_log_probabilities_are_the_trainers(policy, games):
    import torch

    [group] = roll(policy, GameWorld(games, 3), [Start(0, 3)], 2, (5, 6), EpisodesSection(), 6, 2000)
    rows = policy.collate(group, np.ones(2), np.ones(2, bool))
    with torch.no_grad():
        found = policy.log_prob(*rows.rows(torch.arange(len(rows.mask))))
    expected = np.concatenate([r.logp_old[r.policy_mask] for r in group])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


def test_advantages_of_turns_reach_their_tokens(policy, games, monkeypatch):
    group, _ = play(policy, games, [["look", "inventory"], ["look", "help"]], monkeypatch, steps=2)
    rows = policy.collate(group, [np.array([1.0, 0.0]), np.zeros(2)], np.ones(2, bool))
    turns = group[0].turn_id[group[0].policy_mask]
    assert rows.advantage[rows.rollout == 0].tolist() == [1.0 - t for t in turns]
    assert rows.mask[rows.rollout == 0].all() and not rows.mask[rows.rollout == 1].any()  # a turn of 0 still counts


def test_the_credit_of_a_turn_compares_members_that_saw_the_same(policy, games, monkeypatch):
    group, _ = play(policy, games, [games[0].walkthrough, ["dance"]], monkeypatch, steps=20)
    first, second = StepCredit(0.5, 1.0, "none")(group, np.array([1.0, 0.0]))
    assert first[0] == 0.25 and second[0] == -0.25  # both saw the opening
    assert len(first) == group[0].steps and not first[1:].any() and not second[1:].any()


def test_every_game_begins_a_group_once_a_pass_and_no_two_groups_share_a_key():
    starts = GameStarts(5, seed=1)
    drawn = [s for step in range(5) for s in starts.draw(step, 2)]
    assert sorted(s.task_id for s in drawn[:5]) == sorted(s.task_id for s in drawn[5:]) == list(range(5))
    assert len({s.init_id for s in drawn}) == 10 and starts.draw(3, 2) == starts.draw(3, 2)


def test_sample_is_the_first_turn_of_a_conversation(policy):
    prompts = [[5, 6, 7], [9]]
    rngs = [np.random.default_rng([3, i]) for i in range(2)]
    first = Dialogues(policy.model, policy.chat.end_id).reply(prompts, 6, rngs)
    assert first == language_model.sample(policy.model, prompts, policy.chat.end_id, 6, seed=3)


def test_a_demonstration_is_the_walkthrough_said_by_the_policy(policy, games):
    cfg = TextRlConfig()
    cfg.model.max_prompt_tokens = 10**6
    rollout = demonstration(policy, games, 1, cfg)
    assert rollout.success and list(rollout.commands) == games[1].walkthrough and rollout.malformed == 0
    said = policy.chat.decode(rollout.token_ids[rollout.policy_mask].tolist())
    assert said == "".join(act_label(command) for command in games[1].walkthrough)


@pytest.mark.parametrize("imitate", ["commands", "everything"])
def test_slips_of_a_demonstration_are_read_and_not_imitated(policy, games, monkeypatch, imitate):
    """Imitated, they would be taught."""
    cfg = TextRlConfig(demonstrations="slipping", imitate=imitate)
    cfg.episodes.max_steps, cfg.model.max_prompt_tokens = 30, 10**6
    plan = ["dance", *games[1].walkthrough]
    monkeypatch.setattr(imitate_module, "slipping", lambda game, rng, limit: (plan, [0]))
    rollout = demonstration(policy, games, 1, cfg)
    assert rollout.success and list(rollout.commands) == plan
    taught = policy.chat.decode(rollout.token_ids[rollout.policy_mask].tolist())
    assert act_label("dance") not in taught and "dance" in policy.chat.decode(rollout.token_ids.tolist())
    assert all(act_label(command) in taught for command in games[1].walkthrough)
    assert (rollout.observations[1] in taught) == (imitate == "everything")
