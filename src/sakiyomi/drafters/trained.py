"""Drafters trained on a target's own states: what they take from the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a trained drafter may use of its target, and has to fit.

    ``embedding``, ``head``: [vocab_size, hidden_size]; ``norm``: [hidden_size], the weight of the RMS norm before the
    head, None where it isn't known. ``layers``: how many decoder layers there are. ``tokenizer``: a text that tells its
    tokenizer from others.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    context_length: int
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor | None = None
    norm_eps: float = 1e-5
    tokenizer: str | None = None
