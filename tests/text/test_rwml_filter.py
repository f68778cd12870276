"""`vla-wmrl text rwml` with the too-easy filter and with judges, on triplets of real ALFWorld games; resumed bit-equal."""

import json
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from text_agents import alfworld
from text_agents.alfworld_games import NOTHING_HAPPENS
from text_agents.language_policy import LanguagePolicy
from text_agents.rwml import collect, easy_run, rewards, triplets
from vla_wmrl import cli
from vla_wmrl.tracking import read_jsonl


def of(games, agent):
    return [t for game in games for t in collect.of_alfworld(game, alfworld.play(game, agent, max_steps=4), 0)]


def half(seen, done, rng):
    """Every other command does nothing, which is soon learnt."""
    return "dance" if len(done) % 2 else alfworld.random_agent(seen, done, rng)


@pytest.fixture(scope="module")
def data(games, tmp_path_factory):
    """Episodes in six real games."""
    folder = tmp_path_factory.mktemp("triplets")
    triplets.write(folder, {"train": of(games[:3], half), "val": of(games[3:], half)}, {"env": "alfworld"})
    return folder


@pytest.fixture
def argv(data, tiny_model):
    return [
        "text", "rwml", f"--triplets={data}", f"--model.path={tiny_model}", "--model.max_new_tokens=6", "--history=0",
        "--grpo.n_groups=2", "--grpo.group_size=3", "--grpo.lr=1e-3", "--lora.rank=2", "--save_every=1", "--eval.limit=2",
        "--eval.before=false", "--steps=2",
    ]  # fmt: skip


def without(argv, *keys):
    return [a for a in argv if a.split("=")[0] not in keys]


def rows(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(folder / "metrics.jsonl")]


def model_bytes(folder):
    return (folder / "model/adapter_model.safetensors").read_bytes()


FILTER = ["--easy.enabled", "--easy.samples=2", "--easy.passes=1"]


@pytest.fixture
def graded(monkeypatch):
    """Right is what does nothing, and else every other length: some are too easy, and groups have contrast."""

    def score(outputs, true, *_):
        return np.array([float(state == NOTHING_HAPPENS or len(o) % 2) for o, state in zip(outputs, true, strict=True)])

    monkeypatch.setattr(rewards, "rewards", score)


def test_what_a_trained_copy_always_predicts_is_left_out_and_the_policy_is_as_it_was(argv, games, tmp_path):
    """No stand-ins: a random model learns of situations in which nothing happens to say so. It does not generalise, so the
    copy's tasks are the same situations under other names."""
    data, train = tmp_path / "triplets", of(games[:3], half)
    nothing = [t for t in train if t.next_state == NOTHING_HAPPENS]
    val = [replace(t, task_id=f"again {t.task_id}") for t in nothing]
    triplets.write(data, {"train": train, "val": val}, {"env": "alfworld"})
    learnt = [f"--triplets={data}", "--model.max_new_tokens=64", "--lora.rank=0", "--easy.enabled", "--easy.samples=2"]
    learnt += ["--easy.passes=130", "--easy.lr=3e-3", "--easy.keep=0", "--grpo.n_groups=6", "--eval.after=false"]
    argv = [*without(argv, *(a.split("=")[0] for a in learnt)), *learnt, f"--output_dir={tmp_path / 'run'}"]
    assert cli.main(argv) == 0
    told = json.loads((tmp_path / "run" / "easy.json").read_text())
    assert told["nll_last"] < told["nll_first"]
    judged = read_jsonl(tmp_path / "run" / "easy.jsonl")
    flagged = {row["id"] for row in judged if min(row["rewards"]) == 1.0}
    assert len(judged) == told["n"] == len(train) == 12 and flagged and flagged <= {t.id for t in nothing}
    assert told["flagged"] == pytest.approx(told["dropped"]) == len(flagged) / 12 and told["kept"] == 12 - len(flagged)
    first = rows(tmp_path / "run")[0]
    assert first["easy/flagged"] == told["flagged"] and first["reply/tagged"] == 0.0  # the policy itself was not taught


def test_a_filtered_run_trains_on_what_is_kept_alone_and_resumes_bit_equal(argv, tmp_path, graded, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*argv, *FILTER, "--easy.keep=0"]
    assert cli.main([*argv, f"--output_dir={whole}"]) == 0
    told = json.loads((whole / "easy.json").read_text())
    data = triplets.read(next(a for a in argv if "--triplets" in a).split("=")[1], "train")
    nothing = {t.id for t in data if t.next_state == NOTHING_HAPPENS}
    flagged = {row["id"] for row in read_jsonl(whole / "easy.jsonl") if min(row["rewards"]) == 1.0}
    assert nothing <= flagged and told["flagged"] == len(flagged) / len(data) and told["kept"] == len(data) - len(flagged)
    # stopped in the middle of the filter, then after one update
    evaluated = LanguagePolicy.sample
    calls = []

    def stops(self, *args, **more):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return evaluated(self, *args, **more)

    monkeypatch.setattr(LanguagePolicy, "sample", stops)
    assert cli.main([*argv, "--eval.batch=5", f"--output_dir={parts}"]) == 130
    monkeypatch.setattr(LanguagePolicy, "sample", evaluated)
    assert len(read_jsonl(parts / "easy.jsonl")) == 5
    one = without(argv, "--steps")
    assert cli.main([*one, "--steps=1", "--eval.after=false", f"--output_dir={parts}", "--resume"]) == 0
    assert read_jsonl(parts / "easy.jsonl") == read_jsonl(whole / "easy.jsonl")
    assert cli.main([*argv, "--eval.after=true", f"--output_dir={parts}", "--resume"]) == 0
    assert rows(parts) == rows(whole) and len(rows(whole)) == 2 and model_bytes(parts) == model_bytes(whole)
    assert json.loads((parts / "easy.json").read_text()) == told
    assert any(row["loss/grad_norm"] > 0 for row in rows(whole) if "loss/grad_norm" in row)


def test_what_is_lent_to_the_copy_comes_back_bit_for_bit(tiny_model, data):
    from text_agents.config import RwmlConfig

    policy, cfg = LanguagePolicy.from_pretrained(str(tiny_model), lora_rank=2), RwmlConfig(history=0)
    cfg.grpo.n_groups, cfg.easy.lr = 4, 1e-2
    before = {name: p.detach().clone() for name, p in policy.parameters_to_train()}
    with easy_run.lent(policy):
        assert len(easy_run._train_copy(cfg, policy, triplets.read(data, "val"))) == 6
        assert any(not (p == before[name]).all() for name, p in policy.parameters_to_train())
    assert all((p == before[name]).all() and p.grad is None for name, p in policy.parameters_to_train())


@pytest.fixture
def server():
    """A server of OpenAI's protocol. Its judge scores by the letters, and refuses now and then."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def _send(self, content, code=200):
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self._send({"data": [{"id": "judge"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            predicted = re.search("Predicted:\n(.*)\nActual:", body["messages"][0]["content"], re.S)[1]
            number = sum(predicted.encode())
            said = json.dumps({"analysis": "", "score": number % 11 / 10}) if number % 4 else "I would rather not."
            self._send({"choices": [{"message": {"content": said}}]})

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/v1", asked
    running.shutdown()


@pytest.fixture
def talkative(monkeypatch):
    """A random model writes no tags: whatever it says is its prediction."""
    from text_agents.rwml import judges

    monkeypatch.setattr(judges, "predicted_state", lambda output: output or None)


@pytest.mark.parametrize("kind", ["judge_binary", "judge_real"])
def test_a_judged_run_leaves_out_what_got_no_score_and_resumes_bit_equal(kind, argv, tmp_path, server, talkative):
    url, asked = server
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*argv, f"--reward.kind={kind}", f"--reward.judge.url={url}"]
    assert cli.main([*argv, f"--output_dir={whole}"]) == 0
    assert cli.main([*without(argv, "--steps"), "--steps=1", f"--output_dir={parts}"]) == 0
    assert cli.main([*argv, f"--output_dir={parts}", "--resume"]) == 0
    assert rows(parts) == rows(whole) and model_bytes(parts) == model_bytes(whole)
    missing = [row["reward/missing"] for row in rows(whole)]
    assert 0 < max(missing) < 1 and any(row.get("loss/grad_norm", 0) > 0 for row in rows(whole))
    assert asked[0]["temperature"] == 0.0 and asked[0]["response_format"]["type"] == "json_schema"
    scale = "being 0 or 1" if kind == "judge_binary" else "a number from 0 to 1"
    assert scale in asked[-1]["messages"][0]["content"]


def test_a_local_model_that_gives_no_scores_judges_nothing_and_nothing_is_learnt(argv, tmp_path, tiny_model, talkative):
    local = ["--reward.kind=judge_real", f"--reward.judge.model={tiny_model}", "--reward.judge.max_new_tokens=4"]
    argv = [*without(argv, "--steps"), "--steps=1", "--eval.after=false", *local]
    assert cli.main([*argv, f"--output_dir={tmp_path}"]) == 0
    [row] = rows(tmp_path)
    assert row["reward/missing"] == 1.0 and row["reward/mean"] is None and row["loss/skipped"] == 1.0


@pytest.mark.parametrize("kind", ["embedding", "rouge"])
def test_other_rewards_by_rule_run(kind, argv, tmp_path):
    argv = [*without(argv, "--steps"), "--steps=1", "--eval.after=false", f"--reward.kind={kind}"]
    assert cli.main([*argv, f"--output_dir={tmp_path}"]) == 0
    assert rows(tmp_path)[0]["reward/missing"] == 0.0


def test_the_named_reward_decides_how_a_tools_answer_is_scored():
    from text_agents.rwml.scoring import by_rule

    embedder = rewards.Embedder()
    [tool] = triplets.from_episode("tau2-retail", "t", "", 0, ["f"], ["Hello.", "Order was cancelled."], kinds=["tool"])
    said = ["<next_state>The order was cancelled.</next_state>"]
    found = {kind: float(by_rule(kind, embedder, 0.2, 0.4)(said, [tool])[0]) for kind in ("rwml", "embedding", "rouge")}
    assert found["embedding"] == 1.0 and found["rwml"] == found["rouge"] == 0.8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--reward.kind=judge"], "reward.kind"),
        (["--reward.kind=judge_real", "--reward.judge.url=http://127.0.0.1:9/v1"], "127.0.0.1:9"),
        (["--reward.kind=judge_real", "--reward.judge.url=http://127.0.0.1:9/v1", "--reward.judge.model=m"], "does not answer"),
        (["--reward.kind=judge_real", "--reward.judge.model=no/such"], "no language model at"),
        (["--easy.enabled", "--easy.keep=2"], "outside 0..1"),
        (["--easy.enabled", "--easy.samples=0"], "at least 1"),
        (["--easy.enabled", "--easy.tau=0"], "must lie between 0 and 2"),
        (["--easy.kept=0.1"], "did you mean easy.keep"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(change, words, argv, tmp_path, capsys):
    assert cli.main([*argv, *change, f"--output_dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: ") and words in err
    assert not (tmp_path / "run").exists()


def test_a_filter_that_leaves_nothing_says_so(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rewards, "rewards", lambda outputs, *_: np.ones(len(outputs)))
    assert cli.main([*argv, *FILTER, "--easy.keep=0", f"--output_dir={tmp_path / 'run'}"]) == 2
    assert "are too easy" in capsys.readouterr().err
