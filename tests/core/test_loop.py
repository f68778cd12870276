"""The loop and the learner with a Gaussian toy policy: what enters the gradient, what calibrates what, what resumes."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_wmrl import grpo
from vla_wmrl.config import GrpoConfig, TrainConfig
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.errors import UserError
from vla_wmrl.fusion import Fusion
from vla_wmrl.learner import Learner
from vla_wmrl.policies.chunks import ChunkPolicy
from vla_wmrl.tracking import Ledger
from vla_wmrl.train import Loop
from vla_wmrl.types import Rollout, Start

LOOKS, HORIZON, DIM = 3, 4, 2


class Gaussian(ChunkPolicy):
    """Chunks around a linear function of the input, with unit variance."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(DIM, DIM)

    def log_prob(self, inputs, chain, sde_step, executed):
        error = chain[:, 1] - self.net(inputs["x"])[:, None]
        return (-0.5 * error**2 * executed[:, :, None]).sum((1, 2))

    def centre(self, inputs, chain, sde_step, executed):
        return self.net(inputs["x"])[:, None]

    def parameters_to_train(self):
        return list(self.net.named_parameters())


def rollout(start, member, seed, source="real", reward=0.0, looks=LOOKS):
    rng = np.random.default_rng([seed, start.init_id, member])
    executed = np.zeros((looks, HORIZON), bool)
    executed[:, :2] = True
    progress = np.zeros(looks + 1, np.float32)
    progress[-1] = reward
    return Rollout(
        start=start, member=member, source=source,
        inputs={"x": rng.normal(size=(looks, DIM)).astype(np.float32)},
        chain=rng.normal(size=(looks, 2, HORIZON, DIM)).astype(np.float32), sde_step=np.zeros(looks, np.int64),
        executed=executed, states=np.zeros((looks + 1, 1), np.float32), progress=progress, success=reward >= 1,
        terminated=reward >= 1, truncated=reward < 1, steps=int(executed.sum()),
    )  # fmt: skip


class Starts:
    def draw(self, step, n):
        return [Start(0, step * n + i) for i in range(n)]

    def extend(self, starts):
        pass


def world(reward_of, source):
    """Executes or imagines groups whose rewards are `reward_of(start, member)`; remembers what it was asked."""
    asked = []

    def run(starts, size, seed):
        asked.append([s.init_id for s in starts])
        groups = [tuple(rollout(s, m, 1, source, reward_of(s, m)) for m in range(size)) for s in starts]
        if source == "imagined":
            return groups
        future = Future()
        future.set_result(groups)
        return future

    run.asked = asked
    return run


def truth(start, member):
    return float(np.random.default_rng([start.init_id, member, 5]).uniform())


def make(reward_wm=truth, fusion="inverse_variance", debias=None, fraction=0.5, imagine=True, lag=0, **grpo):
    cfg = TrainConfig(steps=4)
    cfg.grpo = GrpoConfig(**{"n_groups": 4, "group_size": 4, "lr": 1e-2, **grpo})
    cfg.anchors.fraction = fraction
    policy = Gaussian()
    return Loop(
        cfg=cfg, learner=Learner(policy, cfg.grpo), starts=Starts(), execute=world(truth, "real"),
        imagine=world(reward_wm, "imagined") if imagine else None, reward=lambda r: float(r.progress[-1]), debias=debias,
        fusion=Fusion(fusion, min_groups=1), ledger=Ledger(), lag=lag,
    )  # fmt: skip


def weights(loop):
    return torch.cat([p.detach().flatten() for p in loop.learner.parameters])


def test_a_constant_world_model_adds_nothing_to_the_gradient():
    mixed, alone = make(reward_wm=lambda s, m: 0.7), make(imagine=False)
    mixed.step(0), alone.step(0)
    assert mixed.learner.updates == 1
    # Without a world model only the anchors train; a constant one must leave the same direction.
    gradient = [torch.cat([p.grad.flatten() for p in loop.learner.parameters]) for loop in (mixed, alone)]
    cosine = torch.nn.functional.cosine_similarity(gradient[0], gradient[1], dim=0)
    assert cosine > 1 - 1e-6


def test_all_equal_rewards_take_no_step():
    loop = make(imagine=False, fraction=1.0)
    loop.execute = world(lambda s, m: 0.5, "real")
    before = weights(loop)
    assert loop.step(0)["loss/skipped"] == 1.0
    assert torch.equal(before, weights(loop))


def test_a_pair_never_calibrates_itself():
    debias = IsotonicDebiaser(min_pairs=4)
    loop = make(debias=debias)
    seen = []
    original = debias.transform
    debias.transform = lambda r, tasks=None: seen.append(len(debias.pairs_)) or original(r, tasks)
    for step in range(3):
        loop.step(step)
    assert seen[0] == 0 and seen == sorted(seen)
    anchors_a_step = len(debias.pairs_) // 3
    assert all(n % 4 == 0 for n in seen) and len(debias.pairs_) > seen[-1] and anchors_a_step >= 4


def test_every_group_is_imagined_and_only_anchors_are_executed():
    loop = make()
    metrics = loop.step(0)
    assert len(loop.imagine.asked[0]) == 4
    assert len(loop.execute.asked[0]) == metrics["anchors/groups"]
    assert metrics["steps/real_anchors"] == metrics["anchors/groups"] * 4 * LOOKS * 2
    assert metrics["steps/imagined_rollouts"] == 4 * 4 * LOOKS * 2


def test_only_imagined_groups_begin_in_dreams_and_a_future_of_them_changes_nothing():
    """A dreamt start has no simulator state: an anchor that began there could not be executed."""

    class Dreamt:
        def draw(self, step, n):
            return [Start(0, 1000 + step * n + i) for i in range(n)]

    now, later = make(), make()
    now.dreams = later.dreams = Dreamt()
    imagine = later.imagine

    def in_future(*arguments):
        future = Future()
        future.set_result(imagine(*arguments))
        return future

    later.imagine = in_future
    metrics = now.step(0)
    asked = now.imagine.asked[0]
    assert sum(i < 1000 for i in asked) == metrics["anchors/groups"] and len(asked) == 4
    assert now.execute.asked[0] == [i for i in asked if i < 1000]
    later.step(0)
    assert torch.equal(weights(now), weights(later))


@pytest.mark.parametrize("minibatch", [1, 5, 1000])
def test_the_gradient_does_not_depend_on_the_minibatch(minibatch):
    loop, whole = make(minibatch_looks=minibatch), make(minibatch_looks=64)
    loop.step(0), whole.step(0)
    for a, b in zip(loop.learner.parameters, whole.learner.parameters, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_a_rollout_weighs_the_same_however_long_and_unexecuted_steps_weigh_nothing():
    start = Start(0, 0)
    policy = Gaussian()
    learner = Learner(policy, GrpoConfig(lr=1e-2, grad_clip=1e9))
    short, long = rollout(start, 0, 1, looks=1), rollout(start, 0, 1, looks=1)
    long = type(long)(**{**long.__dict__, **{
        k: np.repeat(getattr(long, k), 5, axis=0) for k in ("chain", "executed", "sde_step")
    }, "inputs": {"x": np.repeat(long.inputs["x"], 5, axis=0)}})  # fmt: skip
    other = rollout(start, 1, 2)
    gradients = []
    for first in (short, long):
        learner.optimizer.zero_grad()
        looks = policy.collate([first, other], np.array([1.0, -1.0]), np.array([True, True]))
        w = grpo.look_weights(looks.rollout, looks.mask, 2)
        logp = policy.log_prob(looks.inputs, looks.chain, looks.sde_step, looks.executed)
        grpo.grpo_loss(logp, logp.detach(), looks.advantage, w)[0].backward()
        gradients.append([p.grad.clone() for p in learner.parameters])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_missing_reward_trains_nothing_and_is_not_zero():
    loop = make(imagine=False, fraction=1.0)
    loop.reward = lambda r: float("nan") if r.member == 0 else float(r.progress[-1])
    loop.step(0)
    kept = [p.grad.clone() for p in loop.learner.parameters]
    again = make(imagine=False, fraction=1.0)
    again.execute = world(lambda s, m: 123.0 if m == 0 else truth(s, m), "real")
    again.reward = loop.reward
    again.step(0)
    for a, b in zip(kept, again.learner.parameters, strict=True):
        assert torch.equal(a, b.grad)


def test_two_steps_after_a_restore_equal_two_steps_in_a_row():
    whole, first = make(debias=IsotonicDebiaser(min_pairs=4)), make(debias=IsotonicDebiaser(min_pairs=4))
    for step in range(3):
        whole.step(step)
    first.step(0)
    second = make(debias=IsotonicDebiaser(min_pairs=4))
    second.load_state_dict(first.state_dict())
    for step in (1, 2):
        second.step(step)
    assert torch.equal(weights(whole), weights(second))


def test_a_score_reaches_the_gradient_through_the_calibration_alone():
    """A score on another scale must train as the reward would that it is a monotone map of; uncalibrated it must not train."""
    plain, scored = make(debias=IsotonicDebiaser(min_pairs=4)), make(debias=IsotonicDebiaser(min_pairs=4))
    scored.score = lambda r: 100.0 * float(r.progress[-1]) ** 3 - 7.0
    for step in range(3):
        plain.step(step)
        metrics = scored.step(step)
    torch.testing.assert_close(weights(plain), weights(scored), rtol=1e-6, atol=1e-8)
    assert 0 <= metrics["reward/wm_mean"] <= 1  # what is shown is the reward
    with pytest.raises(ValueError, match="needs a calibration"):
        Loop(**{**{k: getattr(plain, k) for k in plain.__dataclass_fields__}, "debias": None, "score": scored.score})


def test_ppi_trains_on_the_anchors_twins_too():
    loop = make(fusion="ppi", reward_wm=lambda s, m: truth(s, m) * 0.5)
    for step in range(3):
        metrics = loop.step(step)
    assert metrics["fusion/lambda"] < 0
    assert torch.isfinite(weights(loop)).all()


@pytest.mark.parametrize("fusion", ["none", "ppi"])
def test_credit_adds_a_value_a_turn_to_the_rollouts_own_advantage_with_the_groups_factor(fusion):
    given = []
    for credit in (None, lambda rollouts, rewards: [np.array([0.0, r]) for r in rewards]):
        loop = make(fusion=fusion, reward_wm=lambda s, m: truth(s, m) * 0.5)
        loop.step(0)  # the fusion has seen anchors
        loop.credit = credit
        loop.learner.update = lambda *batch: given.append(batch) or {}
        metrics = loop.step(1)
    (rollouts, plain, *_), (same, turns, *_) = given
    factors = {"real": metrics["fusion/weight_anchor"], "imagined": metrics["fusion/weight_wm"]}
    assert len(turns) == len(plain) == len(rollouts) == len(same) == (16 if fusion == "none" else 24)
    for rollout, own, found in list(zip(same, plain, turns, strict=True))[:16]:
        expected = own + factors[rollout.source] * float(rollout.progress[-1])
        np.testing.assert_allclose(found, [own, expected], rtol=1e-6)


def contrast(learner, advantage=1.0):
    """An update from two rollouts of one group; the objective's own metrics."""
    start = Start(0, 0)
    pair = [rollout(start, member, 3 + member) for member in range(2)]
    return pair, learner.update(pair, np.array([advantage, -advantage]), np.array([True, True]), 2)


def test_lbfgs_raises_the_objective_and_stays_in_the_trust_region():
    learner = Learner(Gaussian(), GrpoConfig(optimizer="lbfgs", epochs=6, kl_old=0.05, target_kl=0.2))
    _, metrics = contrast(learner)
    assert metrics["loss"] < metrics["loss_before"] - 1e-3
    assert 0 < metrics["kl_step"] <= 0.2 and metrics["kl_old"] > 0


def test_lbfgs_does_not_depend_on_the_minibatch():
    several, one = (
        Learner(Gaussian(), GrpoConfig(optimizer="lbfgs", epochs=4, kl_old=0.1, minibatch_looks=n)) for n in (1, 64)
    )
    contrast(several), contrast(one)
    for a, b in zip(several.parameters, one.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "lbfgs"])
def test_a_penalty_on_change_holds_the_policy_also_where_there_is_no_advantage(optimizer):
    start, moved = Start(0, 0), []
    for kl_old in (0.0, 3.0):
        learner = Learner(Gaussian(), GrpoConfig(optimizer=optimizer, lr=5e-2, epochs=6, kl_old=kl_old, target_kl=None))
        pair, quiet = [rollout(start, m, 3 + m) for m in range(2)], [rollout(start, m, 9 + m) for m in range(6)]
        looks = learner.policy.collate(quiet, np.zeros(6), np.ones(6, bool))
        before = learner.policy.centre(looks.inputs, None, None, None).detach()
        advantages = np.array([1.0, -1.0] + [0.0] * 6)
        learner.update(pair + quiet, advantages, np.ones(8, bool), 8)
        now = learner.policy.centre(looks.inputs, None, None, None).detach()
        moved.append(float((now - before).square().mean()))
    assert moved[1] < 0.3 * moved[0]


def test_a_penalty_on_change_is_refused_for_a_policy_without_a_centre():
    class Discrete(ChunkPolicy):
        def parameters_to_train(self):
            return []

    with pytest.raises(UserError, match=r"grpo\.kl_old=0\.1 needs a policy with a continuous centre"):
        Learner(Discrete(), GrpoConfig(kl_old=0.1))


def test_graded_anchors_pair_a_rollout_with_itself_and_have_no_twins():
    loop = make(debias=IsotonicDebiaser(min_pairs=4), fraction=0.25)
    loop.grade = lambda group: np.array([2 * float(r.progress[-1]) for r in group])
    metrics = [loop.step(step) for step in range(3)]
    assert all(len(asked) == 3 for asked in loop.imagine.asked), "anchors are not imagined"
    x, y = loop.debias.pairs_.T
    assert len(x) == 12 and np.allclose(x, 2 * y)
    assert abs(metrics[0]["wm/reward_twins"] - 2 * metrics[0]["reward/env_mean"]) < 1e-6
    assert metrics[-1]["calib/spearman"] == 1.0 and np.isnan(metrics[0]["wm/success_twins"])
    plain = make(fraction=0.25, fusion="ppi")
    plain.grade = loop.grade
    for step in range(6):
        found = plain.step(step)
    assert found["fusion/lambda"] != 0 and np.isfinite(found["loss/loss"])


def test_late_anchors_train_later_with_their_own_ratio_and_none_is_dropped():
    loop = make(lag=2, fraction=0.25, lr=0.3, target_kl=None)
    executed, metrics = [], []
    for step in range(5):
        metrics.append(loop.step(step))
        executed += [r.start.init_id for r in loop.executed]
    asked = [i for some in loop.execute.asked for i in some]
    assert [m["anchors/groups"] for m in metrics] == [0, 0, 1, 1, 1]
    assert list(dict.fromkeys(executed)) == asked[:3] and len(loop.late.waiting) == 2, "the last two are on their way"
    assert metrics[1]["loss/log_ratio_abs_max"] < 1e-5, "no anchor, so nothing is late"
    assert metrics[2]["loss/log_ratio_abs_max"] > 1e-3, "sampled by the policy of two updates before"


def test_the_ratio_of_late_rollouts_is_to_the_policy_that_sampled_them():
    loop = make(imagine=False, fraction=1.0)
    learner, policy = loop.learner, loop.learner.policy
    start = learner.weights()
    loop.step(0)
    group = [rollout(Start(0, 9), m, 1) for m in range(4)]
    advantages, valid = np.array([1.0, -1.0, 0.5, -0.5]), np.ones(4, bool)
    looks = policy.collate(group, advantages, valid)
    rows = looks.rows(torch.arange(len(looks.mask)))
    with torch.no_grad(), learner.lent(start):
        then = policy.log_prob(*rows)
    now = learner.weights()
    expected = float((policy.log_prob(*rows).detach() - then).abs().max())
    found = learner.update(group, advantages, valid, 4, (start, valid))["log_ratio_abs_max"]
    assert abs(found - expected) < 1e-6 and expected > 1e-3
    learner._lend(now)
    assert learner.update(group, advantages, valid, 4, (start, ~valid))["log_ratio_abs_max"] < 1e-6


def test_imagined_groups_wait_for_the_calibration_unless_they_are_told_not_to():
    """A score that is a reward can train before there are pairs enough, as in the papers; another one never."""
    waiting, eager = (make(debias=IsotonicDebiaser(min_pairs=20)) for _ in range(2))
    eager.cfg.debias.wait = False
    first = eager.step(0)
    assert waiting.step(0)["loss/skipped"] == 1.0 and first["loss/skipped"] == 0.0
    assert (first["fusion/weight_wm"], first["fusion/weight_anchor"]) == (1.0, 1.0) and first["fusion/groups"] == 0.0
    for step in (1, 2, 3):
        metrics = eager.step(step)
    assert eager.debias.ready and metrics["fusion/groups"] > 0, "residuals count from when there is a calibration"
    with pytest.raises(ValueError, match="has to wait"):
        replace(eager, score=eager.reward)


def test_late_anchors_wait_for_the_calibration_as_others_do():
    loop = make(debias=IsotonicDebiaser(min_pairs=4), lag=1, fraction=0.25)
    assert loop.step(0)["loss/skipped"] == 1.0, "without an anchor yet, raw scores must not train"
    assert loop.step(1)["loss/skipped"] == 1.0
    assert loop.step(2)["loss/skipped"] == 0.0


def test_a_run_with_late_anchors_resumes_to_the_same_weights():
    kind = {"debias": IsotonicDebiaser(min_pairs=4), "lag": 2, "fraction": 0.25}
    whole = make(**kind)
    for step in range(3):
        whole.step(step)
    state = whole.state_dict()
    resumed = make(**{**kind, "debias": IsotonicDebiaser(min_pairs=4)})
    resumed.load_state_dict(state)
    assert torch.equal(weights(resumed), torch.cat([w.flatten() for w in whole.learner.weights()])), (
        "weights were lent, not left"
    )
    for step in range(3, 6):
        whole.step(step)
        resumed.step(step)
    assert torch.equal(weights(whole), weights(resumed))


def test_a_score_is_not_reported_as_a_reward_before_it_is_calibrated():
    """The first point of the curve of calibrated rewards was a mean margin, below every reward."""
    loop = make(debias=IsotonicDebiaser(min_pairs=4), fraction=0.25)
    loop.score = lambda r: -5.0 + float(r.progress[-1])
    metrics = [loop.step(step) for step in range(3)]
    assert np.isnan(metrics[0]["reward/calibrated_mean"]) and np.isnan(metrics[0]["calib/residual"])
    assert 0 <= metrics[-1]["reward/calibrated_mean"] <= 1 and metrics[-1]["calib/residual"] >= 0
