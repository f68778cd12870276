"""tau2-bench: the true evaluator, on data read once; harness failures are not scores; nothing passes for a solution."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from text_agents import tau2_data
from text_agents.tau2 import BadCall, Tau2Env, Tau2Task, ground_truth_actions, parse_action, replay_ground_truth
from text_agents.tau2_users import ChatUser, ScriptedUser, UserFailure, UserTurn, openai_endpoint, user_runs
from vla_wmrl.errors import UserError


def telecom_ids():
    return tau2_data.task_ids("telecom", "small")


@pytest.mark.parametrize(("domain", "n"), [("retail", 2), ("airline", 2), ("telecom", 3)])
def test_the_tasks_own_actions_score_one(domain, n):
    ids = telecom_ids() if domain == "telecom" else tau2_data.task_ids(domain, "test")
    for task_id in ids[:n]:
        result = replay_ground_truth(Tau2Task(domain, task_id))
        assert (result.reward, result.terminated, result.info["stop_reason"]) == (1.0, True, "user_stop"), task_id


def test_solo_mode_gives_the_agent_both_sets_of_tools_and_ends_with_done():
    result = replay_ground_truth(Tau2Task("telecom", telecom_ids()[0]), solo_mode=True)
    assert (result.reward, result.info["stop_reason"]) == (1.0, "agent_stop")
    with pytest.raises(UserError, match=r"no solo mode|no ticket"):
        Tau2Env(solo_mode=True).reset(Tau2Task("retail", "0"))


def test_leaving_out_the_last_action_scores_zero():
    task = Tau2Task("retail", "0")
    actions = ground_truth_actions(task)
    env = Tau2Env(max_steps=50)
    env.reset(task)
    for action in [*actions[:-2], actions[-1]]:
        result = env.step(action)
    assert result.terminated and result.reward == 0.0


def test_doing_nothing_is_a_baseline_and_not_a_solution():
    assert tau2_data.do_nothing_reward("retail", "0") == 0.0
    assert any(tau2_data.do_nothing_reward("airline", i) == 1.0 for i in tau2_data.task_ids("airline")[:2])


def test_an_episode_cut_by_the_limit_scores_zero_as_tau2_has_it():
    env = Tau2Env(max_steps=1)
    env.reset(Tau2Task("telecom", telecom_ids()[0]))
    result = env.step(json.dumps({"name": "get_customer_by_phone", "arguments": {"phone_number": "555-123-2002"}}))
    assert (result.reward, result.truncated, result.info["stop_reason"]) == (0.0, True, "max_steps")


def test_wrong_calls_are_answered_counted_and_harmless():
    env = Tau2Env(max_steps=9)
    env.reset(Tau2Task("telecom", telecom_ids()[0]))
    before = env.environment.get_db_hash()
    for action in ('{"name": "fly"}', '{"name": 3}', "<tool_call>{broken}</tool_call>", ""):
        result = env.step(action)
        assert result.info["kind"] == "invalid" and result.observation.text.startswith("Error")
    assert env.invalid == 4 and env.environment.get_db_hash() == before and result.reward is None


def test_calls_are_read_bare_and_tagged_and_text_stays_text():
    call = ("f", {"a": {"b": 1}})
    assert parse_action('{"name": "f", "arguments": {"a": {"b": 1}}}') == call
    assert parse_action('<think>x</think><tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>') == call
    assert parse_action(" Hello {you} ") == "Hello {you}"
    with pytest.raises(BadCall):
        parse_action("<tool_call>f(a=1)</tool_call>")


def test_environments_do_not_share_a_data_base():
    one, two = tau2_data.make_environment("airline"), tau2_data.make_environment("airline")
    before = two.get_db_hash()
    one.tools.db.users.clear()
    assert two.get_db_hash() == before == tau2_data.make_environment("airline").get_db_hash() != one.get_db_hash()


def test_official_splits_are_the_papers_178_training_tasks_and_do_not_overlap():
    assert sum(len(tau2_data.task_ids(d, "train")) for d in tau2_data.DOMAINS) == 178
    for domain in tau2_data.DOMAINS:
        assert not set(tau2_data.task_ids(domain, "train")) & set(tau2_data.task_ids(domain, "test"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tau2_data.task_ids("retial"), "did you mean retail"),
        (lambda: tau2_data.task_ids("retail", "tset"), "did you mean test"),
        (lambda: tau2_data.task("retail", "999"), "no task '999'"),
        (lambda: Tau2Env(max_steps=0), "at least 1"),
        (lambda: Tau2Env().step("hi"), "before reset"),
    ],
)
def test_wrong_input_is_one_clear_line(call, words):
    with pytest.raises(UserError, match=words):
        call()


class Loops:
    """A user that repeats itself, or calls tools for ever."""

    def __init__(self, turn):
        self._turn = turn

    def begin(self, task, tools):
        return UserTurn("Hello.")

    def turn(self, heard):
        return self._turn


@pytest.mark.parametrize("turn", [UserTurn("Why?"), UserTurn(calls=(("check_status_bar", {}),))])
def test_a_user_that_goes_in_circles_ends_the_episode_without_a_score(turn):
    env = Tau2Env(Loops(turn), max_steps=9)
    env.reset(Tau2Task("telecom", telecom_ids()[0]))
    for _ in range(3):
        result = env.step("Could you check?")
        if result.truncated:
            break
    assert result.truncated and result.reward is None and "user" in result.info["stop_reason"]


def test_the_scripted_user_follows_the_tasks_own_user_actions():
    task_id = next(i for i in telecom_ids() if user_runs(tau2_data.task("telecom", i)))
    task = tau2_data.task("telecom", task_id)
    user = ScriptedUser()
    user.begin(task, [])
    runs = user_runs(task)
    assert user.turn([{"role": "assistant", "content": "?"}]).calls == tuple(runs[0])


@pytest.fixture
def endpoint():
    """A real HTTP server that speaks the chat API; it answers with what `replies` holds."""
    replies, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"choices": [{"message": replies.pop(0)}]}).encode() if replies else b"overloaded"
            self.send_response(200 if body != b"overloaded" else 503)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", replies, asked
    server.shutdown()


def test_a_model_behind_an_endpoint_plays_the_user_and_its_failure_is_no_score(endpoint):
    url, replies, asked = endpoint
    call = {"id": "c1", "type": "function", "function": {"name": "check_status_bar", "arguments": "{}"}}
    replies += [{"content": "My phone is broken."}, {"content": None, "tool_calls": [call]}, {"content": "No signal."}]
    env = Tau2Env(ChatUser(openai_endpoint(url, "m", timeout_s=10)), max_steps=9)
    assert env.reset(Tau2Task("telecom", telecom_ids()[0])).text == "My phone is broken."
    assert env.step("What does the status bar show?").observation.text == "No signal."
    assert asked[0]["messages"][0]["role"] == "system" and asked[-1]["messages"][-1]["role"] == "tool"
    result = env.step("Please wait.")  # the server has no answer left
    assert result.truncated and result.reward is None and "did not answer" in result.info["stop_reason"]
    with pytest.raises(UserFailure):
        openai_endpoint("http://127.0.0.1:9", "m", timeout_s=1)([], [])
