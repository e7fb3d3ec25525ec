"""Peak memory of a process that loads a model and answers one prompt.

    python benchmarks/memory.py [--model smollm2-135m] [--dtype auto] [--kernels auto]

Linux and macOS. "rest" is what comes on top of weights and K/V: Python, torch and working memory; pages of the model
file that are mapped for embeddings are counted, though the system may take them back.
"""

from __future__ import annotations

import argparse
import resource
import sys

from sakiyomi import SamplingParams, load
from sakiyomi.models import open_weights, resolve


def peak_mb() -> float:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    imported = peak_mb()
    llm = load(args.model, dtype=args.dtype, kernels=args.kernels)
    loaded = peak_mb()
    prompt = "Write down everything you know about lighthouses, and then say it all again. " * 16
    setting = llm.speculation()
    assert setting
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    request = llm.engine.request(llm.encode(prompt), params, setting.drafters, setting.policy)
    for _ in llm.engine.run(request):
        pass
    weights = open_weights(resolve(args.model))
    parameters = sum(weights[name].numel() for name in weights) * llm.target.dtype.itemsize / (1 << 20)
    kv = request.sequence.nbytes / (1 << 20)
    peak = peak_mb()
    print(f"torch and sakiyomi imported {imported:.0f} MB, model loaded {loaded:.0f} MB, peak {peak:.0f} MB")
    print(f"weights {parameters:.0f} MB + K/V {kv:.0f} MB + rest {peak - parameters - kv:.0f} MB")


if __name__ == "__main__":
    main()
