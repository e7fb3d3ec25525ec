"""What a decoder of the Llama family is: its configuration, its weights by name, and its test of exactness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sakiyomi.errors import CapacityError, CorruptModelError, UnsupportedModelError
from sakiyomi.interfaces import Target, TargetSequence, Work
from sakiyomi.rope import inverse_frequencies, rope_parameters

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The dimensions and options of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    intermediate_size: int
    norm_eps: float
    tied: bool
    windows: tuple[int | None, ...]  # per layer: how many tokens back attention reaches, None for all
    rope: Mapping[str, Any]

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json, with the defaults that transformers has for what it leaves out.

        Raises UnsupportedModelError for what no target runs, CorruptModelError for what makes no sense.
        """
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise UnsupportedModelError(f"architecture {kind!r} is not supported: {', '.join(ARCHITECTURES)} are")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"activation {config['hidden_act']!r} is not supported: silu is")
        if config.get("quantization_config"):
            raise UnsupportedModelError("quantised weights in Hugging Face layout are not supported: GGUF files are")
        try:
            heads, hidden, layers = (
                int(config[k]) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers")
            )
            kv_heads = config.get("num_key_value_heads", {"llama": heads, "mistral": 8}.get(kind, 32))
            found = cls(
                architecture=kind,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                layers=layers,
                heads=heads,
                kv_heads=int(kv_heads or heads),
                head_dim=int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)),
                context_length=int(config["max_position_embeddings"]),
                intermediate_size=int(config["intermediate_size"]),
                norm_eps=float(config["rms_norm_eps"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                windows=_windows(config, layers),
                rope=rope_parameters(config),
            )
            for name, size in (
                ("vocab_size", found.vocab_size),
                ("hidden_size", hidden),
                ("intermediate_size", found.intermediate_size),
                ("max_position_embeddings", found.context_length),
            ):
                if size < 1:
                    raise ValueError(f"{name} {size} must be at least 1")
            inverse_frequencies(found.rope, found.head_dim, found.context_length)
        except KeyError as error:
            raise CorruptModelError(f"config.json of a {kind} model lacks {error.args[0]!r}") from None
        except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise CorruptModelError(f"config.json of a {kind} model has a value that makes no sense: {error}") from None
        least = min(layers, heads, found.kv_heads, found.head_dim)
        if least < 1 or len(found.windows) != layers or heads % found.kv_heads:
            raise CorruptModelError(f"config.json of a {kind} model: its layers or heads don't fit together")
        return found


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window. Mistral slides in all layers, Qwen only where it is switched on."""
    if config["model_type"] == "llama":
        return (None,) * layers
    if config["model_type"] == "mistral":
        window = config.get("sliding_window", 4096)
        return (None if window is None else int(window),) * layers
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return tuple(int(window) if window is not None and kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, slots=True)
class Stack:
    """Linears of one input that are computed as one: their names in the weights, and their out_features."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    needs_bias: bool = False  # if not, there may be biases


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a decoder layer is made of, by name."""

    attention_norm: str
    qkv: Stack
    query_norm: str | None
    key_norm: str | None
    output: Stack
    mlp_norm: str
    gate_up: Stack
    down: Stack

    @classmethod
    def of(cls, config: DecoderConfig, index: int) -> LayerNames:
        """Return the names in layer ``index``."""
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        normed = config.architecture == "qwen3"
        return cls(
            attention_norm=prefix + "input_layernorm.weight",
            qkv=Stack(
                (attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                (q_size, kv_size, kv_size),
                config.hidden_size,
                needs_bias=config.architecture == "qwen2",
            ),
            query_norm=attention + "q_norm.weight" if normed else None,
            key_norm=attention + "k_norm.weight" if normed else None,
            output=Stack((attention + "o_proj",), (config.hidden_size,), q_size),
            mlp_norm=prefix + "post_attention_layernorm.weight",
            gate_up=Stack((mlp + "gate_proj", mlp + "up_proj"), (config.intermediate_size,) * 2, config.hidden_size),
            down=Stack((mlp + "down_proj",), (config.hidden_size,), config.intermediate_size),
        )


class Reader:
    """Reads weights by name and checks their shapes."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor in the target's dtype."""
        return self.table(name, *shape).to(self._dtype)

    def weights(self, stack: Stack) -> list[torch.Tensor]:
        """Return the weights of a stack in the target's dtype, each [size, in_features]."""
        return [
            self(f"{name}.weight", size, stack.in_features) for name, size in zip(stack.names, stack.sizes, strict=True)
        ]

    def biases(self, stack: Stack) -> list[torch.Tensor] | None:
        """Return the biases of a stack in the target's dtype, each [size]; None where it has none."""
        if f"{stack.names[0]}.bias" not in self and not stack.needs_bias:
            return None
        return [self(f"{name}.bias", size) for name, size in zip(stack.names, stack.sizes, strict=True)]

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Return the weight of a norm, float32."""
        return self.table(name, size).float()

    def table(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor as it is stored: only the rows that are used need ever be read."""
        try:
            tensor = self._weights[name]
        except KeyError:
            raise CorruptModelError(f"the weights lack {name!r}, which config.json calls for") from None
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModelError(
                f"{name!r} is {tensor.dtype}: weights in float32, bfloat16 or float16 are supported"
            )
        if tuple(tensor.shape) != shape:
            raise CorruptModelError(f"{name!r} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor

    def frequencies(self, config: DecoderConfig) -> tuple[torch.Tensor, float]:
        """Return the angles per position [head_dim / 2], float32, and the factor on cosines and sines."""
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        if "rope_freqs.weight" in self:  # GGUF files of Llama 3 hold their scaling as divisors
            frequencies = frequencies / self.table("rope_freqs.weight", config.head_dim // 2).float()
        return frequencies, factor


def check_capacity(work: Sequence[Work], context_length: int) -> None:
    """Raise CapacityError if a sequence would outgrow the context."""
    for item in work:
        if (length := item.sequence.length + len(item.tokens)) > context_length:
            raise CapacityError(f"a sequence of {length} tokens: the context holds {context_length}")


def rows_are_invariant(target: Target, sequence: TargetSequence, vocab_size: int | None = None) -> bool:
    """Compare rows computed in one call with the same rows computed in uneven pieces, bit for bit.

    The rows follow what ``sequence`` holds. ``vocab_size``: of the ids that may be given, if the head has more.
    """
    start, sizes = sequence.length, (1, 3, 8, 2, 6)
    count = min(sum(sizes), target.context_length - start)
    ids = torch.randint(vocab_size or target.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    (expected,) = target.forward([Work(sequence, ids, None, count)])
    sequence.truncate(start)
    found = []
    for size in sizes:
        if piece := ids[sequence.length - start :][:size]:
            found.append(target.forward([Work(sequence, piece, None, len(piece))])[0].logits)
    return torch.equal(expected.logits, torch.cat(found))
