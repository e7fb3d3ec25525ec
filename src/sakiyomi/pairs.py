"""Which models draft for which: what a target and a draft model have in common, and how one drafts for the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.retokenised import CommonDrafter, TextDrafter, vocabulary
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Costs, Drafter, Target
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.text import Tokenizer

if TYPE_CHECKING:
    from rich.console import RenderableType

Way = Literal["same", "common", "text"]
WAYS: Mapping[str, str] = {
    "same": "token by token: the tokenizers are the same",
    "common": "in the tokens that both tokenizers have",
    "text": "as text, which the target's tokenizer makes tokens of",
}
LEAST_CONTEXT = 32
# Text was the better way in both pairs measured, where 26 and 80 % of the target's tokens were common: drafts in common
# tokens break off at each token that isn't. So common is for tokenizers that are nearly the same.
_MOSTLY = 0.9
_NEARLY_ALL = 0.99  # of the tokens of the same tokenizer: conversions fill vocabularies up in different ways
PAYS = 0.9  # a draft model whose row costs more than this part of the target's can't pay
_PROBES = (
    "The quick brown fox doesn't jump over 13 lazy dogs, does it?",
    "def f(x):\n    return {'a': [x ** 2, 0.5e-3]}  # done\n\n\tTabs and   spaces ",
    "先読みは速い。東京、한국어, Привет мир, naïve café",
    "🙂👩‍👩‍👧 ∑ → ≠ \u00a0…",
    "ALL CAPS, camelCase, snake_case, https://example.org/?q=1&r=2#top",
)


@dataclass(frozen=True, slots=True)
class Side:
    """A model as one side of a pair. ``weight_bytes``: memory of its weights, about; None where it isn't known."""

    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    weight_bytes: int | None = None
    costs: Costs | None = None

    @classmethod
    def of(cls, model: Target, tokenizer: Tokenizer, costs: Costs | None = None) -> Side:
        """Return the side of a model that is loaded."""
        config, dtype = getattr(model, "config", None), getattr(model, "dtype", None)
        size = None
        if isinstance(config, DecoderConfig) and isinstance(dtype, torch.dtype):
            size = _weight_bytes(config, dtype.itemsize, getattr(model, "weight_format", None) == "int8")
        return cls(tokenizer, model.vocab_size, model.context_length, size, costs)


@dataclass(frozen=True, slots=True)
class Pair:
    """What a target and a draft model are to each other.

    ``overlap``: the share of the target's tokens that the draft model's tokenizer has too. ``cost_ratio``: seconds of a
    row of the draft model by those of the target, None where costs aren't known. ``problems``: why it can't work.
    ``warnings``: why it may not pay. Each is one line that says what would work.
    """

    way: Way
    same_tokenizer: bool
    target_vocab_size: int
    draft_vocab_size: int
    common_tokens: int
    overlap: float
    target_context_length: int
    draft_context_length: int
    draft_weight_bytes: int | None
    cost_ratio: float | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return dataclasses.asdict(self)


def compare(target: Side, draft: Side) -> Pair:
    """Return what two models are to each other. Encodes a few texts; computes nothing."""
    ours, theirs = vocabulary(target.tokenizer), vocabulary(draft.tokenizer)
    common = ours.keys() & theirs.keys()
    overlap = len(common) / max(1, len(ours))
    same = _same_tokenizer(target.tokenizer, draft.tokenizer, ours, theirs)
    ratio = None
    if target.costs is not None and draft.costs is not None:
        context = min(LEAST_CONTEXT, draft.context_length)
        ratio = draft.costs.seconds(1, context) / target.costs.seconds(1, context)
    lost = [] if same else _lost(draft.tokenizer)
    problems, warnings = [], []
    if draft.context_length < LEAST_CONTEXT:
        problems.append(
            f"the draft model's context of {draft.context_length} tokens is too short to draft from: "
            f"use one of at least {LEAST_CONTEXT}"
        )
    elif draft.context_length < target.context_length:
        warnings.append(
            f"the draft model's context of {draft.context_length} tokens is shorter than the target's of "
            f"{target.context_length}: longer sequences go on without it; one with a longer context would draft on"
        )
    if len(lost) == len(_PROBES) and overlap < _MOSTLY:
        problems.append(
            "the draft model's tokenizer doesn't give back any text as it was, and has too few of the target's tokens "
            f"({overlap:.0%}): use a draft model of the target's family, or with a byte-level tokenizer"
        )
    elif lost:
        warnings.append(
            f"the draft model's tokenizer changes some texts, such as {lost[0]!r}: drafts there will be refused; "
            "one with a byte-level tokenizer changes none"
        )
    if (slow := _slow(target, draft, ratio)) is not None:
        warnings.append(slow)
    if same and (differing := _special(ours, theirs, target.tokenizer, draft.tokenizer)):
        warnings.append(
            f"special tokens differ, such as {differing[0]!r}: the draft model doesn't know the target's as such; "
            "one of the same family and version does"
        )
    ends, draft_ends = _ends(target.tokenizer, ours), _ends(draft.tokenizer, theirs)
    if ends and not ends & draft_ends:
        warnings.append(
            f"the target ends a text with {' or '.join(sorted(ends))}, the draft model with "
            f"{' or '.join(sorted(draft_ends)) or 'nothing'}: ends won't be drafted; one tuned on the same chats would"
        )
    return Pair(
        way="same" if same else "common" if overlap >= _MOSTLY else "text",
        same_tokenizer=same,
        target_vocab_size=target.vocab_size,
        draft_vocab_size=draft.vocab_size,
        common_tokens=len(common),
        overlap=overlap,
        target_context_length=target.context_length,
        draft_context_length=draft.context_length,
        draft_weight_bytes=draft.weight_bytes,
        cost_ratio=ratio,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def draft_model(
    model: Target,
    tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    target_vocab_size: int,
    *,
    costs: Costs | None = None,
    way: str = "auto",
    branches: int = 2,
) -> Drafter:
    """Return a drafter that drafts with a model. ``way``: one of WAYS; "auto" is what suits the tokenizers.

    Raises OptionError for a model that can't draft for this target, or a way that there isn't or that can't work here.
    """
    if way != "auto" and way not in WAYS:
        raise OptionError(f"draft_model: way={way!r}: must be one of auto, {', '.join(WAYS)}")
    target = Side(target_tokenizer, target_vocab_size, model.context_length)
    pair = compare(target, Side.of(model, tokenizer))
    if pair.problems:
        raise OptionError(f"draft_model: {pair.problems[0]}")
    if way == "same" and not pair.same_tokenizer:
        raise OptionError(
            f"draft_model: way='same' can't work: its tokenizer isn't the target's ({pair.overlap:.0%} of the tokens "
            f"are common); {pair.way!r} would"
        )
    chosen = pair.way if way == "auto" else cast(Way, way)
    if chosen == "same":
        return ModelDrafter(model, target_vocab_size, costs=costs, branches=branches, eos_ids=target_tokenizer.eos_ids)
    if chosen == "common":
        return CommonDrafter(model, tokenizer, target_tokenizer, target_vocab_size, costs=costs, branches=branches)
    return TextDrafter(model, tokenizer, target_tokenizer, target_vocab_size, costs=costs)


def render(pair: Pair) -> RenderableType:
    """Return a table for a terminal, problems and warnings below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    size = "unknown" if pair.draft_weight_bytes is None else f"{pair.draft_weight_bytes / 1e6:,.0f} MB"
    rows = {
        "tokenizer": "the same" if pair.same_tokenizer else "another",
        "drafts": WAYS[pair.way],
        "vocabulary": f"target {pair.target_vocab_size:,}, draft model {pair.draft_vocab_size:,}; "
        f"{pair.overlap:.0%} of the target's tokens in both",
        "context": f"target {pair.target_context_length:,}, draft model {pair.draft_context_length:,}",
        "weights": f"draft model {size}",
        "cost of a row": "not measured" if pair.cost_ratio is None else f"{pair.cost_ratio:.2f} of the target's",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    lines = [Text.assemble(("can't work: ", "bold red"), problem) for problem in pair.problems]
    lines += [Text.assemble(("note: ", "bold yellow"), warning) for warning in pair.warnings]
    return Group(table, *lines)


def _same_tokenizer(target: Tokenizer, draft: Tokenizer, ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Return whether ids mean the same in both: in the vocabularies, but for filling at their ends, and in texts."""
    common = ours.keys() & theirs.keys()
    return (
        len(common) >= _NEARLY_ALL * max(len(ours), len(theirs))
        and all(ours[token] == theirs[token] for token in common)
        and all(target.encode(text, special=False) == draft.encode(text, special=False) for text in _PROBES)
    )


def _lost(tokenizer: Tokenizer) -> list[str]:
    """Return the probes that a tokenizer doesn't give back as they were."""
    return [text for text in _PROBES if tokenizer.decode(tokenizer.encode(text, special=False), special=True) != text]


def _special(ours: Mapping[str, int], theirs: Mapping[str, int], target: Tokenizer, draft: Tokenizer) -> list[str]:
    """Return the special tokens that are not the same in both."""
    found: list[str] = []
    for tokenizer in (target, draft):
        added = tokenizer.fast.get_added_tokens_decoder().values()
        found += [token.content for token in added if ours.get(token.content) != theirs.get(token.content)]
    return list(dict.fromkeys(found))


def _ends(tokenizer: Tokenizer, ids: Mapping[str, int]) -> set[str]:
    return {token for token, id in ids.items() if id in tokenizer.eos_ids}


def _slow(target: Side, draft: Side, ratio: float | None) -> str | None:
    """Return what is to be said of a draft model that isn't cheaper than the target."""
    if ratio is not None:
        said = f"takes {ratio:.2f} of the time of the target's" if ratio > PAYS else None
    elif draft.weight_bytes and target.weight_bytes and draft.weight_bytes > PAYS * target.weight_bytes:
        said = f"reads {draft.weight_bytes / target.weight_bytes:.2f} of the weights of the target's"
    else:
        said = None
    return said and f"a row of the draft model {said}: that can't pay; use a model several times smaller"


def row_weights(config: DecoderConfig) -> int:
    """Return how many weights a row is multiplied with: those of the layers and of the head."""
    heads, head_dim, hidden = config.heads + config.kv_heads, config.head_dim, config.hidden_size
    layer = 2 * heads * head_dim * hidden + 3 * hidden * config.intermediate_size
    return config.layers * layer + config.vocab_size * hidden


def _weight_bytes(config: DecoderConfig, width: int, int8: bool) -> int:
    """Return about how many bytes weights of so many bytes each take; integers are one."""
    table = 0 if config.tied and not int8 else config.vocab_size * config.hidden_size * width
    return row_weights(config) * (1 if int8 else width) + table
