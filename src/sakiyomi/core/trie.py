"""Counted suffix tries: how often each run of tokens occurs in some texts, and what follows it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64

from sakiyomi.core import library
from sakiyomi.core.library import DraftOptions

_TOKENS = "i"  # an array's code for int32


class SuffixTrie:
    """Counts every run of up to ``depth`` tokens in texts that grow, each on its own, in any turns.

    ``max_tokens``: how many tokens are remembered, in all texts together; the oldest are forgotten first, exactly as if
    their texts began later. None for all. A token costs a few operations for each of the last ``depth`` tokens of its
    text. Memory: at most about 100 bytes for each token and 200 for each text, and 4 * ``depth`` for one that is open.
    After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).

    Tokens are ints, 0 <= token < 2**31: anything else is a ValueError, and then nothing is appended. So are a depth
    that isn't in 2..1024 and a text that isn't open. When memory runs out in :meth:`append`, MemoryError is raised and
    everything is forgotten; the trie can be used on. During a call other Python threads run; calls of several threads
    on one trie take turns.
    """

    def __init__(self, depth: int = 32, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: must be at least 1, or None")
        self._library = library.library()
        self.depth, self.max_tokens = depth, max_tokens
        self.handle = library.make("saki_trie_new", depth, max_tokens or 0)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.saki_trie_free(self.handle)
            del self.handle

    def __len__(self) -> int:
        """Return how many tokens are remembered, but for those of texts that are kept."""
        return int(self._library.saki_trie_size(self.handle))

    @property
    def nodes(self) -> int:
        """Nodes in use, the root aside: one where a run ends or where what follows it differs."""
        return int(self._library.saki_trie_nodes(self.handle))

    @property
    def nbytes(self) -> int:
        """Bytes that all of it takes."""
        return int(self._library.saki_trie_bytes(self.handle))

    def begin(self, *, kept: bool = False) -> int:
        """Begin a text and return its number.

        ``kept``: it is never forgotten, and ``max_tokens``, ``len`` and :meth:`read` are about the others. Of equally
        frequent runs, one that occurs in it comes first.
        """
        text = c_int64()
        library.check(self._library.saki_trie_begin(self.handle, kept, ctypes.byref(text)))
        return text.value

    def append(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        given = _array(tokens)
        code = self._library.saki_trie_append(self.handle, text, given.buffer_info()[0], len(given))
        if code:
            library.check(code)

    def end(self, text: int) -> None:
        """Say that a text won't grow any more. It is remembered until its turn to be forgotten, if it isn't kept."""
        if not hasattr(self, "handle"):
            return  # all is being deleted, in any order, and a text's owner comes after its trie
        library.check(self._library.saki_trie_end(self.handle, text))

    def count(self, run: Sequence[int]) -> int:
        """Return how often a run of tokens occurs; 0 for more than ``depth`` tokens."""
        given = _array(run)
        return int(self._library.saki_trie_count(self.handle, given.buffer_info()[0], len(given)))

    def following(self, run: Sequence[int], most: int = 8) -> list[tuple[int, int]]:
        """Return the tokens that follow a run, and how often each does: at most ``most``, the most frequent first.

        Of equally frequent ones, the one whose occurrence began last comes first; one in a text that is kept
        counts as later than all others.
        """
        given, tokens, counts, found = _array(run), array(_TOKENS, [0]) * most, array("q", [0]) * most, c_int64()
        code = self._library.saki_trie_following(
            self.handle,
            given.buffer_info()[0],
            len(given),
            most,
            tokens.buffer_info()[0],
            counts.buffer_info()[0],
            ctypes.byref(found),
        )
        library.check(code)
        return list(zip(tokens, counts, strict=True))[: found.value]

    def ends(self, text: int) -> list[int]:
        """Return how often the last 1, 2, .. ``depth`` - 1 tokens of an open text occur, the end itself included."""
        counts, found = (c_int64 * self.depth)(), c_int64()
        library.check(self._library.saki_trie_ends(self.handle, text, counts, ctypes.byref(found)))
        return counts[: found.value]

    def read(self) -> tuple[array[int], array[int]]:
        """Return the tokens remembered, in the order in which they came, and for each a number of its text.

        All as they are at one moment, whatever other threads do. Texts that are kept aren't among them.
        """
        room, found = len(self), c_int64()
        while True:
            tokens, texts = array(_TOKENS, [0]) * room, array("q", [0]) * room
            places = tokens.buffer_info()[0], texts.buffer_info()[0]
            library.check(self._library.saki_trie_read(self.handle, room, *places, ctypes.byref(found)))
            if found.value <= room:
                return tokens[: found.value], texts[: found.value]
            room = found.value + found.value // 8  # the trie grew meanwhile, and may be growing


class SuffixDrafts:
    """Drafts what follows a text, from a trie of its own and from one of many texts. One thread at a time.

    ``text`` is the whole of what is to be continued, ``shared_text`` the end of it that the shared trie has too, or an
    empty one. For each number of last tokens that occurred before, in either trie, the most frequent next token is
    followed again and again. Once match and draft are as long as the trie is deep, their last occurrence is copied, as
    far as its text goes. Where a draft comes to the end of the text itself, it goes on as it began.

    A token's share is how often it occurs of the times that what is before it does, and 1 where it is copied. For the
    first one these are the occurrences of the match but for the text's own end, and one more than was seen: what was
    seen once is less sure. A token's confidence is its share, times n / (n + 1) where n tokens matched so far: those
    that occurred, and those drafted. Its survival is the product of the confidences up to it; it ends the draft where
    it is less than ``min_survival``. The highest sum of survivals wins; of equal ones the longer match, then the
    text's own trie.

    ``tree``: around the winner, the likeliest to survive of all the tokens that occurred, at most ``max_nodes``.
    """

    def __init__(
        self,
        own: SuffixTrie,
        text: int,
        shared: SuffixTrie,
        shared_text: int,
        *,
        min_survival: float,
        tree: bool,
        max_nodes: int,
    ) -> None:
        if not 0 < min_survival <= 1:
            raise ValueError(f"min_survival={min_survival}: must be more than 0, at most 1")
        self._library = library.library()
        self._tries = own, shared  # kept alive
        room = max_nodes if tree else int(max(own.depth, shared.depth) / min_survival) + 1  # the survival ends a chain
        self._options = DraftOptions(0, min_survival, int(tree), room)
        self._tokens, self._parents = array(_TOKENS, [0]) * room, array(_TOKENS, [0]) * room
        self._confidences, self._found = array("d", [0.0]) * room, c_int64()
        self._chain = array(_TOKENS, range(-1, room - 1))
        self._arguments = (
            own.handle,
            text,
            shared.handle,
            shared_text,
            ctypes.byref(self._options),
            self._tokens.buffer_info()[0],
            self._parents.buffer_info()[0],
            self._confidences.buffer_info()[0],
            ctypes.byref(self._found),
        )

    def draft(self, budget: int) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[float, ...]]:
        """Return tokens, parents (None: a chain) and confidences of a draft: at most ``budget`` tokens in a row."""
        self._options.budget = budget
        code = self._library.saki_trie_draft(*self._arguments)
        if code:
            library.check(code)
        found = self._found.value
        parents = self._parents[:found]
        return (
            tuple(self._tokens[:found]),
            None if parents == self._chain[:found] else tuple(parents),
            tuple(self._confidences[:found]),
        )


def _array(tokens: Sequence[int]) -> array[int]:
    """Return tokens as the library takes them. Raises ValueError for what is no int32; the library looks further."""
    try:
        return array(_TOKENS, tokens if isinstance(tokens, (list, tuple)) else list(tokens))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens must be ints, 0 <= token < 2**31: {error}") from None
