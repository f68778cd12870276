"""Runs a small policy's network as one recorded graph per shape: the same operations and bits, no Python overhead.

A simulator worker asks for one chunk at a time; there, two thirds of lerobot's sampling time is the interpreter's. The
graph holds the live parameters, so that optimiser steps are seen. Large batches gain nothing and run as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vla_wmrl.policies.flow import FlowPolicy

LARGEST_BATCH = 8
INPUTS = ("features", "state", "lang_tokens", "lang_masks")


class _Integrate(nn.Module):
    """`FlowPolicy.integrate` with tensors in place of the dictionary; owns the parameters: no copies in the trace."""

    def __init__(self, flow: FlowPolicy):
        super().__init__()
        self.parameters_of, self.integrate = flow.policy, flow.integrate

    def forward(self, features, state, lang_tokens, lang_masks, x, *rest):
        inputs = dict(zip(INPUTS, (features, state, lang_tokens, lang_masks), strict=True))
        chosen, noises = rest or (None, None)
        return self.integrate(inputs, x, chosen, noises)


class _EmbedImage(nn.Module):
    """lerobot's `embed_image` for square images of the tower's own size: no mask to build, positions in order."""

    def __init__(self, flow: FlowPolicy):
        super().__init__()
        vlm = flow.model.vlm_with_expert.get_vlm_model()
        self.vision, self.connector = vlm.vision_model, vlm.connector

    def forward(self, image):
        patches = self.vision.embeddings.patch_embedding(image.to(dtype=self.vision.dtype)).flatten(2).transpose(1, 2)
        order = torch.arange(patches.shape[1], device=image.device).expand(len(image), -1)
        hidden = patches + self.vision.embeddings.position_embedding(order)
        for layer in self.vision.encoder.layers:
            hidden = layer(hidden, None)
        return self.connector(self.vision.post_layernorm(hidden))


class Traced:
    """Caches one graph per shape (and noise level) of the two functions that a look calls."""

    def __init__(self, flow: FlowPolicy):
        self.flow = flow
        self.graphs: dict[tuple, Callable[..., Tensor]] = {}
        size = flow.model.vlm_with_expert.config.vision_config.image_size
        self.square = (size, size)

    def embed_image(self, image: Tensor) -> Tensor:
        """Connector output [B, n_tokens, D] of one camera, image [B, 3, H, W] in [-1, 1]."""
        if len(image) > LARGEST_BATCH or tuple(image.shape[-2:]) != self.square:
            return self.flow.model.vlm_with_expert.embed_image(image)
        return self._run(("image", tuple(image.shape)), _EmbedImage, (image,))

    def integrate(self, inputs: dict[str, Tensor], x: Tensor, chosen: Tensor | None, noises: Tensor | None) -> Tensor:
        """As `FlowPolicy.integrate`."""
        if len(x) > LARGEST_BATCH:
            return self.flow.integrate(inputs, x, chosen, noises)
        rest = () if chosen is None else (chosen, noises)
        arguments = (*(inputs[name] for name in INPUTS), x, *rest)
        key = ("chunk", *(tuple(a.shape) for a in arguments), self.flow.eta, self.flow.sde)
        return self._run(key, _Integrate, arguments)

    def _run(self, key: tuple, module: type[nn.Module], arguments: tuple[Tensor, ...]) -> Tensor:
        if key not in self.graphs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # shapes become constants on purpose: one graph per shape
                self.graphs[key] = torch.jit.trace(module(self.flow).eval(), arguments, check_trace=False)
        return self.graphs[key](*arguments)
