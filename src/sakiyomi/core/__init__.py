"""The compiled core: few rows times all of the weights, at the speed of memory.

What is here works on float32 torch tensors; weights are packed once, in bf16, float32 or int8. A row's results don't
depend on the other rows of a call, nor on the number of threads. :class:`Decoder` computes whole forwards;
:class:`Linear` and :class:`GatedMlp` are pieces for drafters, each a call of its own. :class:`SuffixTrie` counts what
followed what.
"""

from sakiyomi.core.decoder import Decoder, DecoderLayer, Sequence
from sakiyomi.core.library import Format, available, resolve, threads
from sakiyomi.core.linear import GatedMlp, Linear
from sakiyomi.core.trie import SuffixTrie

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Format",
    "GatedMlp",
    "Linear",
    "Sequence",
    "SuffixTrie",
    "available",
    "resolve",
    "threads",
]
