"""A Hugging Face tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sakiyomi.errors import CorruptModelError, UnsupportedModelError
from sakiyomi.gguf_file import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # sentencepiece's visible space

# How the byte-level tokenizers cut text before any merge.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True)
class _Pre:
    """A pre-tokenizer: cuts applied one after another, and what goes with them by default."""

    cuts: tuple[str, ...]
    ignore_merges: bool = False  # a whole piece that is in the vocabulary is one token, merges or not
    add_bos: bool = False
    nfc: bool = False


_GPT2_PRE = _Pre((_GPT2,))
_DIGITS_PRE = _Pre((r"\p{N}", _GPT2))
_LLAMA3_PRE = _Pre((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRES = {  # tokenizer.ggml.pre
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais"), _GPT2_PRE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_PRE),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_PRE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre((_LLAMA3,))),
    "qwen2": _Pre((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Pre((_QWEN2,)),
    "stablelm2": _Pre((_QWEN2,)),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": _Pre(_DEEPSEEK_CODER),
}

# Old files name a base model's end of text as eos although the chat template ends turns with one of these.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"})


@dataclass(frozen=True)
class SpecialIds:
    """The token ids that a model's config names; ``ends`` are all that end an answer, eos first."""

    bos: int | None
    eos: int | None
    pad: int | None
    ends: tuple[int, ...]


def write_tokenizer(file: GGUFFile, folder: Path) -> SpecialIds:
    """Write tokenizer.json and tokenizer_config.json to ``folder`` and return the special token ids.

    Raises UnsupportedModelError for a tokenizer or pre-tokenizer that we don't know, CorruptModelError for
    tables that contradict each other.
    """
    tokens = file.array("tokenizer.ggml.tokens", str)
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        types = file.array("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise CorruptModelError(f"{file.path} has {len(tokens)} tokens and {len(types)} token types")

    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, bos_by_default = _byte_level(file, tokens, types)
    elif kind == "llama":
        tokenizer, bos_by_default = _sentencepiece(file, tokens, types), True
    else:
        raise UnsupportedModelError(f"{file.path} has the tokenizer {kind!r}; gpt2 and llama work")
    # Added tokens are found whole in a text; those of the vocabulary keep their ids.
    tokenizer.add_special_tokens(_added_tokens(tokens, types, _CONTROL, _UNKNOWN))
    tokenizer.add_tokens(_added_tokens(tokens, types, _USER_DEFINED))

    ids = _special_ids(file, tokens, types)
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", bos_by_default)) and ids.bos is not None
    add_eos = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)) and ids.eos is not None
    if add_bos or add_eos:
        tokenizer.post_processor = _template(tokens, ids.bos if add_bos else None, ids.eos if add_eos else None)
    tokenizer.save(str(folder / "tokenizer.json"))

    unknown = _token_id(file, tokens, "unknown_token_id")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that takes tokenizer.json as it is
        "bos_token": None if ids.bos is None else tokens[ids.bos],
        "eos_token": None if ids.eos is None else tokens[ids.eos],
        "pad_token": None if ids.pad is None else tokens[ids.pad],
        "unk_token": None if unknown is None else tokens[unknown],
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": file.text("tokenizer.chat_template", "") or None,
    }
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
    return ids


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether texts begin with bos unless the file says otherwise."""
    fallback = "qwen2" if file.text("general.architecture").startswith("qwen") else "default"
    name = file.text("tokenizer.ggml.pre", fallback)
    pre = _PRES.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"{file.path} has the unknown pre-tokenizer {name!r}; these work: {', '.join(sorted(_PRES))}"
        )
    merges = []
    for line in file.array("tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    model = _bpe(file, _vocabulary(tokens, types), merges, ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in pre.cuts]
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return a sentencepiece BPE tokenizer with byte fallback."""
    vocabulary = _vocabulary(tokens, types)
    scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise CorruptModelError(f"{file.path} has {len(tokens)} tokens and {len(scores)} scores")
    pieces = {token: i for token, i in vocabulary.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    # Sentencepiece merges the two neighbours whose union has the best score, so every way to build a token
    # from two others is a merge, with its rank. The sort is stable: equal scores keep the order of the ids.
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(pieces, key=lambda token: -scores[pieces[token]])
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    unknown = _token_id(file, tokens, "unknown_token_id", 0)
    tokenizer = Tokenizer(
        _bpe(
            file,
            vocabulary,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _added_tokens(tokens: list[str], types: list[int], *kinds: int) -> list[AddedToken]:
    return [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind in kinds]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    # Unused entries are padding of the embedding: they stand for no text.
    return {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}


def _bpe(file: GGUFFile, vocabulary: Mapping[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(dict(vocabulary), merges, **options)
    except Exception as error:  # the tokenizers package raises bare Exceptions
        raise CorruptModelError(f"{file.path} has tokenizer tables that don't fit together: {error}") from error


def _special_ids(file: GGUFFile, tokens: list[str], types: list[int]) -> SpecialIds:
    eos, eot, eom = (_token_id(file, tokens, f"{name}_token_id") for name in ("eos", "eot", "eom"))
    if eot is None:
        named = (i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_TURN)
        eot = next(named, None)
    return SpecialIds(
        bos=_token_id(file, tokens, "bos_token_id"),
        eos=eos,
        pad=_token_id(file, tokens, "padding_token_id"),
        ends=tuple(dict.fromkeys(i for i in (eos, eot, eom) if i is not None)),
    )


def _token_id(file: GGUFFile, tokens: list[str], key: str, default: int | None = None) -> int | None:
    key = f"tokenizer.ggml.{key}"
    if key not in file.metadata and default is None:
        return None
    token_id: int = file.integer(key, default)
    if not 0 <= token_id < len(tokens):
        raise CorruptModelError(f"{file.path} has {key} = {token_id} and only {len(tokens)} tokens")
    return token_id


def _template(tokens: list[str], bos: int | None, eos: int | None) -> processors.TemplateProcessing:
    """Return the post-processor that puts bos before and eos after each text."""
    before = [] if bos is None else [f"{tokens[bos]}"]
    after = [] if eos is None else [f"{tokens[eos]}"]
    pair = [*before, "$B:1", *after]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *pair],
        special_tokens=[(tokens[i], i) for i in (bos, eos) if i is not None],
    )
