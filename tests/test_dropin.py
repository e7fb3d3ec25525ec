"""The drop-in gives what the model's own generate gives, and transformers' assisted generation often doesn't."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import sakiyomi
from conftest import COMMON, byte_tokenizer, make_reference
from sakiyomi import core
from sakiyomi.dropin import call, generate
from sakiyomi.dropin.call import Noise
from sakiyomi.errors import OptionError, UnsupportedModelError
from sakiyomi.interfaces import Draft, always
from sakiyomi.models import resolve

TARGETS = ["core", "module"] if core.available() else ["module"]
PROMPT = torch.tensor([[7, 8, 9, 40, 41, 42, 43, 7, 8, 9, 40, 41, 50, 51, 52, 7, 8, 9, 40]])
PAD = 300
GREEDY = {"max_new_tokens": 40, "do_sample": False}
SAMPLED = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7, "top_p": 0.9}


def tiny(family: str = "llama", **changes: object) -> transformers.PreTrainedModel:
    model = make_reference(family, num_hidden_layers=2, **changes)
    model.generation_config.pad_token_id = PAD
    return model


def other(kind: str, **options: object) -> transformers.PreTrainedModel:
    """A tiny random model that only its own module runs."""
    config = transformers.AutoConfig.for_model(kind, vocab_size=320, pad_token_id=PAD, **options)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model


@pytest.fixture(scope="module", params=TARGETS)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def assistant() -> transformers.PreTrainedModel:
    """A model that agrees with the other one now and then: its first layer."""
    return make_reference("llama", num_hidden_layers=1)


@pytest.fixture(scope="module", params=[None, 4], ids=["adaptive", "k=4"])
def accelerated(where, request) -> transformers.PreTrainedModel:
    return sakiyomi.accelerate(tiny(), num_speculative_tokens=request.param, target=where)


def run(model: transformers.PreTrainedModel, ids: torch.Tensor = PROMPT, mask=None, **options: object):
    """Return what generate gives, and the random numbers that would come next."""
    torch.manual_seed(5)
    mask = torch.ones_like(ids) if mask is None else mask
    found = model.generate(ids, attention_mask=mask, **options)
    return found, torch.get_rng_state()


def plain(model: transformers.PreTrainedModel, *args: object, **options: object):
    """Return the same of the model's own generate."""
    current = vars(model).pop("generate", None)
    try:
        return run(model, *args, **options)
    finally:
        if current is not None:
            vars(model)["generate"] = current


def same(model: transformers.PreTrainedModel, *args: object, assisted: dict | None = None, **options: object) -> bool:
    (found, state), (expected, expected_state) = (
        run(model, *args, **(assisted or {}), **options),
        plain(model, *args, **options),
    )
    return torch.equal(found, expected) and torch.equal(state, expected_state)


CASES = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "everything": {
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 1.3,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 8,
        "eos_token_id": [1, 2, 3, 4, 5, 6],
        "bad_words_ids": [[9], [8, 9]],
        "suppress_tokens": [60, 61],
        "exponential_decay_length_penalty": (10, 1.1),
    },
    "greedy with a penalty": {"max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.2, "min_length": 30},
    "an end inside a block": {"max_new_tokens": 60, "do_sample": False, "eos_token_id": list(range(30))},
    "one token": {"max_new_tokens": 1, "do_sample": True},
    "several": {"max_new_tokens": 30, "do_sample": True, "num_return_sequences": 3},
    "several that end apart": {
        "max_new_tokens": 60,
        "do_sample": True,
        "num_return_sequences": 4,
        "eos_token_id": list(range(0, 320, 12)),
        "top_p": 0.95,
    },
    "watermarked": {
        "max_new_tokens": 20,
        "do_sample": True,
        "watermarking_config": transformers.WatermarkingConfig(bias=2.5),
    },
    "max_length": {"max_length": 30, "do_sample": False},
    "static cache": {"max_new_tokens": 20, "do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("case", list(CASES))
def test_tokens_and_random_numbers_are_those_of_generate(accelerated, case):
    assert same(accelerated, **CASES[case])


@pytest.mark.parametrize("case", ["greedy", "sampled", "everything", "several that end apart"])
@pytest.mark.parametrize("how", ["assistant_model", "prompt_lookup_num_tokens", "num_assistant_tokens"])
def test_arguments_of_assisted_generation_change_no_token(accelerated, assistant, case, how):
    """Batches among them, which transformers' own assistants refuse."""
    assisted = {
        "assistant_model": {"assistant_model": assistant},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
        "num_assistant_tokens": {"assistant_model": assistant, "num_assistant_tokens": 3},
    }[how]
    assert same(accelerated, assisted=assisted, **CASES[case])


def test_other_random_numbers_give_another_text(accelerated):
    """Negative control of what says that texts are the same."""
    first, _ = run(accelerated, **SAMPLED)
    torch.manual_seed(6)
    assert not torch.equal(first, accelerated.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **SAMPLED))


@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLED, CASES["several that end apart"]], ids=["greedy", "sampled", "ends"]
)
def test_rows_with_padding_on_the_left(accelerated, options):
    short = torch.nn.functional.pad(PROMPT[:, :6], (PROMPT.shape[1] - 6, 0), value=PAD)
    ids = torch.cat([short, PROMPT, PROMPT.flip(1)])
    assert same(accelerated, ids, (ids != PAD).long(), **options)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "bloom"])
def test_models_that_only_their_module_runs(kind):
    options = {
        "gpt2": {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "gemma2": {**COMMON, "num_hidden_layers": 2, "sliding_window": 16, "bos_token_id": None, "eos_token_id": None},
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
    }[kind]
    options.pop("vocab_size", None), options.pop("pad_token_id", None)
    model = sakiyomi.accelerate(other(kind, **options), num_speculative_tokens=3)
    ids = torch.cat([PROMPT, PROMPT, PROMPT], 1)  # beyond the window
    for case in (GREEDY, SAMPLED):
        assert same(model, ids, **case)
        assert same(model, ids, assisted={"prompt_lookup_num_tokens": 4}, **case)


def test_sliding_windows_beyond_the_window():
    """Their rollback is what transformers' assistants got wrong."""
    model = sakiyomi.accelerate(tiny("mistral-window"), num_speculative_tokens=6)
    ids = torch.cat([PROMPT] * 4, 1)
    assert same(model, ids, assisted={"prompt_lookup_num_tokens": 6}, **GREEDY)
    assert same(model, ids, assisted={"prompt_lookup_num_tokens": 6}, **SAMPLED)


class Puts(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers_see_what_they_saw(accelerated):
    ours, theirs = Puts(), Puts()
    run(accelerated, streamer=ours, **GREEDY)
    plain(accelerated, streamer=theirs, **GREEDY)
    assert ours.values == theirs.values
    assert ours.ended == theirs.ended == 1


class Recording(transformers.LogitsProcessor):
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores[:, ::2] -= 1  # in place, as some do
        return scores


class AfterToken(transformers.StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_processors_and_criteria_are_called_once_for_each_token(accelerated):
    """Custom criteria and stop strings are where transformers' assistants overrun."""
    text = plain(accelerated, **GREEDY)[0][0].tolist()
    token = text[PROMPT.shape[1] + 20]
    found = []
    for way in (run, plain):
        processor, criterion = Recording(), AfterToken(token)
        ids, _ = way(accelerated, logits_processor=[processor], stopping_criteria=[criterion], **GREEDY)
        found.append((ids.tolist(), processor.lengths, criterion.lengths))
    assert found[0] == found[1]
    assert same(accelerated, stopping_criteria=[AfterToken(token)], **GREEDY)
    assert len(plain(accelerated, stopping_criteria=[AfterToken(token)], **GREEDY)[0][0]) < len(text)


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().fast, eos_token="<eos>", pad_token="<eos>"
    )


@pytest.mark.parametrize("as_config", [False, True])
def test_stop_strings(accelerated, tokenizer, as_config):
    text = plain(accelerated, **GREEDY)[0][0].tolist()
    output = text[PROMPT.shape[1] :]
    word = next(
        word for at in range(8, 36) if (word := tokenizer.decode(output[at : at + 2])).isascii() and len(word) == 2
    )
    options = {"stop_strings": [word], **GREEDY}
    given = {"generation_config": transformers.GenerationConfig(pad_token_id=PAD, **options)} if as_config else options
    assert same(accelerated, tokenizer=tokenizer, **given)
    assert run(accelerated, tokenizer=tokenizer, **given)[0].shape[1] < len(text)
    with pytest.raises(ValueError, match="tokenizer"):
        accelerated.generate(PROMPT, **options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_return_dict(accelerated, options):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    (ours, _), (theirs, _) = run(accelerated, **wanted, **options), plain(accelerated, **wanted, **options)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores)
    for name in ("scores", "logits"):
        for mine, expected in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


def once(model, *args, reason: str, assisted: dict | None = None, **options):
    """Check that a call goes to the model's own generate, with one warning however often."""
    expected = plain(model, *args, **options)[0]
    with pytest.warns(RuntimeWarning, match=reason):
        found = run(model, *args, **(assisted or {}), **options)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = run(model, *args, **(assisted or {}), **options)[0]
    for each in (found, again):
        assert torch.equal(getattr(each, "sequences", each), getattr(expected, "sequences", expected))


def test_what_it_cant_take_goes_to_the_original_with_one_warning(accelerated, assistant):
    batch = PROMPT.repeat(2, 1)
    lookup = {"prompt_lookup_num_tokens": 4}
    once(accelerated, reason="beam search", num_beams=3, max_new_tokens=12, do_sample=False)
    once(accelerated, batch, reason="Recording may look at a batch", logits_processor=[Recording()], **GREEDY)
    once(
        accelerated,
        reason="output_attentions",
        return_dict_in_generate=True,
        output_attentions=True,
        max_new_tokens=5,
        do_sample=False,
    )
    once(
        accelerated,
        batch,
        reason="scores and logits of several",
        assisted=lookup,
        return_dict_in_generate=True,
        output_scores=True,
        max_new_tokens=5,
        do_sample=False,
    )
    once(accelerated, reason="beyond the model's context of 1024", assisted=lookup, max_length=1100, do_sample=True,
         eos_token_id=list(range(200)))  # fmt: skip
    once(accelerated, batch, reason="PrefixConstrained", max_new_tokens=6, do_sample=False,
         prefix_allowed_tokens_fn=lambda row, ids: [row + 1, row + 2])  # fmt: skip
    holes = torch.ones_like(PROMPT)
    holes[0, 3] = 0
    once(accelerated, PROMPT, holes, reason="hides more than padding", assisted=lookup, **GREEDY)
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval()
    once(accelerated, reason="can't draft for this kind of model", assisted={"assistant_model": t5}, **GREEDY)


def test_a_filled_cache_goes_to_the_original(accelerated):
    """Under transformers' prompt lookup it silently gives another text."""

    def filled() -> transformers.DynamicCache:
        cache = transformers.DynamicCache(config=accelerated.config)
        with torch.inference_mode():
            accelerated(PROMPT[:, :10], cache=cache)
        return cache

    expected = plain(accelerated, cache=filled(), **GREEDY)[0]
    with pytest.warns(RuntimeWarning, match="cache= was given"):
        found = run(accelerated, cache=filled(), prompt_lookup_num_tokens=5, **GREEDY)[0]
    assert torch.equal(found, expected)
    assert torch.equal(found, plain(accelerated, **GREEDY)[0])


@pytest.mark.parametrize("vocab_size", [300, 384])
def test_assistants_whose_vocabulary_is_padded_otherwise(accelerated, vocab_size):
    """Qwen 2.5's are; transformers refuses the pair."""
    padded = make_reference("llama", num_hidden_layers=1, vocab_size=vocab_size)
    for options in (GREEDY, SAMPLED):
        assert same(accelerated, assisted={"assistant_model": padded}, **options)


def test_assistants_with_another_tokenizer(accelerated, assistant, tokenizer):
    turned = byte_tokenizer()
    vocab = {token: (id + 7) % 256 if id < 256 else id for token, id in turned.fast.get_vocab().items()}
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fast = Tokenizer(models.BPE(vocab={t: i for t, i in vocab.items() if i < 256}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>")
    pair = {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": theirs}
    for options in (GREEDY, SAMPLED):
        (found, _), (expected, _) = run(accelerated, **pair, **options), plain(accelerated, **options)
        assert torch.equal(found, expected)


class Asked:
    """A drafter that notes how many tokens it was asked for, and proposes the prompt again."""

    name, costs, samples = "asked", None, False

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def session(self, prompt, params, sampled=False):
        return AskedSession(self)


class AskedSession:
    unread = 0

    def __init__(self, drafter: Asked) -> None:
        self.drafter = drafter

    def propose(self, budget: int, go_on=always) -> Draft:
        self.drafter.budgets.append(budget)
        return Draft(tuple(range(budget)), None, (0.9,) * budget, "asked")

    def observe(self, tokens) -> None:
        pass


def test_num_assistant_tokens_is_heeded(model, assistant):
    """transformers takes it from the assistant's own generation config, whatever the call says."""
    drafter = Asked()
    sakiyomi.accelerate(model, drafter, num_speculative_tokens=9)
    try:
        for given, most in (
            ({}, 9),
            ({"num_assistant_tokens": 3}, 3),
            ({"prompt_lookup_num_tokens": 2}, 2),
            ({"assistant_model": assistant, "num_assistant_tokens": 4}, 4),
            (
                {
                    "generation_config": transformers.GenerationConfig(
                        pad_token_id=PAD, num_assistant_tokens=5, **GREEDY
                    )
                },
                5,
            ),
        ):
            drafter.budgets.clear()
            options = {} if "generation_config" in given else GREEDY
            found = run(model, **given, **options)[0]
            assert max(drafter.budgets) == most
            assert torch.equal(found, plain(model, **GREEDY)[0])
        drafter.budgets.clear()
        run(model, num_assistant_tokens=0, **GREEDY)
        assert not drafter.budgets
    finally:
        sakiyomi.restore(model)


def test_drafts_are_accepted():
    """What is computed here is fewer target calls, not only the same text."""
    model, calls = tiny(), []
    twin = copy.deepcopy(model)
    sakiyomi.accelerate(model, None, num_speculative_tokens=4)
    target = model.generate._computes.target
    forward = target.forward
    target.forward = lambda work, **options: calls.append(len(work)) or forward(work, **options)
    for options in (GREEDY, SAMPLED):
        calls.clear()
        assert same(model, assisted={"assistant_model": twin}, **options)
        assert len(calls) < 0.6 * 40


def test_errors_of_others_come_through_and_leave_the_model_usable(accelerated):
    class Breaks(Puts):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.values) == 4:
                raise ConnectionResetError("the reader has gone")

    with pytest.raises(ConnectionResetError, match="has gone"):
        run(accelerated, streamer=Breaks(), **GREEDY)
    with pytest.raises(RuntimeError, match="no token can be drawn"):
        run(accelerated, logits_processor=[lambda ids, scores: scores * float("nan")], **SAMPLED)
    assert same(accelerated, **SAMPLED)


def test_a_drafter_that_fails_is_left_out(model):
    class Fails(Asked):
        def session(self, prompt, params, sampled=False):
            raise RuntimeError("no memory of it")

    sakiyomi.accelerate(model, Fails(), num_speculative_tokens=3)
    try:
        with pytest.warns(RuntimeWarning, match="no memory of it"):
            found = run(model, **GREEDY)[0]
        assert torch.equal(found, plain(model, **GREEDY)[0])
    finally:
        sakiyomi.restore(model)


def test_changed_weights_are_noticed(where):
    model = sakiyomi.accelerate(tiny(), num_speculative_tokens=3, target=where)
    before = run(model, **GREEDY)[0]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    assert same(model, **GREEDY)
    assert not torch.equal(run(model, **GREEDY)[0], before)


def test_restore_gives_back_what_was_there(model):
    sakiyomi.accelerate(model, num_speculative_tokens=1)
    sakiyomi.accelerate(model, num_speculative_tokens=2)  # again: not one on top of the other
    assert sakiyomi.restore(model) is model
    assert "generate" not in vars(model)
    sakiyomi.restore(model)
    model.generate = lambda *args, **options: "somebody else's"
    sakiyomi.accelerate(model, num_speculative_tokens=1)
    assert "sakiyomi" in type(model.generate).__module__
    assert sakiyomi.restore(model).generate() == "somebody else's"
    del model.generate


def test_copies_have_their_own_generate(accelerated):
    twin = copy.deepcopy(accelerated)
    assert twin.generate.__self__ is twin
    assert torch.equal(twin.generate(PROMPT, **GREEDY), plain(accelerated, **GREEDY)[0])


def test_the_model_itself_is_left_alone(where):
    model = tiny()
    names = list(model.state_dict())
    with torch.inference_mode():
        before = model(PROMPT).logits
        sakiyomi.accelerate(model, num_speculative_tokens=2, target=where)
        run(model, **GREEDY)
        assert torch.equal(model(PROMPT).logits, before)
    assert list(model.state_dict()) == names


def test_positional_arguments_and_configs(accelerated):
    config = transformers.GenerationConfig(prompt_lookup_num_tokens=3, pad_token_id=PAD, **GREEDY)
    found = accelerated.generate(PROMPT, config, [], attention_mask=torch.ones_like(PROMPT))
    assert torch.equal(found, plain(accelerated, **GREEDY)[0])
    assert config.prompt_lookup_num_tokens == 3


def test_bad_options_are_told_at_once(model, where):
    for bad, message in (
        ({"target": "gpu"}, "target='gpu': must be one of auto, core, module"),
        ({"drafter": "oracle"}, "drafter='oracle'"),
        ({"drafter": 7}, "drafter=7"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
    ):
        with pytest.raises(OptionError, match=message):
            sakiyomi.accelerate(model, **bad)
    assert "generate" not in vars(model)
    with pytest.raises(OptionError, match=r"has no generate\(\)"):
        sakiyomi.accelerate(torch.nn.Linear(2, 2))
    sakiyomi.accelerate(model, num_speculative_tokens=2, target=where)
    try:
        for bad in (-1, 1.5, True, "many"):
            with pytest.raises(OptionError, match="num_assistant_tokens="):
                run(model, num_assistant_tokens=bad, **GREEDY)
        with pytest.raises(OptionError, match="assistant_model: a str"):
            run(model, assistant_model="small", **GREEDY)
    finally:
        sakiyomi.restore(model)


def test_architectures_that_cant_read_ahead_are_named():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        sakiyomi.accelerate(model)
    assert "generate" not in vars(model)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).eval()
    if core.available():
        with pytest.raises(OptionError, match="target='core': architecture 'gpt2'"):
            sakiyomi.accelerate(gpt2, target="core")


T5 = {
    "vocab_size": 320,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_factor": 3.0,
}


@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLED, {**SAMPLED, "num_return_sequences": 2}], ids=["greedy", "sampled", "several"]
)
def test_encoder_decoder_models(options):
    torch.manual_seed(2)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval()
    small = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**T5, "num_layers": 1})).eval()
    sakiyomi.accelerate(model, num_speculative_tokens=3)
    two = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(two)
    mask[0, -5:] = 0  # encoders take padding on the right
    for assisted in ({}, {"assistant_model": small}, {"prompt_lookup_num_tokens": 4}):
        assert same(model, assisted=assisted, **options)
        assert same(model, two, mask, assisted=assisted, **options)


def test_noise_is_that_of_multinomial():
    """What the same tokens as before stand on: torch draws with one exponential for each token of each row."""
    torch.manual_seed(3)
    probabilities = torch.softmax(torch.randn(6, 3, 5000), dim=-1)
    torch.manual_seed(4)
    expected = [torch.multinomial(each, 1).flatten().tolist() for each in probabilities]
    state = torch.get_rng_state()
    torch.manual_seed(4)
    noise, found = Noise(3, torch.device("cpu")), [[0] * 3 for _ in range(6)]
    for row in (1, 0, 2):  # one after the other: each through all steps
        for step in range(6):
            found[step][row] = int((probabilities[step, row] / noise.take(row, step, 5000)).argmax())
    assert found == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("many", [1, 2])
def test_penalties_with_padding_on_the_left(accelerated, many):
    """The processor holds each row's padding."""
    short = torch.nn.functional.pad(PROMPT[:, :6], (PROMPT.shape[1] - 6, 0), value=PAD)
    ids = torch.cat([short, PROMPT])
    for options in ({"do_sample": False}, {"do_sample": True}):
        assert same(
            accelerated, ids, (ids != PAD).long(), repetition_penalty=1.5, max_new_tokens=25,
            num_return_sequences=many if options["do_sample"] else 1, **options,
        )  # fmt: skip


@pytest.mark.parametrize("by", ["assistant_model", "prompt_lookup_num_tokens"])
def test_ends_are_heeded_with_assistance(accelerated, assistant, tokenizer, by):
    """Ends, criteria and stop strings inside of a draft; transformers goes past them."""
    assisted = {by: assistant if by == "assistant_model" else 6}
    text = plain(accelerated, **GREEDY)[0][0].tolist()[PROMPT.shape[1] :]
    for at in range(5, 30, 4):
        assert same(accelerated, assisted=assisted, stopping_criteria=[AfterToken(text[at])], **GREEDY)
        assert same(accelerated, assisted=assisted, eos_token_id=text[at], **GREEDY)
        assert same(accelerated, assisted=assisted, eos_token_id=torch.tensor([text[at], text[at + 1]]), **GREEDY)
    words = [word for at in range(8, 36) if (word := tokenizer.decode(text[at : at + 2])).isascii() and len(word) == 2]
    for word in words[:3]:
        assert same(accelerated, assisted=assisted, stop_strings=word, tokenizer=tokenizer, **GREEDY)


def test_an_assistants_own_configuration_changes_no_token(accelerated):
    """Its temperature and min_length did; it is left as it was."""
    helper = make_reference("llama", num_hidden_layers=1)
    config = helper.generation_config
    config.temperature, config.do_sample, config.min_length, config.num_assistant_tokens = 1.9, True, 100, 3
    before, weights = config.to_dict(), {name: each.clone() for name, each in helper.state_dict().items()}
    for options in (GREEDY, SAMPLED):
        assert same(accelerated, assisted={"assistant_model": helper}, **options)
    assert config.to_dict() == before
    assert all(torch.equal(each, weights[name]) for name, each in helper.state_dict().items())


def test_caches_of_a_fixed_size_near_the_limit(accelerated):
    options = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": 12}
    assert same(accelerated, assisted={"prompt_lookup_num_tokens": 10}, **options)


def test_beams_with_an_assistant_go_to_beams(accelerated, assistant):
    expected = plain(accelerated, num_beams=3, max_new_tokens=11, do_sample=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = run(accelerated, assistant_model=assistant, num_beams=3, max_new_tokens=11, do_sample=False)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("change", ["hook", "activation", "head", "attribute", "data"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_was_changed_is_run_as_it_is(where, change, when):
    """The core computes only what it was made for; what else a module does is found by its logits."""
    model = tiny(tie_word_embeddings=change == "head")

    def changed() -> None:
        layer = model.model.layers[0]
        if change == "hook":
            layer.register_forward_hook(lambda module, args, output: output * 1.5)
        elif change == "activation":
            layer.mlp.act_fn = torch.nn.Tanh()
        elif change == "head":
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
        elif change == "attribute":
            layer.self_attn.scaling = 1.0
        else:
            layer.mlp.down_proj.weight.data.mul_(-1.5)

    if when == "before":
        changed()
    if where == "core" and change != "data" and when == "before":
        with pytest.raises(OptionError, match="the core doesn't compute what this model's module does"):
            sakiyomi.accelerate(model, target="core")
    sakiyomi.accelerate(model, num_speculative_tokens=3, target="auto" if where == "core" else where)
    if when == "after":
        if change == "attribute":
            pytest.skip("nobody can see that: the documentation says what is noticed")
        run(model, **GREEDY)
        changed()
    assert same(model, **GREEDY)


def test_a_failed_preparation_is_tried_again(monkeypatch):
    model = sakiyomi.accelerate(tiny(), num_speculative_tokens=2)
    model.lm_head.weight.data.mul_(0.5)
    ready = generate._ready
    monkeypatch.setattr(generate, "_ready", lambda *args, **options: (_ for _ in ()).throw(MemoryError()))
    for _ in range(2):
        with pytest.raises(MemoryError):
            run(model, **GREEDY)
    monkeypatch.setattr(generate, "_ready", ready)
    assert same(model, **SAMPLED)


def test_training_mode(model):
    twin = copy.deepcopy(model)
    sakiyomi.accelerate(twin, num_speculative_tokens=2)
    twin.train()
    with pytest.warns(RuntimeWarning, match="training mode"):
        run(twin, **GREEDY)
    with pytest.raises(OptionError, match=r"training mode; call model\.eval\(\)"):
        sakiyomi.accelerate(twin)
    assert type(twin.generate).__name__ == "Generate", "the earlier one stays"


def test_what_configurations_hold(model, tokenizer):
    """A model's own generation config may say how to read ahead, or what only its own generate takes."""
    twin = copy.deepcopy(model)
    drafter = Asked()
    sakiyomi.accelerate(twin, drafter, num_speculative_tokens=9)
    twin.generation_config.prompt_lookup_num_tokens = 2
    expected = plain(model, num_return_sequences=2, **SAMPLED)[0]
    assert torch.equal(run(twin, num_return_sequences=2, **SAMPLED)[0], expected)
    assert max(drafter.budgets) == 2
    twin.generation_config.prompt_lookup_num_tokens = None
    twin.generation_config.stop_strings = ["zz"]
    with pytest.warns(RuntimeWarning, match="stop_strings is in the model's own"):
        run(twin, tokenizer=tokenizer, **GREEDY)
    twin.generation_config.stop_strings = None
    with pytest.warns(RuntimeWarning, match="token_healing"), contextlib.suppress(TypeError):  # theirs, without bos
        run(twin, tokenizer=tokenizer, token_healing=True, **GREEDY)


def test_arguments_that_contradict_raise_what_they_raised(accelerated):
    with pytest.raises(TypeError, match="multiple values"):
        accelerated.generate(PROMPT, inputs=PROMPT)
    criteria = [transformers.MaxLengthCriteria(max_length=30)]
    assert same(accelerated, stopping_criteria=criteria, **GREEDY)
    with pytest.warns(RuntimeWarning, match="may reach 1030 tokens"):
        run(accelerated, stopping_criteria=[transformers.MaxLengthCriteria(max_length=1030)], max_new_tokens=40)


def test_synced_gpus_false_is_no_reason(accelerated):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert same(accelerated, synced_gpus=False, **GREEDY)


def test_an_accelerated_model_can_be_pickled(model):
    twin = pickle.loads(pickle.dumps(sakiyomi.accelerate(copy.deepcopy(model), num_speculative_tokens=1)))
    assert torch.equal(twin.generate(PROMPT, **GREEDY), plain(model, **GREEDY)[0])


def test_the_output_of_an_encoder_alone():
    torch.manual_seed(2)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval()
    small = copy.deepcopy(model)
    with torch.inference_mode():
        states = model.get_encoder()(PROMPT)
    expected = model.generate(encoder_outputs=copy.copy(states), **GREEDY)
    sakiyomi.accelerate(model, num_speculative_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(encoder_outputs=copy.copy(states), **GREEDY), expected)
    with pytest.warns(RuntimeWarning, match="reads the input itself"):
        found = model.generate(encoder_outputs=copy.copy(states), assistant_model=small, **GREEDY)
    assert torch.equal(found, expected)


def test_a_row_far_behind_gets_its_own_random_numbers(monkeypatch):
    """Of a batch with a large vocabulary few steps are kept."""
    monkeypatch.setattr(call, "_NOISE_BYTES", 0)
    torch.manual_seed(4)
    expected = [torch.empty(2, 50).exponential_() for _ in range(9)]
    state = torch.get_rng_state()
    torch.manual_seed(4)
    noise = Noise(2, torch.device("cpu"))
    for row in (1, 0):
        for step in range(9):
            assert torch.equal(noise.take(row, step, 50), expected[step][row])
    assert len(noise._kept) <= 2
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture(scope="module")
def default_model():
    """The default model in fp32, a text, and what its own generate makes of it: once for all targets."""
    folder = resolve("smollm2-135m", progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "The red fox crossed the river. The red fox saw the moon. The grey fox crossed the river. The grey fox"
    ids = tokenizer(text, return_tensors="pt").input_ids
    torch.set_num_threads(2)
    try:
        return model, ids, [(options, plain(model, ids, **options)) for options in (GREEDY, SAMPLED)]
    finally:
        torch.set_num_threads(1)


@pytest.mark.model
@pytest.mark.parametrize("target", TARGETS)
def test_the_default_model_in_fp32(default_model, target):
    """Real weights, and threads as users have them: tokens of the module's own kernels, and of ours."""
    model, ids, cases = default_model
    torch.set_num_threads(2)
    try:
        sakiyomi.accelerate(model, num_speculative_tokens=5, target=target)
        for options, (expected, expected_state) in cases:
            found, state = run(model, ids, prompt_lookup_num_tokens=5, **options)
            assert torch.equal(found, expected)
            assert torch.equal(state, expected_state)
    finally:
        sakiyomi.restore(model)
        torch.set_num_threads(1)


@pytest.mark.model
def test_readme_snippet_runs(capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    snippets = [each for each in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "accelerate" in each]
    name = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
    assert len(snippets) == 1
    assert name in snippets[0]
    folder = str(resolve("smollm2-135m", progress=False))
    exec(compile(snippets[0].replace(name, repr(folder)), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 10
