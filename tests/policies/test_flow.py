"""FlowPolicy on a real lerobot SmolVLAPolicy (random weights, padded dims)."""

import pytest
import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE

from vla_wmrl.errors import UserError
from vla_wmrl.policies import checkpoint_io
from vla_wmrl.policies.base import ALL_SDE_STEPS, NO_SDE_STEP
from vla_wmrl.policies.flow import FlowPolicy, sde_transition
from vla_wmrl.policies.traced import LARGEST_BATCH


def first_steps(rows, horizon=16, run=8):
    """[rows, horizon] bool: the first `run` control steps of each chunk ran."""
    executed = torch.zeros(rows, horizon, dtype=torch.bool)
    executed[:, :run] = True
    return executed


def lerobot_batch(flow, images, inputs):
    pixels = {k: v.permute(0, 3, 1, 2).float() / 255.0 for k, v in images.items()}
    words = {OBS_LANGUAGE_TOKENS: inputs["lang_tokens"], OBS_LANGUAGE_ATTENTION_MASK: inputs["lang_masks"]}
    return {**pixels, OBS_STATE: inputs["state"], **words}


@pytest.mark.parametrize("rows", [1, 3, LARGEST_BATCH + 1])  # traced and eager
@pytest.mark.parametrize(("eta", "stochastic"), [(0.0, True), (0.0, False), (0.5, False)])
def test_without_noise_the_chunk_has_lerobots_bits(make_flow, observation, keys, rows, eta, stochastic):
    flow = make_flow(eta=eta)
    images, state, task = observation(rows)
    inputs = flow.encode(images, state, task)
    sample = flow.sample(inputs, keys(rows), stochastic)
    expected = flow.policy.predict_action_chunk(lerobot_batch(flow, images, inputs), noise=sample.chain[:, 0].clone())
    assert torch.equal(sample.chain[:, -1, :, :7], expected)
    assert torch.equal(sample.actions, flow.after(expected).clamp(-1, 1))


def test_inputs_are_those_of_lerobots_preprocessor(make_flow, observation):
    flow = make_flow()
    images, state, task = observation(2)
    inputs = flow.encode(images, state, task)
    for row in range(2):
        theirs = flow.before({OBS_STATE: state[row], "task": task[row]})
        assert torch.equal(inputs["state"][row], theirs[OBS_STATE][0])
        assert torch.equal(inputs["lang_tokens"][row], theirs[OBS_LANGUAGE_TOKENS][0])
        assert torch.equal(inputs["lang_masks"][row], theirs[OBS_LANGUAGE_ATTENTION_MASK][0])
    embed = flow.model.vlm_with_expert.embed_image
    prepared, _ = flow.policy.prepare_images(lerobot_batch(flow, images, inputs))
    with torch.no_grad():
        assert torch.equal(inputs["features"], torch.cat([embed(image) for image in prepared], dim=1))


def test_traced_network_sees_the_optimisers_steps(make_flow, observation, keys):
    flow = make_flow()
    inputs = flow.encode(*observation(1))
    before = flow.sample(inputs, keys(1), False)
    with torch.no_grad():
        for _, parameter in flow.parameters_to_train():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = flow.sample(inputs, keys(1), False)
    with torch.no_grad():
        eager = flow.integrate(inputs, after.chain[:, 0], None, None)
    assert not torch.equal(before.chain, after.chain)
    assert torch.equal(after.chain, eager)


@pytest.mark.parametrize("sde", ["hybrid", "all"])
def test_same_key_same_chunk_in_any_batch(make_flow, observation, keys, sde):
    flow = make_flow(sde=sde)
    images, state, task = observation(6)
    whole = flow.sample(flow.encode(images, state, task), keys(6), True)
    again = flow.sample(flow.encode(images, state, task), keys(6), True)
    assert torch.equal(whole.chain, again.chain)
    part = {k: v[4:5] for k, v in images.items()}
    alone = flow.sample(flow.encode(part, state[4:5], task[4:5]), keys(6)[4:5], True)
    assert torch.equal(alone.sde_step, whole.sde_step[4:5])
    assert torch.allclose(alone.chain, whole.chain[4:5], atol=1e-4)


def test_only_the_chosen_step_is_stochastic(make_flow, observation, keys):
    flow = make_flow(eta=0.5)
    rows = 12
    inputs = flow.encode(*observation(rows))
    sample = flow.sample(inputs, keys(rows), True)
    assert set(sample.sde_step.tolist()) <= set(range(flow.denoising_steps)) and len(set(sample.sde_step.tolist())) > 1
    with torch.no_grad():
        prefix = flow._prefix(inputs)
        for step in range(flow.denoising_steps):
            x, t = sample.chain[:, step], torch.tensor(1.0 - step / flow.denoising_steps)
            ode = x - flow._velocity(prefix, x, t.expand(rows)) / flow.denoising_steps
            far = (sample.chain[:, step + 1] - ode).abs().amax(dim=(1, 2)) > 1e-3
            assert torch.equal(far, sample.sde_step == step)


@pytest.mark.parametrize("sde", ["hybrid", "all"])
def test_log_prob_is_the_gaussian_of_the_stochastic_steps(make_flow, observation, keys, sde):
    flow = make_flow(eta=0.5, sde=sde)
    rows, n = 4, 4
    inputs = flow.encode(*observation(rows))
    sample = flow.sample(inputs, keys(rows), True)
    executed = first_steps(rows)
    executed[1, 5:] = False
    value = flow.log_prob(inputs, sample.chain, sample.sde_step, executed)
    expected = torch.zeros(rows)
    with torch.no_grad():
        prefix = flow._prefix(inputs)
        for step in range(n):
            t = torch.tensor(1.0 - step / n)
            x = sample.chain[:, step]
            mean, std = sde_transition(x, flow._velocity(prefix, x, t.expand(rows)), t, 1.0 / n, 0.5)
            terms = torch.distributions.Normal(mean, std).log_prob(sample.chain[:, step + 1])[:, :, :7]
            terms = (terms * executed[:, :, None]).sum((1, 2))
            expected += torch.where((sample.sde_step == step) | (sample.sde_step == ALL_SDE_STEPS), terms, 0.0)
    assert torch.allclose(value, expected, atol=2e-3, rtol=1e-5)


def test_unexecuted_tail_and_padded_dims_carry_neither_value_nor_gradient(make_flow, observation, keys):
    flow = make_flow(eta=0.5)
    rows = 3
    inputs = flow.encode(*observation(rows))
    sample = flow.sample(inputs, keys(rows), True)
    executed = first_steps(rows)
    index = torch.arange(rows)
    chain = sample.chain.clone().requires_grad_(True)
    flow.log_prob(inputs, chain, sample.sde_step, executed).sum().backward()
    target = chain.grad[index, sample.sde_step + 1]
    assert target[:, 8:].abs().max() == 0 and target[:, :, 7:].abs().max() == 0 and target[:, :8, :7].abs().min() > 0
    changed = sample.chain.clone()
    changed[index, sample.sde_step + 1, 8:] += 1.0
    changed[index, sample.sde_step + 1, :, 7:] += 1.0
    with torch.no_grad():
        same = flow.log_prob(inputs, changed, sample.sde_step, executed)
        assert torch.equal(same, flow.log_prob(inputs, sample.chain, sample.sde_step, executed))


def test_a_chunk_of_which_nothing_ran_has_log_prob_zero(make_flow, observation, keys):
    flow = make_flow(eta=0.5)
    inputs = flow.encode(*observation(2))
    sample = flow.sample(inputs, keys(2), True)
    assert torch.equal(flow.log_prob(inputs, sample.chain, sample.sde_step, first_steps(2, run=0)), torch.zeros(2))


@pytest.mark.parametrize(("eta", "stochastic"), [(0.0, True), (0.5, False)])
def test_deterministic_chunks_have_log_prob_zero_and_no_gradient(make_flow, observation, keys, eta, stochastic):
    flow = make_flow(eta=eta)
    inputs = flow.encode(*observation(2))
    sample = flow.sample(inputs, keys(2), stochastic)
    assert stochastic or torch.equal(sample.sde_step, torch.full((2,), NO_SDE_STEP))
    value = flow.log_prob(inputs, sample.chain, sample.sde_step, first_steps(2))
    value.sum().backward()
    assert torch.equal(value, torch.zeros(2))
    assert all(p.grad is None or p.grad.abs().max() == 0 for _, p in flow.parameters_to_train())


@pytest.mark.parametrize("sde", ["hybrid", "all"])
def test_first_update_ratio_is_one(make_flow, observation, keys, sde):
    flow = make_flow(eta=0.5, sde=sde)
    inputs = flow.encode(*observation(5))
    sample = flow.sample(inputs, keys(5), True)
    with torch.no_grad():
        old = flow.log_prob(inputs, sample.chain, sample.sde_step, first_steps(5))
    new = flow.log_prob(inputs, sample.chain, sample.sde_step, first_steps(5))
    assert (new - old).abs().max() < 1e-5


def test_raising_the_log_prob_raises_it_and_leaves_vision_alone(make_flow, observation, keys):
    """The sign of the policy gradient: a positive advantage makes the sampled chunk likelier."""
    flow = make_flow(eta=0.5)
    inputs = flow.encode(*observation(4))
    sample = flow.sample(inputs, keys(4), True)
    vision = {n: p.clone() for n, p in flow.policy.named_parameters() if "vision_model" in n or "connector" in n}
    optimiser = torch.optim.SGD([p for _, p in flow.parameters_to_train()], lr=1e-4)
    before = flow.log_prob(inputs, sample.chain, sample.sde_step, first_steps(4)).sum()
    (-before).backward()
    optimiser.step()
    with torch.no_grad():
        assert flow.log_prob(inputs, sample.chain, sample.sde_step, first_steps(4)).sum() > before
    assert vision and all(torch.equal(dict(flow.policy.named_parameters())[n], p) for n, p in vision.items())
    assert all(not p.requires_grad for n, p in flow.policy.named_parameters() if n in vision)


def test_checkpoint_survives_saving_moving_and_lerobots_own_loader(make_flow, observation, keys, tmp_path, monkeypatch):
    flow = make_flow(eta=0.0)
    flow.save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "moved")
    assert "/" not in str(checkpoint_io.PreTrainedConfig.from_pretrained(tmp_path / "moved").vlm_model_name)
    monkeypatch.chdir(tmp_path)
    back = FlowPolicy.from_pretrained(tmp_path / "moved", eta=0.0)
    images, state, task = observation(2)
    inputs = flow.encode(images, state, task)
    again = back.encode(images, state, task)
    assert all(torch.equal(inputs[k], again[k]) for k in inputs)
    sample = flow.sample(inputs, keys(2), False)
    assert torch.equal(sample.actions, back.sample(again, keys(2), False).actions)
    monkeypatch.chdir(tmp_path / "moved")  # what a plain lerobot user does
    plain = SmolVLAPolicy.from_pretrained(".")
    chunk = plain.predict_action_chunk(lerobot_batch(flow, images, inputs), noise=sample.chain[:, 0].clone())
    assert torch.equal(sample.chain[:, -1, :, :7], chunk)


def test_a_folder_without_a_policy_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="not a lerobot checkpoint"):
        FlowPolicy.from_pretrained(tmp_path, eta=0.5)


def test_a_missing_camera_is_named(make_flow, observation):
    images, state, task = observation(1)
    del images["observation.images.image2"]
    with pytest.raises(UserError, match="image2"):
        make_flow().encode(images, state, task)


def test_more_actions_than_the_chunk_holds_are_refused(make_flow):
    with pytest.raises(UserError, match="chunk of 16"):
        make_flow(n_action_steps=17)


def test_the_loss_on_features_is_lerobots_own(make_flow, observation):
    flow = make_flow()
    images, state, task = observation(5)
    inputs = flow.encode(images, state, task)
    generator = torch.Generator().manual_seed(3)
    actions, noise = (torch.randn(5, flow.horizon, 7, generator=generator) for _ in range(2))
    padded = torch.nn.functional.pad(actions, (0, flow.padded_dim - 7))
    noise = torch.nn.functional.pad(noise, (0, flow.padded_dim - 7))
    time = torch.rand(5, generator=generator) * 0.9 + 0.05
    is_pad = torch.zeros(5, flow.horizon, dtype=torch.bool)
    is_pad[2, 4:] = True
    batch = lerobot_batch(flow, images, inputs) | {"action": actions, "action_is_pad": is_pad}
    expected, _ = flow.policy.forward(batch, noise=noise, time=time)
    torch.testing.assert_close(flow.flow_matching_loss(inputs, padded, is_pad, noise, time), expected, rtol=1e-5, atol=1e-6)
