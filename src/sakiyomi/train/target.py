"""What training takes from the target: its states, and weights to read and to begin from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sakiyomi.drafters.trained import TargetParts
from sakiyomi.errors import UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Target, Work
from sakiyomi.rope import inverse_frequencies
from sakiyomi.targets.decoder import DecoderConfig, LayerNames, Reader
from sakiyomi.train.networks import LayerShape

APART = 0.1  # total variation between two ways to compute a distribution: rounding in bfloat16 makes a tenth of that


@dataclass(frozen=True)
class Teacher:
    """The target as training sees it.

    ``layer``: the weights of its last decoder layer by the names that they have in it; nothing where it is of another
    kind than the drafter's layers are. ``layer_config``: of the drafter's layer, in Hugging Face layout. ``name``: what
    it is called in cards and configurations; ``architectures``: of its own. ``fingerprint``: tells it from others.
    """

    target: Target
    parts: TargetParts
    layer: Mapping[str, torch.Tensor]
    layer_config: Mapping[str, Any]
    name: str
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    fingerprint: str = ""

    @classmethod
    def of(
        cls,
        target: Target,
        parts: TargetParts,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        name: str,
        intermediate: int | None = None,
        *,
        fingerprint: str = "",
        by_states: bool = True,
    ) -> Teacher:
        """Return a target with its config.json and its weights.

        The drafter's layer has the dimensions of the target's, if that is of the Llama family; else usual ones for its
        width. ``intermediate``: another width of its MLP. ``by_states``: whether its states are learned from. Raises
        UnsupportedModelError where its logits are more than the head times the states, as the training takes them.
        """
        if by_states:
            _check_head(target, parts, name)
        about: dict[str, Any] = {"name": name, "fingerprint": fingerprint}
        if config.get("architectures"):
            about["architectures"] = tuple(config["architectures"])
        try:
            decoder = DecoderConfig.from_huggingface(config)
        except UnsupportedModelError:
            return cls(target, parts, {}, _usual(parts, intermediate), **about)
        layer_config = {
            "model_type": "llama",
            "hidden_size": decoder.hidden_size,
            "intermediate_size": intermediate or decoder.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": decoder.heads,
            "num_key_value_heads": decoder.kv_heads,
            "head_dim": decoder.head_dim,
            "hidden_act": "silu",
            "vocab_size": decoder.vocab_size,
            "max_position_embeddings": decoder.context_length,
            "rms_norm_eps": decoder.norm_eps,
            "rope_theta": decoder.rope["rope_theta"],
            "rope_parameters": {name: value for name, value in decoder.rope.items() if value is not None},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
        return cls(target, parts, _last_layer(decoder, weights), layer_config, **about)

    def shape(self) -> LayerShape:
        """Return the dimensions of the drafter's layer."""
        config = DecoderConfig.from_huggingface(self.layer_config)
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        return LayerShape(
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            norm_eps=config.norm_eps,
            frequencies=frequencies,
            rope_factor=factor,
        )

    def default_layers(self) -> tuple[int, ...]:
        """Return the layers whose states EAGLE-3 reads."""
        count = self.parts.layers
        return tuple(sorted({min(2, count), count // 2, max(count - 3, 0)}))


def _last_layer(config: DecoderConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    read = Reader(weights, torch.float32)
    names = LayerNames.of(config, config.layers - 1)
    prefix = f"model.layers.{config.layers - 1}."
    found = {
        f"{name.removeprefix(prefix)}.weight": tensor
        for stack in (names.qkv, names.output, names.gate_up, names.down)
        for name, tensor in zip(stack.names, read.weights(stack), strict=True)
    }
    for name in (names.attention_norm, names.mlp_norm):
        found[name.removeprefix(prefix)] = read.norm(name, config.hidden_size)
    # With biases or norms that a drafter's layer hasn't, what is seen where is another: without them it is no start.
    if names.query_norm or f"{names.qkv.names[0]}.bias" in weights:
        del found["self_attn.q_proj.weight"], found["self_attn.k_proj.weight"]
    return found


def fingerprint(folder: Path, computes: str) -> str:
    """Return a text that tells a model from others, by its weights, its config.json, and what it ``computes`` in."""
    found = hashlib.sha256(computes.encode())
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        found.update(f" {path.name} ".encode())
        with path.open("rb") as file:
            while part := file.read(2**20):
                found.update(part)
    return found.hexdigest()[:16]


@torch.no_grad()
def _check_head(target: Target, parts: TargetParts, name: str) -> None:
    """Raise UnsupportedModelError where a text's logits aren't the head times what it reads."""
    tokens = [(1 + 7919 * i) % parts.vocab_size for i in range(min(16, parts.context_length))]
    work = Work(target.new_sequence(), tokens, None, len(tokens))
    (output,) = target.forward([work], hidden_layers=(HEAD_INPUT,))
    head = parts.head.detach()
    found = (output.hidden[0].to(head.device, head.dtype) @ head.t()).float().softmax(1)
    apart = (found - output.logits.to(head.device).float().softmax(1)).abs().sum(1) / 2
    if not float(apart.mean()) <= APART:  # also where it isn't a number
        raise UnsupportedModelError(
            f"{name}: its logits are not its head times its last states (a bias, a scale, or a soft cap): only "
            "--kind table can be trained for it"
        )


def _usual(parts: TargetParts, intermediate: int | None) -> dict[str, Any]:
    """Return the configuration of a layer as wide as a target that isn't of the Llama family."""
    hidden = parts.hidden_size
    head_dim = next(size for size in (64, 32, 16, 8, 4, 2, hidden) if hidden % size == 0)
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate or -(-hidden * 8 // 3 // 64) * 64,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": hidden // head_dim,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": parts.vocab_size,
        "max_position_embeddings": parts.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
