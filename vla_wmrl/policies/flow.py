"""Log-probabilities for flow-matching policies: lerobot's SmolVLA sampled by a stochastic differential equation.

Convention (SmolVLA, pi0): x_t = t eps + (1 - t) a, v = eps - a, integrated from t = 1 to 0 in N steps of d = 1/N.
Flow-SDE (Flow-GRPO arXiv 2505.05470, pi_RL 2510.25889): the reverse SDE with sigma_t = eta sqrt(t / (1 - t)) has the
marginals of the ODE and Gaussian transitions, whose density is the log-probability. `hybrid` makes one step per chunk,
drawn from the noise key, stochastic; `all` makes every step stochastic. `smooth` adds Gaussian noise of a few smooth
components (policies.exploration) to the chunk that the last step reaches: the policy is then a Gaussian around its own
deterministic chunk, so that training explores around what evaluation runs.

Non-obvious behaviour:
* With eta = 0, or `stochastic=False`, a chunk has the same bits as `SmolVLAPolicy.predict_action_chunk` with the same
  noise; its log-prob is 0 by definition, and carries no gradient.
* The log-prob is a sum over executed control steps and the environment's action dims only.
* The initial noise eps is the same for all members of a group (the last part of a key is the member): what it decides is
  not scored, and would only add spread that no log-probability explains.
* Vision (encoder and connector) is frozen: `inputs` hold its output, which a world model may also have produced.
* Language is padded to the tokenizer's maximal length, so that inputs of different tasks stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.common.vla_utils import make_att_2d_masks
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.processor import NormalizerProcessorStep, PolicyProcessorPipeline, RenameObservationsProcessorStep
from lerobot.processor.converters import create_transition
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn
from transformers import DynamicCache

from vla_wmrl.errors import UserError
from vla_wmrl.policies import checkpoint_io
from vla_wmrl.policies.base import ALL_SDE_STEPS, NO_SDE_STEP, ChunkSample
from vla_wmrl.policies.chunks import ChunkPolicy
from vla_wmrl.policies.exploration import SmoothNoise, designed_noise
from vla_wmrl.policies.noise import INITIAL, SDE, choice, noise
from vla_wmrl.policies.traced import Traced

SdeKind = Literal["smooth", "hybrid", "all"]
Design = Literal["orthogonal", "independent"]
Prefix = tuple[Tensor, DynamicCache]
FROZEN = ("vlm.model.vision_model.", "vlm.model.connector.")


def sde_transition(x: Tensor, v: Tensor, t: Tensor, d: float, eta: float) -> tuple[Tensor, Tensor]:
    """Mean, std of x_{t-d} given x_t (Flow-SDE). x, v [..., H, A]; t broadcasts; at t = 1 sigma uses the next time."""
    sigma = eta * torch.sqrt(t / (1.0 - torch.where(t >= 1.0 - 1e-6, t - d, t)))
    half = sigma**2 * d / 2
    mean = x * (1 - half / t) - v * d * (1 + sigma**2 * (1 - t) / (2 * t))
    return mean, sigma * math.sqrt(d)


def gaussian_log_prob(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Elementwise log density in float32; 0, without gradient, where std is 0."""
    safe = torch.where(std > 0, std, torch.ones_like(std))
    value = -((y - mean) ** 2) / (2 * safe**2) - torch.log(safe) - 0.5 * math.log(2 * math.pi)
    return torch.where(std > 0, value, torch.zeros_like(value))


class FlowPolicy(ChunkPolicy):
    """A lerobot SmolVLAPolicy with its processors, sampled with stored chains and scored again by GRPO."""

    def __init__(
        self,
        policy: SmolVLAPolicy,
        before: PolicyProcessorPipeline,
        after: PolicyProcessorPipeline,
        eta: float,
        sde: SdeKind = "hybrid",
        n_action_steps: int | None = None,
        components: int = 1,
        scale: Sequence[float] | None = None,
        design: Design = "orthogonal",
        num_steps: int | None = None,
    ):
        """`components`, `scale` (one factor an action dimension; None: all 1), `design` (of a group's members): of the noise
        of `smooth`. `num_steps`: denoising steps; None: the checkpoint's."""
        if sde not in get_args(SdeKind):
            raise UserError(f"policy.sde is {sde!r}; use one of {', '.join(get_args(SdeKind))}")
        if eta < 0:
            raise UserError(f"policy.eta is {eta}; the noise level must be 0 or more")
        config = policy.config
        if config.adapt_to_pi_aloha or config.add_image_special_tokens or config.prefix_length > 0:
            raise UserError("this SmolVLA checkpoint uses Aloha joints, image tokens or a fixed prefix: not supported")
        self.policy, self.before, self.after = policy.eval(), before, after
        self.model, self.config = policy.model, config
        self.eta, self.sde = float(eta), sde
        self.n_action_steps = n_action_steps or config.n_action_steps
        if self.n_action_steps > config.chunk_size:
            raise UserError(f"n_action_steps {self.n_action_steps} exceeds the policy's chunk of {config.chunk_size}")
        if num_steps is not None:
            config.num_steps = num_steps
        self.horizon, self.denoising_steps = config.chunk_size, config.num_steps
        self.action_dim, self.padded_dim = config.action_feature.shape[0], config.max_action_dim
        scale = (1.0,) * self.action_dim if scale is None else scale
        if len(scale) != self.action_dim:
            raise UserError(f"policy.noise_scale has {len(scale)} numbers; the policy has {self.action_dim} action dimensions")
        self.design = design
        self.smooth = SmoothNoise(components, self.n_action_steps, self.horizon, scale, self.padded_dim)
        self.noise_scale = torch.tensor([s if s > 0 else 1.0 for s in scale], dtype=torch.float32)
        self.cameras = tuple(config.image_features)
        self.device = next(policy.parameters()).device
        self.dtype = min((p.dtype for p in policy.parameters()), key=lambda dtype: dtype.itemsize)
        self._tokens: dict[str, tuple[Tensor, Tensor]] = {}
        self._normaliser = next(step for step in before.steps if isinstance(step, NormalizerProcessorStep))
        renames = [step.rename_map for step in before.steps if isinstance(step, RenameObservationsProcessorStep)]
        self._rename = renames[0] if renames else {}
        self._fast = Traced(self)
        for name, parameter in policy.named_parameters():
            if any(part in name for part in FROZEN):
                parameter.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        eta: float,
        sde: SdeKind = "hybrid",
        n_action_steps: int | None = None,
        components: int = 1,
        scale: Sequence[float] | None = None,
        device: str = "cpu",
        design: Design = "orthogonal",
        num_steps: int | None = None,
    ) -> FlowPolicy:
        """From an ordinary lerobot checkpoint folder with its processors; no hub. Raises UserError on another kind."""
        loaded = checkpoint_io.load(path, device)
        return cls(*loaded, eta, sde, n_action_steps, components, scale, design, num_steps)

    def save(self, path: str | Path) -> None:
        """Writes an ordinary lerobot checkpoint with processors (and the `vlm/` folder, if it is local)."""
        checkpoint_io.save(path, self.policy, self.before, self.after)

    def parameters_to_train(self) -> list[tuple[str, nn.Parameter]]:
        """What RL updates: all that the checkpoint trains, but for vision encoder and connector."""
        return [(name, p) for name, p in self.policy.named_parameters() if p.requires_grad]

    # ---- inputs
    @torch.no_grad()
    def encode(self, images: dict[str, Tensor], state: Tensor, task: list[str]) -> dict[str, Tensor]:
        """Policy inputs from an observation. images: uint8 [B, H, W, 3] by camera; state [B, 8]; task: B sentences.

        Returns {"features" [B, n_tokens, D] float32, "state" [B, 8] normalised, "lang_tokens", "lang_masks" [B, L]}.
        """
        images = {self._rename.get(name, name): image for name, image in images.items()}
        missing = [name for name in self.cameras if name not in images]
        if missing:
            raise UserError(f"the policy looks through {list(self.cameras)}; the environment lacks {missing}")
        pixels = {k: images[k].to(self.device).permute(0, 3, 1, 2).to(torch.float32) / 255.0 for k in self.cameras}
        prepared, _ = self.policy.prepare_images(pixels)
        features = torch.cat([self._fast.embed_image(image) for image in prepared], dim=1)
        return self.inputs_from_features(features, state, task)

    def inputs_from_features(self, features: Tensor, state: Tensor, task: list[str]) -> dict[str, Tensor]:
        """As `encode`, from vision features [B, n_tokens, D] (of a world model's decoder, say) instead of images."""
        tokens = [self._tokenize(sentence) for sentence in task]
        return {
            "features": features.to(torch.float32),
            "state": self._normalise_state(state.to(self.device, torch.float32)),
            "lang_tokens": torch.cat([t for t, _ in tokens]),
            "lang_masks": torch.cat([m for _, m in tokens]),
        }

    def _tokenize(self, sentence: str) -> tuple[Tensor, Tensor]:
        """Tokens and mask [1, L] of a task by the checkpoint's own preprocessor, once per sentence."""
        if sentence not in self._tokens:
            state = torch.zeros(1, self.config.robot_state_feature.shape[0])
            batch = self.before({OBS_STATE: state, "task": [sentence]})
            tokens, mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
            more = self.config.tokenizer_max_length - tokens.shape[1]
            self._tokens[sentence] = nn.functional.pad(tokens, (0, more)), nn.functional.pad(mask, (0, more))
        return self._tokens[sentence]

    def _normalise_state(self, state: Tensor) -> Tensor:
        done = self._normaliser(create_transition(observation={OBS_STATE: state}))
        return done[TransitionKey.OBSERVATION][OBS_STATE]

    # ---- the network
    def _prefix(self, inputs: dict[str, Tensor]) -> Prefix:
        """Pad mask [B, P] and key-value cache of features, language and state; the same operations as lerobot's."""
        state = self.policy.prepare_state({OBS_STATE: inputs["state"]})
        embs, pads, atts = self.model.embed_prefix([], [], inputs["lang_tokens"], inputs["lang_masks"], state=state)
        features = inputs["features"].to(embs.dtype)
        features = features * torch.tensor(features.shape[-1] ** 0.5, dtype=features.dtype, device=features.device)
        embs = torch.cat([features, embs], dim=1)
        pads = torch.cat([pads.new_ones(features.shape[:2]), pads], dim=1)
        atts = torch.cat([atts.new_zeros(features.shape[:2]), atts], dim=1)
        _, cache = self.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(pads, atts),
            position_ids=torch.cumsum(pads, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embs, None],
            use_cache=True,
        )
        return pads, cache

    def _velocity(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        pads, cache = prefix
        return self.model.denoise_step(x_t=x, prefix_pad_masks=pads, past_key_values=cache, timestep=t)

    def _transition(self, x: Tensor, v: Tensor, t: Tensor, following: Tensor) -> tuple[Tensor, Tensor | float]:
        """Mean and std of a stochastic step from x at time t; `following` is where the deterministic step goes."""
        if self.sde == "smooth":
            return following, self.eta
        return sde_transition(x, v, t, 1.0 / self.denoising_steps, self.eta)

    def integrate(self, inputs: dict[str, Tensor], x: Tensor, chosen: Tensor | None, noises: Tensor | None) -> Tensor:
        """The chain [B, N + 1, H, A] from the initial noise x [B, H, A].

        `chosen` [B, N] bool marks the stochastic steps, `noises` [B, 1 or N, H, A] is what they add; None for both: the
        ODE in lerobot's own arithmetic. No branch depends on a value, so that the whole can be traced.
        """
        prefix = self._prefix(inputs)
        dt, chain = -1.0 / self.denoising_steps, [x]
        for step in range(self.denoising_steps):
            t = torch.tensor(1.0 + step * dt, dtype=torch.float32, device=x.device)
            v = self._velocity(prefix, x, t.expand(len(x)))
            following = x + dt * v
            if chosen is not None:
                mean, std = self._transition(x, v, t, following)
                drawn = mean + std * noises[:, step if noises.shape[1] > 1 else 0]
                following = torch.where(chosen[:, step, None, None], drawn, following)
            x = following
            chain.append(x)
        return torch.stack(chain, dim=1)

    # ---- sampling
    @torch.no_grad()
    def sample(
        self, inputs: dict[str, Tensor], keys: Sequence[Sequence[int]], stochastic: bool | Sequence[bool]
    ) -> ChunkSample:
        """One chunk per row of `inputs`; a row's result depends on its key and inputs only (up to float rounding).

        keys: tuples that end in the member of the group; `stochastic`: whether rows explore, one for all or one each.
        """
        shape = (self.horizon, self.padded_dim)
        x = torch.from_numpy(np.stack([noise(key[:-1], shape, INITIAL) for key in keys])).to(self.device)
        explores = torch.as_tensor(stochastic, dtype=torch.bool).expand(len(keys))
        sde_step = torch.where(explores, torch.tensor([self._sde_step(key) for key in keys]), NO_SDE_STEP)
        chosen = noises = None
        if self.eta > 0 and bool(explores.any()):
            noises = self._noises(keys).to(self.device)
            which = sde_step[:, None]
            chosen = ((which == ALL_SDE_STEPS) | (which == torch.arange(self.denoising_steps))).to(self.device)
        chain = self._fast.integrate(inputs, x, chosen, noises)
        return ChunkSample(self._to_environment(chain[:, -1]), chain, sde_step)

    def _sde_step(self, key: Sequence[int]) -> int:
        if self.sde == "smooth":
            return self.denoising_steps - 1
        return ALL_SDE_STEPS if self.sde == "all" else choice(key, self.denoising_steps)

    def _noises(self, keys: Sequence[Sequence[int]]) -> Tensor:
        """[B, 1 or N, H, A]: the standard noise of the stochastic steps."""
        if self.sde == "smooth":
            shape = (1, *self.smooth.shape)
            draw = designed_noise if self.design == "orthogonal" else partial(noise, stream=SDE)
            drawn = np.stack([draw(key, shape) for key in keys])
            return self.smooth.spread(torch.from_numpy(drawn))
        steps = self.denoising_steps if self.sde == "all" else 1
        return torch.from_numpy(np.stack([noise(key, (steps, self.horizon, self.padded_dim), SDE) for key in keys]))

    def _to_environment(self, x: Tensor) -> Tensor:
        """Actions [B, H, 7] in environment units from normalised ones, by the checkpoint's own postprocessor."""
        return self.after(x[:, :, : self.action_dim]).to(self.device, torch.float32).clamp(-1.0, 1.0)

    # ---- scoring
    def flow_matching_loss(
        self, inputs: dict[str, Tensor], actions: Tensor, is_pad: Tensor, noise: Tensor, time: Tensor
    ) -> Tensor:
        """SmolVLA's training loss from features instead of images: mean of (v - (noise - actions))^2 over real steps.

        actions, noise [B, H, A] normalised and padded, is_pad [B, H] bool (past the episode's end), time [B] in (0, 1].
        Equal to lerobot's `SmolVLAPolicy.forward` with the same noise and time, up to float rounding.
        """
        t = time[:, None, None]
        v = self._velocity(self._prefix(inputs), t * noise + (1 - t) * actions, time)
        squared = ((noise - actions - v) ** 2)[:, :, : self.action_dim] * ~is_pad[:, :, None]
        return squared.sum() / ((~is_pad).sum() * self.action_dim).clamp(min=1)

    def log_prob(self, inputs: dict[str, Tensor], chain: Tensor, sde_step: Tensor, executed: Tensor) -> Tensor:
        """Log-probability [B] of the stochastic transitions of `chain`, differentiable; executed [B, H] bool."""
        n, rows = self.denoising_steps, torch.arange(len(chain), device=chain.device)
        sde_step = sde_step.to(chain.device)
        if self.sde == "smooth":
            return self._smooth_log_prob(inputs, chain, (sde_step != NO_SDE_STEP)[:, None] & executed)
        prefix = self._prefix(inputs)
        every = bool((sde_step == ALL_SDE_STEPS).any())
        if every and not bool((sde_step == ALL_SDE_STEPS).all()):
            raise ValueError("one batch mixes chunks with all steps and with one step stochastic")
        total = chain.new_zeros(len(chain))
        for step in [torch.full_like(sde_step, k) for k in range(n)] if every else [sde_step.clamp(min=0)]:
            x, y = chain[rows, step], chain[rows, step + 1]
            t = (1.0 - step.to(torch.float64) / n).to(torch.float32)
            v = self._velocity(prefix, x, t)
            mean, std = sde_transition(x, v, t[:, None, None], 1.0 / n, self.eta)
            std = torch.where(sde_step[:, None, None] == NO_SDE_STEP, torch.zeros_like(std), std)
            elements = gaussian_log_prob(y, mean, std)[:, :, : self.action_dim]
            total = total + (elements * executed[:, :, None]).sum(dim=(1, 2))
        return total

    def _smooth_log_prob(self, inputs: dict[str, Tensor], chain: Tensor, scored: Tensor) -> Tensor:
        """Log density [B] of the explored components around the whole deterministic chunk; 0 where nothing is `scored`.

        The gradient goes through all denoising steps: they share their weights, so a step that was fitted on the last one
        alone would move the others, and with them the chunk, by several times what its ratio says.
        """
        w = self.smooth.coordinates(chain[:, -1] - self._deterministic(inputs, chain[:, 0]))
        elements = gaussian_log_prob(w, torch.zeros_like(w), torch.full_like(w, self.eta))
        return torch.where(scored.any(1), elements.sum(dim=(1, 2)), 0.0)

    def _deterministic(self, inputs: dict[str, Tensor], x: Tensor) -> Tensor:
        """Chunks [B, H, A] from initial noise x [B, H, A]. Rows that repeat the one before are computed once: the members of
        a group that explore at their first look differ by what is added to the result only."""
        new = (x[1:] != x[:-1]).flatten(1).any(1)
        for value in inputs.values():
            new |= (value[1:] != value[:-1]).flatten(1).any(1)
        new = torch.cat([new.new_ones(1), new])
        first, which = torch.nonzero(new).flatten(), torch.cumsum(new, 0) - 1
        return self.integrate({k: v[first] for k, v in inputs.items()}, x[first], None, None)[:, -1][which]

    def centre(self, inputs: dict[str, Tensor], chain: Tensor, sde_step: Tensor, executed: Tensor) -> Tensor:
        """[B, E, D] the deterministic chunk's E executed steps in D action dimensions, differentiable, in units in which half
        the squared distance of two centres, averaged over steps, is the KL divergence (nats) of Gaussians of the noise's
        size around them, were every dimension explored by an offset. Dimensions that are not explored count like `scale` 1.
        """
        mean = self._deterministic(inputs, chain[:, 0])[:, : self.n_action_steps, : self.action_dim]
        return mean / (max(self.eta, 1e-6) * self.noise_scale)
