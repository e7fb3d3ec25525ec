"""Suffix decoding: what followed the last tokens most often, in this text and in everything written before."""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi import core
from sakiyomi.core.trie import SuffixDrafts, SuffixTrie
from sakiyomi.errors import OptionError
from sakiyomi.files import read_arrays, replace_file
from sakiyomi.interfaces import Draft, GoOn, always
from sakiyomi.sampling import SamplingParams

_FORMAT, _FORMAT_VERSION = "sakiyomi-suffix", "1"
_DTYPES = {"tokens": ("I32",), "lengths": ("I64",), "texts": ("I64",)}  # as safetensors calls them


class SuffixDrafter:
    """Proposes what followed the longest matches most often: in the sequence itself, and in all outputs so far.

    Counts every run of up to ``depth`` tokens, in a trie of each sequence and in one of the outputs of all sequences,
    which remembers the last ``max_tokens`` tokens. A draft ends where the product of its confidences is less than
    ``min_survival``. ``tree``: drafts have branches, at most ``max_nodes`` tokens in all. ``reference``: token ids of
    any text (a document, earlier answers) to know from the start; it is never forgotten, nor counted in ``max_tokens``,
    nor saved. :class:`SuffixDrafts` has the rule.

    No model, no training; needs the compiled core. Sessions may be used from several threads, each session from one at
    a time. Raises OptionError. After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
    """

    name = "suffix"
    costs = None
    samples = False
    prefixes = False

    def __init__(
        self,
        *,
        depth: int = 32,
        max_tokens: int = 2**17,
        min_survival: float = 0.05,
        tree: bool = True,
        max_nodes: int = 32,
        reference: Sequence[int] = (),
    ) -> None:
        if not core.available():
            raise OptionError("drafter='suffix': needs the compiled core, which isn't installed; use 'ngram'")
        _check("depth", depth, 2, 1024)
        _check("max_tokens", max_tokens, 1, 2**31 - 1)
        _check("max_nodes", max_nodes, 1, 2**16)
        if not isinstance(min_survival, (int, float)) or not 0.01 <= min_survival <= 1:
            raise OptionError(f"min_survival={min_survival!r}: must be in 0.01..1")
        if not isinstance(tree, bool):
            raise OptionError(f"tree={tree!r}: must be True or False")
        self._depth = depth
        self._drafting: dict[str, Any] = {"min_survival": min_survival, "tree": tree, "max_nodes": max_nodes}
        self._shared = SuffixTrie(depth, max_tokens)
        if not isinstance(reference, Sized):
            raise OptionError(f"reference={reference!r}: must be a sequence of token ids")
        if len(reference):
            text = self._shared.begin(kept=True)
            try:
                self._shared.append(text, reference)
            except ValueError as error:
                raise OptionError(f"reference: {error}") from None
            self._shared.end(text)

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> SuffixSession:
        """Begin a sequence with these token ids. Raises ValueError for what is no token id."""
        return SuffixSession(self.name, self._depth, prompt, self._shared, self._drafting)

    def save(self, path: str | os.PathLike[str], tokenizer: str | None = None) -> None:
        """Write what is remembered to a file, for :meth:`load`. Raises OptionError where it can't be written.

        ``tokenizer``: any text that tells the tokenizer of these token ids from others, like a hash of it. The
        reference isn't saved. Requests may go on meanwhile: what they wrote at one moment is saved.

        A safetensors file: ``tokens`` (int32) in the order in which they came; ``lengths`` (int64) of the pieces, and
        ``texts`` (int64), the text that each piece belongs to, numbered from 0 as they appear. Sequences that didn't
        overlap in time are a piece each, oldest first. Metadata: ``format``, ``version``, and ``tokenizer`` if given.
        """
        _check_tokenizer(tokenizer)
        from safetensors.numpy import save

        tokens, owners = (np.asarray(values) for values in self._shared.read())
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        lengths = np.diff(starts, append=len(tokens))
        _, first, inverse = np.unique(owners[starts], return_index=True, return_inverse=True)
        texts = np.argsort(np.argsort(first))[inverse]
        tensors = {"tokens": tokens, "lengths": lengths.astype(np.int64), "texts": texts.astype(np.int64)}
        metadata = {"format": _FORMAT, "version": _FORMAT_VERSION}
        if tokenizer is not None:
            metadata["tokenizer"] = tokenizer
        content = save(tensors, metadata)
        replace_file(path, lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: str | None = None, **options: Any) -> SuffixDrafter:
        """Return a drafter that remembers what :meth:`save` wrote, with the options of a new one.

        With the options of the saved drafter, its reference among them, its drafts are the same. Raises OptionError
        where the file or an option can't be used, or where the file was saved with another ``tokenizer`` than is given
        here: token ids mean nothing with another one. Where only one of the two is known, they aren't compared.
        """
        _check_tokenizer(tokenizer)
        tensors, written_with = _read(Path(path))
        if tokenizer is not None and written_with is not None and written_with != tokenizer:
            raise OptionError(f"{path}: holds what another tokenizer's model wrote; use another file")
        drafter = cls(**options)
        shared = drafter._shared
        texts, ends = tensors["texts"].tolist(), np.cumsum(tensors["lengths"]).tolist()
        last = {text: piece for piece, text in enumerate(texts)}
        open_: dict[int, int] = {}
        for piece, (text, start, end) in enumerate(zip(texts, [0, *ends], ends, strict=False)):
            if text not in open_:
                open_[text] = shared.begin()
            shared.append(open_[text], tensors["tokens"][start:end].tolist())
            if last[text] == piece:
                shared.end(open_.pop(text))
        return drafter


class SuffixSession:
    """The state of one sequence: its own trie, and its output's place in the shared one."""

    unread = 0

    def __init__(
        self, name: str, depth: int, prompt: Sequence[int], shared: SuffixTrie, drafting: dict[str, Any]
    ) -> None:
        self._name, self._shared = name, shared
        self._own = SuffixTrie(depth)
        self._text = self._own.begin()
        self._own.append(self._text, prompt)
        self._output = shared.begin()
        self._drafts = SuffixDrafts(self._own, self._text, shared, self._output, **drafting)

    def __del__(self) -> None:
        if hasattr(self, "_output"):
            self._shared.end(self._output)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained. Raises ValueError for what is no token id."""
        self._own.append(self._text, tokens)
        self._shared.append(self._output, tokens)

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return the most promising continuation: at most ``budget`` tokens in a row, none without a match."""
        return Draft(*self._drafts.draft(budget), self._name)


def _check(option: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise OptionError(f"{option}={value!r}: must be a whole number in {low}..{high}")


def _check_tokenizer(tokenizer: object) -> None:
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise OptionError(f"tokenizer={tokenizer!r}: must be a text that tells tokenizers apart, or None")


def _read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], str | None]:
    """Return the tensors of a file and the tokenizer it was saved with. Raises OptionError unless all is right."""

    def wrong(what: str) -> OptionError:
        return OptionError(f"{path}: {what}; must be a file that SuffixDrafter.save wrote")

    tensors, metadata = read_arrays(path, _FORMAT, _FORMAT_VERSION, _DTYPES, wrong)
    tokens, lengths, texts = (tensors[name] for name in _DTYPES)
    if len(lengths) != len(texts):
        raise wrong(f"there are {len(lengths)} lengths and {len(texts)} texts")
    if (lengths < 1).any() or (lengths > len(tokens)).any() or lengths.sum() != len(tokens):
        raise wrong(f"its lengths don't add up to its {len(tokens)} tokens")
    if (tokens < 0).any():
        raise wrong("it has negative tokens")
    # Numbered as they appear: each text is one that was there before, or the next.
    seen = np.maximum.accumulate(np.concatenate([[-1], texts]))
    if (texts < 0).any() or (texts > seen[:-1] + 1).any():
        raise wrong("its texts aren't numbered as they appear")
    return tensors, metadata.get("tokenizer")
