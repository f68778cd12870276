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


def test_one_prompt_beyond_a_servers_context_does_not_end_the_others(server):
    from text_agents.autoresearch.commands import shortened

    backend = backends.ServerBackend(server.url, parallel=1)

    def answer(content):
        server.code = 400 if "long" in content["messages"][0]["content"] else 200
        refusal = {"error": {"message": "This model's maximum context length is 4096 tokens"}}
        return refusal if server.code == 400 else {"choices": [{"message": {"content": "yes"}}]}

    server.answer = answer
    assert backend.chat([[{"role": "user", "content": c}] for c in ("short", "long", "short")], 7) == ["yes", "", "yes"]
    assert shortened(ChatAgent(backend)) == ["1 turns are malformed: the server refused the conversation as too long"]
    server.answer = lambda content: (setattr(server, "code", 400), {"error": "no such model"})[1]
    with pytest.raises(UserError, match="answers 400"):
        backend.chat([[{"role": "user", "content": "a"}]], 7)


def test_a_servers_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k2")
    backends.language_backend("name", server.url).generate(["a"], None, 7)
    assert server.asked[0][1] == "Bearer k2" and server.asked[0][2]["model"] == "name"


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


class Characters:
    """A tokenizer whose tokens are ASCII characters."""

    eos_token_id = 0

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(m["content"] for m in messages) + "|"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) % 128 for c in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


@pytest.fixture
def local(monkeypatch):
    """A local backend with a tiny network of random weights: what it says is noise, how it is asked is real."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=8192, **sizes)).eval()
    monkeypatch.setattr("text_agents.language_model.load_model", lambda path, device: (model, Characters()))
    return backends.TransformersBackend()


def test_a_local_model_scores_choices_as_the_beginning_of_its_reply(local):
    import torch

    assert local.context_tokens == 8192 and local.count_tokens("abc") == 4
    choices = ["bcd", "x"]
    found = local.choice_logprobs(['text\n{"status": "a'], choices)
    for column, choice in enumerate(choices):  # in one pass, without a cache
        ids = [ord(c) for c in 'text\n|{"status": "a' + choice + '"']
        with torch.no_grad():
            logp = torch.log_softmax(local.model(torch.tensor([ids])).logits[0], -1)
        n = len(choice) + 1
        expected = sum(float(logp[i - 1, ids[i]]) for i in range(len(ids) - n, len(ids)))
        assert abs(found[0, column] - expected) < 1e-4
    assert backends._begun_reply('text\n{"status": "') == ("text\n", '{"status": "')
    assert backends._begun_reply("text") == ("text", "")


def test_a_local_model_of_noise_gives_predictions_that_are_never_broken(local):
    from vla_wmrl.world_model.language import parse_prediction

    found = [parse_prediction(text) for text in local.generate([f"prompt {i}\n" for i in range(12)], SCHEMA, 256)]
    assert len({p.outcomes[0].status for p in found}) > 1 and len({p.outcomes[0].feedback for p in found}) > 1
    again = local.generate(["prompt 0\n"], SCHEMA, 256)[0]
    assert parse_prediction(again).outcomes[0].feedback != found[0].outcomes[0].feedback, "a second try is another one"
    local.temperature = 0.0
    assert local.generate(["a\n"], SCHEMA, 256) == local.generate(["a\n"], SCHEMA, 256)
    model = LanguageWorldModel(local, max_tokens=256)
    [told] = model.predict([Case("task", "text", "data", "brief", "print(1)")])
    assert told is not None and model.counts_["broken"] == 0 and 0 < told.reward < 1
    assert abs(told.p_status.sum() - 1) < 1e-6, "by log-probabilities, not by the confidences it states"


def test_values_that_begin_one_another_and_texts_that_never_end(local):
    from text_agents.autoresearch.guided import Decoder, answer

    def decoder(seed=0):
        return Decoder(local.model, local.tokenizer, [65, 66], 1.0, (seed,))

    lines = {"type": "object", "properties": {"line": {"type": ["integer", "null"]}}}
    found = {json.loads(answer(decoder(i), lines, 64))["line"] for i in range(30)}
    assert len(found) > 5 and all(v is None or 1 <= v < 400 for v in found)
    decoder_ = decoder()
    decoder_._draw = lambda tokens=None: 92 if tokens is None else tokens[0]  # backslashes without end
    text = answer(decoder_, {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}}, 400)
    assert json.loads(text)["a"] == "\\" * 20
    for schema in ({"type": "boolean"}, {"type": "number"}, {"type": "number", "minimum": 0}):  # a KeyError once
        with pytest.raises(ValueError, match=schema["type"]):
            answer(decoder(), schema, 64)
