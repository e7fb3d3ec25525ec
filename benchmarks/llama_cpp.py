"""llama.cpp in a process of its own, so that benchmarks can time it call by call beside sakiyomi.

    from llama_cpp import LlamaCpp  # in a script of this folder

    with LlamaCpp(python, "smollm2-135m-bf16.gguf", n_ctx=1024, threads=2) as theirs:
        theirs.prefill(context)
        seconds, argmax = theirs.forward(rows)  # which are then removed from the cache again
        seconds, ids = theirs.decode(prompt, 64)

``python`` is the interpreter of a virtual environment with llama-cpp-python, built for the processor:

    CXXFLAGS="-fno-tree-dse -fno-dse" CMAKE_ARGS="-DGGML_NATIVE=ON" \
        pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36

The CXXFLAGS are for gcc 12 on processors with AMX: without them it drops the tile configuration as dead stores, and
Q4_0 and Q8_0 models die of an illegal instruction at the first forward of more than one row.

gguf_export.py writes the model. The process runs this file, reads a request per line of standard input and answers in
a line, both JSON: ``{"op": "forward", "ids": [1, 2]}``, see ``Worker``. What it times is llama_decode alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BATCH = 512  # tokens of a prompt that are evaluated together, llama.cpp's default
ROWS = 64  # most rows of a forward: the logits of all of them are kept


class LlamaCpp:
    """A model in llama.cpp, with one sequence.

    ``pause`` is how long the machine is left alone before and after each request: threads of OpenMP, which both sides
    have, go on spinning for milliseconds after their work, and would take a core from the side whose turn it is.
    ``flash_attention`` is off although llama.cpp would switch it on: with K/V in F16, its default and what runs here,
    that made eight rows after 256 tokens cost about twice as much on a processor with AVX-512 and AMX.
    ``facts`` says what runs: version, processor features, size of the weights, threads.
    """

    def __init__(
        self,
        python: str | Path,
        model: str | Path,
        *,
        n_ctx: int = 1024,
        threads: int = 2,
        flash_attention: bool = False,
        pause: float = 0.02,
    ) -> None:
        # -I: without it this folder would come first in sys.path, and this file would hide the package
        command = [python, "-I", __file__, model, "--n-ctx", n_ctx, "--threads", threads]
        command += ["--flash-attention"] * flash_attention
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pause = pause
        try:
            self.facts = self._answer()
        except RuntimeError:
            self.close()
            raise

    def prefill(self, ids: list[int]) -> tuple[float, int]:
        """Fill the cache with these tokens alone. Return the seconds and the greedy token that follows."""
        answer = self._ask(op="prefill", ids=ids)
        return answer["seconds"], answer["argmax"]

    def forward(self, ids: list[int], warm: int = 0) -> tuple[float, list[int]]:
        """Evaluate rows after what is in the cache, and remove them from it again. Return seconds and argmax per row.

        ``warm`` such calls come first, untimed: llama.cpp keeps the graph of its last call, and builds a new one where
        the number of rows was another.
        """
        answer = self._ask(op="forward", ids=ids, warm=warm)
        return answer["seconds"], answer["argmax"]

    def decode(self, ids: list[int], tokens: int) -> tuple[float, list[int]]:
        """Decode greedily from a prompt. Return seconds per token after the first, and all ids; the cache is lost."""
        answer = self._ask(op="decode", ids=ids, tokens=tokens)
        return answer["seconds"], answer["ids"]

    def close(self) -> None:
        """End the process."""
        if not self._process.stdin.closed:
            self._process.communicate(json.dumps({"op": "quit"}) + "\n")

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        time.sleep(self._pause)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        time.sleep(self._pause)
        return answer

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"llama.cpp: {answer['error']}")
        return answer


class Worker:
    """The other side of LlamaCpp: a method per request, each returning the answer."""

    def __init__(self, model: str, n_ctx: int, threads: int, flash_attention: bool) -> None:
        import numpy

        import llama_cpp as api  # the package

        self._api, self._numpy = api, numpy
        self._log = api.llama_log_callback(_log_errors)
        api.llama_log_set(self._log, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(os.fsencode(model), api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"can't load {model}")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, BATCH, BATCH
        params.n_outputs_max = params.n_outputs_max_per_seq = ROWS
        params.flash_attn_type = int(flash_attention)
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"can't make a context of {n_ctx} tokens for {model}")
        self._memory = api.llama_get_memory(self._context)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._most = api.llama_n_batch(self._context)  # less than BATCH where the context is smaller
        self._batch = api.llama_batch_init(self._most, 0, 1)
        self._n_ctx, self._length = api.llama_n_ctx(self._context), 0
        self.facts = {
            "llama_cpp_python": api.__version__,
            "system": api.llama_print_system_info().decode(),
            "weights_mb": api.llama_model_size(self._model) / 1e6,
            "n_ctx": self._n_ctx,
            "threads": api.llama_n_threads(self._context),
            "flash_attention": flash_attention,
        }

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Fill the cache from empty; ``argmax`` is of the last row."""
        self._api.llama_memory_clear(self._memory, False)
        self._length = 0
        seconds = 0.0
        for start in range(0, max(1, len(ids)), self._most):
            seconds += self._evaluate(ids[start : start + self._most], 1)
        return {"seconds": seconds, "argmax": self._argmax(1)[0]}

    def forward(self, ids: list[int], warm: int = 0) -> dict[str, Any]:
        """Evaluate rows and remove them again, ``warm`` times untimed first."""
        if len(ids) > (most := min(ROWS, self._most)):
            raise ValueError(f"{len(ids)} rows are more than {most}")
        for _ in range(warm + 1):
            before = self._length
            seconds = self._evaluate(ids, len(ids))
            self._api.llama_memory_seq_rm(self._memory, 0, before, -1)
            self._length = before
        return {"seconds": seconds, "argmax": self._argmax(len(ids))}

    def decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Decode greedily, ends ignored; ``seconds`` are per token after the first."""
        found = [self.prefill(ids)["argmax"]]
        seconds = 0.0
        while len(found) < tokens:
            seconds += self._evaluate(found[-1:], 1)
            found += self._argmax(1)
        return {"seconds": seconds / max(1, tokens - 1), "ids": found}

    def _evaluate(self, ids: list[int], outputs: int) -> float:
        """Append tokens to the sequence, with logits for the last ``outputs`` of them. Return the seconds."""
        if not ids or self._length + len(ids) > self._n_ctx:
            raise ValueError(f"{len(ids)} tokens after {self._length} don't go into a context of {self._n_ctx}")
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self._length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= len(ids) - outputs
        began = time.perf_counter()
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_synchronize(self._context)
        seconds = time.perf_counter() - began
        if status:
            raise ValueError(f"llama_decode returned {status}")
        self._length += len(ids)
        return seconds

    def _argmax(self, rows: int) -> list[int]:
        """Return the greedy token of each row of the last evaluation that has logits."""
        logits = self._api.llama_get_logits(self._context)
        return self._numpy.ctypeslib.as_array(logits, (rows, self._vocab)).argmax(-1).tolist()


def _log_errors(level: int, text: bytes, _: object) -> None:
    """Write what llama.cpp logs to standard error if it is an error, which is level 4."""
    if level == 4:
        sys.stderr.write(text.decode("utf-8", "replace"))


def main() -> None:
    """Answer requests until one says quit, or there are no more."""
    parser = argparse.ArgumentParser(description="What LlamaCpp starts; see the top of this file.")
    parser.add_argument("model")
    parser.add_argument("--n-ctx", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--flash-attention", action="store_true")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not be taken for an answer

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        worker = Worker(args.model, args.n_ctx, args.threads, args.flash_attention)
    except ValueError as error:
        answer({"error": str(error)})
        return
    answer(worker.facts)
    operations = {"prefill": worker.prefill, "forward": worker.forward, "decode": worker.decode}
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "quit":
            return
        try:
            answer(operations[operation](**request))
        except ValueError as error:
            answer({"error": str(error)})


if __name__ == "__main__":
    main()
