"""A server samples: token ids as they were sampled, of the weights that train, or the run ends with one line.

The server of these tests speaks vLLM's protocol (completions with token ids, adapters by name) around a real, tiny model.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from text_agents.language_model import sample
from text_agents.language_policy import LanguagePolicy
from text_agents.rl import imagine
from text_agents.rwml import prompts
from text_agents.served import Engine
from vla_wmrl import cli
from vla_wmrl.errors import UserError
from vla_wmrl.tracking import read_jsonl


@pytest.fixture
def server(tiny_model):
    """`change` falsifies an answer, `loaded` are the adapters that are there, `events` what was asked, in order."""
    state = SimpleNamespace(loaded={}, events=[], change=lambda choice: choice, stale=False)
    state.loaded["base"] = LanguagePolicy.from_pretrained(str(tiny_model))
    lock = threading.Lock()

    def complete(asked):
        with lock:
            policy = state.loaded["base" if state.stale else asked["model"]]
            [reply] = sample(
                policy.model,
                [asked["prompt"]],
                asked["stop_token_ids"][0],
                asked["max_tokens"],
                asked["temperature"],
                asked["seed"],
            )
        choice = {
            "token_ids": reply.token_ids, "logprobs": {"token_logprobs": reply.logp},
            "finish_reason": "stop" if reply.ended else "length",
        }  # fmt: skip
        return {"choices": [state.change(choice)]}

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, content):
            body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self._reply({"data": [{"id": "base"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            what = self.path.rpartition("/")[2]
            state.events.append((what, asked.get("lora_name") or asked.get("model")))
            if what == "load_lora_adapter":
                state.loaded[asked["lora_name"]] = LanguagePolicy.from_pretrained(asked["lora_path"])
                self._reply(f"Success: LoRA adapter '{asked['lora_name']}' added successfully.")  # no JSON, as vLLM has it
            elif what == "unload_lora_adapter":
                del state.loaded[asked["lora_name"]]
                self._reply("Success")
            else:
                assert asked["return_token_ids"] and asked["top_p"] == 1.0
                self._reply(complete(asked))

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    yield state
    http.shutdown()
    http.server_close()


def served(tiny_model, server, tmp_path, **more):
    policy = LanguagePolicy.from_pretrained(str(tiny_model), lora_rank=2)
    policy.serve(Engine(server.url, tmp_path / "served", **more))
    return policy


def test_conversations_go_on_as_token_ids_and_their_log_probabilities_are_ours(tiny_model, server, tmp_path):
    import torch

    from text_agents.language_model import score

    policy = served(tiny_model, server, tmp_path)
    talk = policy.dialogues()
    contexts, rngs = [[5, 6, 7], [8, 9]], [np.random.default_rng(i) for i in range(4)]
    first = talk.reply(contexts, 6, rngs, copies=2)
    talk.keep([1, 2])
    second = talk.reply([[11], [12, 13]], 4, rngs[:2])
    whole = [*contexts[0], *first[1].token_ids, 11, *second[0].token_ids]
    ids = torch.tensor([whole])
    logp = score(policy.model, ids, torch.ones_like(ids))[0].detach().numpy()
    at = len(contexts[0])
    np.testing.assert_allclose(logp[at : at + len(first[1].token_ids)], first[1].logp, atol=1e-4)
    np.testing.assert_allclose(logp[len(whole) - len(second[0].token_ids) :], second[0].logp, atol=1e-4)
    assert len({tuple(r.token_ids) for r in first}) > 1  # copies have seeds of their own
    assert policy.engine.gap < 1e-4


def test_the_server_gets_new_weights_once_and_loses_the_old(tiny_model, server, tmp_path):
    policy = served(tiny_model, server, tmp_path)
    for _ in range(2):
        policy.dialogues()
    first = policy.engine.name
    for _, p in policy.parameters_to_train():
        p.data += 0.5
    policy.sample([[5, 6, 7]], 2, 4)  # checked: other weights than the base's
    assert [e[0] for e in server.events[:3]] == ["load_lora_adapter", "load_lora_adapter", "unload_lora_adapter"]
    assert set(server.loaded) == {"base", policy.engine.name} and policy.engine.name != first
    assert [p.name for p in (tmp_path / "served").iterdir()] == [policy.engine.name]


def test_a_server_that_samples_from_other_weights_is_found_out(tiny_model, server, tmp_path):
    policy = served(tiny_model, server, tmp_path)
    for _, p in policy.parameters_to_train():
        p.data += 0.5
    server.stale = True
    with pytest.raises(UserError, match="differ from this policy's by"):
        policy.sample([[5, 6, 7]], 1, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c | {"token_ids": None}, "no token ids"),
        (lambda c: c | {"logprobs": None}, "no token ids"),
        (lambda c: c | {"token_ids": c["token_ids"][:-1]}, "no token ids"),
        (
            lambda c: c | {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"},
            "leaves out the token",
        ),
    ],
)
def test_an_answer_that_cannot_be_trained_on_ends_the_run(change, words, tiny_model, server, tmp_path):
    server.change = change
    with pytest.raises(UserError, match=words):
        served(tiny_model, server, tmp_path).sample([[5, 6, 7]], 1, 4)


def test_a_policy_whose_weights_the_server_cannot_get_is_refused(tiny_model, server, tmp_path):
    whole = LanguagePolicy.from_pretrained(str(tiny_model))
    with pytest.raises(UserError, match=r"lora\.rank"):
        whole.serve(Engine(server.url, tmp_path))
    LanguagePolicy.from_pretrained(str(tiny_model), lora_rank=2).save(tmp_path / "earlier")
    on = LanguagePolicy.from_pretrained(str(tmp_path / "earlier"), lora_rank=2)
    with pytest.raises(UserError, match="adapter merged"):
        on.serve(Engine(server.url, tmp_path))


def test_policy_rl_runs_on_a_server(tiny_model, games_folder, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "command_in", lambda output: ("look" if len(output) % 2 else "dance", True))
    monkeypatch.setattr(imagine, "predicted_state", lambda answer: "Nothing happens.")
    run = tmp_path / "run"
    argv = [
        "text", "rl", f"--games.data={games_folder}", f"--model.path={tiny_model}", "--model.max_new_tokens=4",
        "--model.max_prompt_tokens=1900", "--games.limit=3", "--episodes.max_steps=2", "--episodes.invalid_penalty=1",
        "--episodes.list_commands=false", "--grpo.n_groups=2", "--grpo.group_size=3", "--grpo.lr=1e-3", "--lora.rank=2",
        "--eval.before=false", "--eval.splits=valid_unseen", "--eval.limit=2", "--eval.max_steps=2", "--steps=2",
    ]  # fmt: skip
    assert cli.main([*argv, f"--rollouts.url={server.url}", f"--output_dir={run}"]) == 0
    rows = read_jsonl(run / "metrics.jsonl")
    assert all(row["rollout/logp_gap"] < 1e-4 for row in rows) and any(row["loss/grad_norm"] > 0 for row in rows)
    names = [name for what, name in server.events if what == "completions"]
    assert len(set(names)) == 3 and "base" not in names  # first weights, after one update, after two (evaluation)
    assert len(read_jsonl(run / "eval_after.jsonl")) == 2
    assert cli.main([*argv, "--rollouts.url=nowhere", f"--output_dir={tmp_path / 'no'}"]) == 2
    assert "neither http" in capsys.readouterr().err and not Path(tmp_path / "no").exists()
