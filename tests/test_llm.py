"""The default model: real weights, natural prompts, the public object."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from sakiyomi import LLM, NgramDrafter, OptionError, PromptError, SamplingParams, core, load
from sakiyomi.bench.workload import Prompt, builtin_workload, select
from sakiyomi.interfaces import Draft, Work, always
from sakiyomi.models import open_weights, read_config, resolve
from sakiyomi.targets import load_decoder
from sakiyomi.targets.decoder import DecoderConfig
from sakiyomi.targets.linear import can_pack

pytestmark = pytest.mark.model
PASSAGE = select(builtin_workload(), ["summarising"], 1)[0].messages[-1]["content"]


@pytest.fixture(scope="module", autouse=True)
def _all_threads() -> Iterator[None]:
    """The real model runs as users run it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(_all_threads: None) -> LLM:
    return load("smollm2-135m", progress=False)


class RandomDrafter:
    """Proposes tokens at random: wrong, and confident."""

    name = "random"
    costs = None
    samples = False
    unread = 0

    def __init__(self, vocab_size: int) -> None:
        self.source, self.vocab_size = random.Random(0), vocab_size

    def session(self, prompt, params, sampled=False):
        return self

    def propose(self, budget: int, go_on=always) -> Draft:
        return Draft(
            tuple(self.source.randrange(self.vocab_size) for _ in range(budget)), None, (1.0,) * budget, "random"
        )

    def observe(self, tokens) -> None:
        pass


def test_is_bit_exact(llm):
    if not core.available() and not can_pack(llm.target.dtype):
        pytest.skip("no packed kernels on this processor")
    assert llm.exactness == "bit-exact"


@pytest.mark.parametrize("prompt", select(builtin_workload(), per_category=1), ids=lambda prompt: prompt.id)
def test_natural_prompts_give_the_same_tokens(llm: LLM, prompt: Prompt):
    for params, settings in (
        (SamplingParams(max_new_tokens=64, ignore_eos=True), [("ngram", 2), ("auto", 8), ("auto", None)]),
        (
            SamplingParams(max_new_tokens=64, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True),
            [("auto", 4), ("ngram", None)],
        ),
    ):
        plain = llm.generate(prompt.input, params, drafter=None)
        assert len(plain.token_ids) == 64
        for drafter, k in settings:
            drafted = llm.generate(prompt.input, params, drafter=drafter, num_speculative_tokens=k)
            assert drafted.token_ids == plain.token_ids, (drafter, k)
            assert drafted.text == plain.text
            assert drafted.stats.drafted > 0


def test_wrong_drafts_change_nothing(llm):
    params = SamplingParams(max_new_tokens=128, temperature=1.0, seed=1, ignore_eos=True)
    plain = llm.generate(PASSAGE, params, drafter=None)
    wrong = llm.generate(PASSAGE, params, drafter=RandomDrafter(llm.target.vocab_size), num_speculative_tokens=6)
    assert wrong.token_ids == plain.token_ids
    assert wrong.stats.acceptance_rate == pytest.approx(0, abs=0.01)


@cache
def their_logits(ids: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what transformers computes: once for all kernels."""
    import transformers

    folder = resolve("smollm2-135m", progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        return theirs(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_transformers(llm, dtype, kernels):
    folder = resolve("smollm2-135m", progress=False)
    config, name = DecoderConfig.from_huggingface(read_config(folder)), "bf16" if dtype is torch.bfloat16 else "fp32"
    target = load_decoder(config, open_weights(folder), dtype=name, kernels=kernels)
    ids = llm.tokenizer.encode(PASSAGE)
    expected = their_logits(tuple(ids), dtype)
    if kernels == "plain":  # slow: one full piece, and one that goes on
        ids, expected = ids[:160], expected[:160]
    assert len(ids) > 128
    sequence = target.new_sequence()
    found = torch.cat(
        [
            target.forward([Work(sequence, ids[i : i + 128], None, len(ids[i : i + 128]))])[0].logits
            for i in range(0, len(ids), 128)
        ]
    ).float()
    error = (found - expected).abs().max() / expected.std()
    chosen = found.argmax(-1)
    gap = (expected.max(-1).values - expected.gather(1, chosen[:, None])[:, 0]) / expected.std()
    if dtype is torch.float32:
        assert float(error) < 1e-3
        assert bool((chosen == expected.argmax(-1)).all())
    else:  # both round to eight bits, each in its own places: they may only differ where two tokens nearly tie
        assert float(error) < 0.15
        assert float(gap.max()) < 0.1
        assert float((chosen == expected.argmax(-1)).float().mean()) > 0.95


def test_generate_folds_stream(llm):
    params = SamplingParams(max_new_tokens=40)
    chunks = list(llm.stream(PASSAGE, params))
    whole = llm.generate(PASSAGE, params)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    assert whole.stats.tokens == 40
    assert 0 < whole.stats.ttft_s < whole.stats.total_s
    assert llm.tokenizer.decode(whole.token_ids) == whole.text


def test_text_ids_and_messages(llm):
    params = SamplingParams(max_new_tokens=8)
    text = llm.generate("The capital of France is", params)
    assert "Paris" in text.text
    assert llm.generate(list(text.prompt_token_ids), params).token_ids == text.token_ids
    chat = llm.generate([{"role": "user", "content": "What is the capital of France?"}], params)
    assert "Paris" in chat.text
    assert len(chat.prompt_token_ids) > len(text.prompt_token_ids)


def test_options_of_a_call_override_those_of_the_object(llm):
    params = SamplingParams(max_new_tokens=16)
    text = "one two three one two three one two three one two"
    assert llm.generate(text, params).stats.drafted > 0
    assert llm.generate(text, params, drafter=None).stats.drafted == 0
    assert llm.generate(text, params, num_speculative_tokens=0).stats.drafted == 0
    assert max(r.drafted for r in llm.generate(text, params, num_speculative_tokens=2).stats.records) == 2
    own = NgramDrafter(reference=llm.tokenizer.encode("The sun is a star of the main sequence."))
    assert llm.generate("The sun is", params, drafter=own).stats.drafted > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.stream(""), PromptError, "prompt: is empty"),
        (lambda llm: llm.stream([]), PromptError, "prompt: is empty; give at least one token or message"),
        (
            lambda llm: llm.stream("x", drafter="ngrm"),
            OptionError,
            "drafter='ngrm': must be one of auto, suffix",
        ),
        (lambda llm: llm.stream("x", num_speculative_tokens=-2), OptionError, "num_speculative_tokens=-2"),
        (lambda llm: llm.stream("word " * 9000), PromptError, "9000 tokens leave no room|tokens leave no room"),
        (lambda llm: load("smollm2-135m", dtype="fp16"), OptionError, "dtype='fp16': must be one of auto, bf16, fp32"),
        (
            lambda llm: load("smollm2-135m", context_length=9999),
            OptionError,
            r"context_length=9999: must be in 2\.\.8192",
        ),
        (lambda llm: load("no-such", num_speculative_tokens=-1), OptionError, "num_speculative_tokens=-1"),
        (lambda llm: load("smollm2-135m", drafter="eagle9"), OptionError, "drafter='eagle9'"),
        (lambda llm: load("no-such", draft_weights="int8"), OptionError, "draft_weights='int8': needs a draft model"),
        (
            lambda llm: load("no-such", draft_model="no-such", draft_weights="int4"),
            OptionError,
            "draft_weights='int4': must be one of auto, int8",
        ),
        (
            lambda llm: load("no-such", draft_model="no-such", draft_weights="int8", kernels="torch"),
            OptionError,
            "draft_weights='int8': needs the compiled core",
        ),
    ],
)
def test_bad_input_is_met_before_any_work(llm, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)


@pytest.mark.skipif(not core.available(), reason="int8 needs the compiled core")
@pytest.mark.parametrize(("draft_weights", "expected"), [(None, "int8"), ("int8", "int8"), ("auto", "bf16")])
def test_a_draft_model_has_weights_of_its_own(draft_weights, expected):
    llm = load(
        "smollm2-135m",
        draft_model="smollm2-135m",
        draft_weights=draft_weights,
        drafter="model",
        num_speculative_tokens=2,
        progress=False,
    )
    (drafter,) = llm.speculation().drafters
    assert (llm.target.weight_format, drafter.model.weight_format) == ("bf16", expected)


def test_the_snippet_of_the_readme_runs(capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    exec(compile(snippet, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert len(out) > 40
    assert out.endswith(("bit-exact\n", "numerics\n"))
