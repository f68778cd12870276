"""Language backends: a server of OpenAI's protocol and its failures, a local model, and an agent over either."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from text_agents.autoresearch import backends
from text_agents.autoresearch.chat_agent import ChatAgent
from text_agents.autoresearch.episode import Trajectory
from text_agents.autoresearch.execute import Executed
from vla_wmrl.errors import UserError
from vla_wmrl.world_model.language import SCHEMA, Case, LanguageWorldModel


@pytest.fixture
def server():
    """A server that answers with `answer(request)` and remembers requests."""
    state = SimpleNamespace(asked=[], answer=lambda content: {"choices": [{"message": {"content": "yes"}}]}, code=200)

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, content):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(state.code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self._reply({"data": [{"id": "some-model"}]})

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append((self.path, self.headers.get("Authorization"), content))
            self._reply(state.answer(content))

        def log_message(self, *args):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    yield state
    http.shutdown()
    http.server_close()


def test_a_server_is_asked_for_its_model_with_the_schema_and_the_key(server):
    backend = backends.ServerBackend(server.url, key="k")
    assert backend.generate(["a", "b"], SCHEMA, 7) == ["yes", "yes"]
    path, authorisation, content = server.asked[0]
    assert (path, authorisation) == ("/v1/chat/completions", "Bearer k")
    assert (content["model"], content["max_tokens"]) == ("some-model", 7)
    assert content["response_format"]["json_schema"]["schema"] == SCHEMA


def test_an_answer_without_content_is_a_broken_prediction_not_a_crash(server):
    server.answer = lambda content: {"choices": [{"message": {"content": None}}]}
    world = LanguageWorldModel(backends.ServerBackend(server.url))
    assert world.predict([Case("t", "d", "i", "b", "x = 1")]) == [None]
    assert (world.counts_["broken"], world.counts_["retried"], world.counts_["missing"]) == (2, 1, 1)


def test_a_server_that_fails_is_one_clear_line(server):
    backend = backends.ServerBackend(server.url)
    server.code = 503
    with pytest.raises(UserError, match="answers 503"):
        backend.generate(["a"], None, 7)
    server.code, server.answer = 200, lambda content: b"<html>"
    with pytest.raises(UserError, match="does not answer as a server"):
        backend.generate(["a"], None, 7)
    with pytest.raises(UserError, match="does not answer as a server"):
        backends.ServerBackend("http://127.0.0.1:9/v1")


def trajectory(n):
    turns = [Executed("valid", 0.7, f"feedback {i}", "") for i in range(n)]
    return Trajectory("t", 0, [f"text {i}" for i in range(n)], turns)


def test_a_conversation_alternates_and_loses_its_oldest_turns_first():
    model = SimpleNamespace(context_tokens=100, count_tokens=lambda text: len(text.split()), asked=[])
    model.chat = lambda conversations, max_tokens: model.asked.extend(conversations) or ["ok"] * len(conversations)
    agent = ChatAgent(model, max_tokens=60)
    assert agent.act("the task", [trajectory(0), trajectory(2)], "regression") == ["ok", "ok"]
    assert [m["role"] for m in model.asked[1]] == ["user", "assistant", "user", "assistant", "user"]
    assert "feedback 1" in model.asked[1][-1]["content"]
    model.context_tokens = 80
    agent.act("the task", [trajectory(2)], "regression")
    assert [m["content"] for m in model.asked[2]][1] == "text 1" and agent.counts_["left_out"] == 1
    assert agent.act("a task " * 50, [trajectory(0), trajectory(0)], "regression") == ["", ""]
    assert agent.counts_["too_long"] == 2


def test_a_local_model_scores_choices_as_the_beginning_of_its_reply(monkeypatch):
    """With a stand-in for weights: which tokens are scored, and after which."""
    import numpy as np
    import torch

    class Tokens:
        eos_token_id = 0

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return "".join(m["content"] for m in messages) + "|"

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(c) % 128 for c in text]}

        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    class Next:
        """Likes the character after the last one."""

        config = SimpleNamespace(max_position_embeddings=512)

        def __call__(self, ids):
            return SimpleNamespace(logits=torch.nn.functional.one_hot((ids + 1) % 128, 128).float() * 5)

    monkeypatch.setattr("text_agents.language_model.load_model", lambda path, device: (Next(), Tokens()))
    backend = backends.TransformersBackend()
    assert backend.context_tokens == 512 and backend.count_tokens("abc") == 4
    logp = backend.choice_logprobs(['text\n{"status": "a'], ["bcd", "dcb"])
    assert logp.shape == (1, 2) and logp[0, 0] > logp[0, 1] and np.isfinite(logp).all()
    assert backends._begun_reply('text\n{"status": "') == ("text\n", '{"status": "')
    assert backends._begun_reply("text") == ("text", "")
