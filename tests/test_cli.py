"""The command line: what it prints and where, its exit status, and errors in one line."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sakiyomi
from conftest import byte_tokenizer, make_reference, make_target
from sakiyomi import cli, core, drafters, pairs
from sakiyomi.costs import CostTable, ModelCosts
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.interfaces import Draft, Drafter
from sakiyomi.llm import LLM
from sakiyomi.options import DRAFTERS

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PROMPT = "Repeat after me: the cat sat on the mat. The cat sat on the mat. The cat"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"

KERNELS = "auto" if core.available() else "torch"  # which says nothing of the core that isn't there

run = CliRunner().invoke
needs_suffix = pytest.mark.skipif(not core.available(), reason="the suffix drafter needs the compiled core")


def costs() -> ModelCosts:
    """Return costs with which drafts pay, whatever else runs on the machine."""
    return ModelCosts(CostTable((1, 33), (0.01, 0.012)))


@pytest.fixture(scope="module")
def llm(llama) -> LLM:
    """A tiny random model: it writes nonsense, the same nonsense each time."""
    return LLM(llama, byte_tokenizer(template=TEMPLATE), costs=costs)


def loads(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Let the commands use a model that is loaded already, with the defaults they ask for."""

    def load(
        model,
        dtype,
        weights,
        kernels,
        context_length,
        threads,
        drafter,
        k,
        draft_model,
        verification="coupled",
        device=None,
        trained=(),
    ):
        own = {"draft_model": itself(llm)} if draft_model else {}
        settings = {"drafter": drafter, "num_speculative_tokens": k, "verification": verification}
        return LLM(llm.target, llm.tokenizer, costs=costs, **settings, **own)

    monkeypatch.setattr(cli, "load_llm", load)


def itself(llm: LLM) -> Drafter:
    """Return a drafter that drafts for a model with the model itself: each of its tokens stands."""
    cheap = ModelCosts(CostTable((1, 33), (0.001, 0.002)))
    return pairs.draft_model(llm.target, llm.tokenizer, llm.tokenizer, llm.target.vocab_size, costs=cheap)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> LLM:
    loads(monkeypatch, llm)
    return llm


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_):
        raise AssertionError("a mistake that is visible at once should not cost the time of loading")

    monkeypatch.setattr("sakiyomi.llm.load", load)


def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run ``main`` as the installed command does and return the exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["sakiyomi", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


def test_help_prints_at_once_and_without_the_heavy_imports():
    """All in one process: each --help must print whole option names, and torch must not be touched in the end."""
    code = """
    import sys
    from typer.testing import CliRunner
    from sakiyomi import cli
    for command in ([], ["generate"], ["bench"], ["verify"], ["check"], ["models"], ["tune"], ["plan"], ["train"]):
        for flag in ("--help", "-h"):
            result = CliRunner().invoke(cli.app, [*command, flag])
            assert result.exit_code == 0, result
            assert "Usage: " in result.stdout, result.stdout
            assert not command or all(option in result.stdout for option in OPTIONS[command[0]])
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    print(result.stdout.strip())
    print([name for name in ("torch", "transformers", "numpy", "sakiyomi.llm") if name in sys.modules])
    """
    options = {
        "generate": [
            "--model",
            "--drafter",
            "--num-speculative-tokens",
            "--verification",
            "--draft-model",
            "--reference",
            "--memory",
            "--settings",
            "--top-p",
            "--weights",
            "--kernels",
            "--show-drafts",
            "--json",
        ],
        "bench": [
            "--workload",
            "--category",
            "--verification",
            "--draft-model",
            "--draft-weights",
            "--repeats",
            "--weights",
            "--kernels",
            "--quality-text",
            "--json",
        ],
        "verify": ["--workload", "--drafter", "--draft-model", "--temperature", "--seeds", "--json"],
        "check": ["target", "draft_model", "--weights", "--kernels", "--threads", "--json"],
        "models": ["--help"],
        "tune": ["--workload", "--skip-bad", "--drafter", "--minutes", "--confirm", "--output", "--plots", "--json"],
        "plan": ["--drafter", "--draft-model", "--memory", "--context", "--batch-size", "--json"],
        "train": ["--prompts", "--kind", "--minutes", "--output", "--json"],
    }
    code = f"OPTIONS = {options}\n" + textwrap.dedent(code)
    environment = {**os.environ, "COLUMNS": "80"}  # not fewer, or rich shortens the names
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [f"sakiyomi {sakiyomi.__version__}", "[]"]


def test_help_names_the_drafters_of_the_registry(monkeypatch):
    assert sorted(DRAFTERS) == sorted(drafters.DRAFTERS)
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("generate", "bench", "verify", "tune"):
        shown = " ".join(run(cli.app, [command, "--help"]).stdout.split())
        assert all(f"{name}, " in shown for name in (*drafters.DRAFTERS, drafters.MODEL + " (--draft-model)"))


def test_without_arguments_the_help_is_shown():
    assert "Usage: " in run(cli.app, []).output


def test_models_lists_the_names(monkeypatch, tmp_path):
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path))
    result = run(cli.app, ["models"])
    assert result.exit_code == 0
    assert "smollm2-135m" in result.stdout
    assert f"cache: {tmp_path}" in result.stdout


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("generate x --top-p 0", 2, "top_p=0.0: must be above 0"),
        ("generate x -n 0", 2, "max_new_tokens=0: must be at least 1"),
        ("generate x --temperature -1", 2, "temperature=-1.0: must be 0"),
        ("generate x --stop ''", 2, "stop="),
        ("generate x --threads 0", 2, "--threads 0: must be at least 1"),
        ("generate ''", 2, "prompt: is empty"),
        ("generate '' --raw --json", 2, "prompt: is empty"),
        ("generate x --reference no-such-file.txt", 2, "--reference no-such-file.txt: can't be read"),
        ("generate x --reference a.txt -d none", 2, "--reference a.txt: --drafter none doesn't use it; add suffix or"),
        ("generate x --reference a.txt -d model --draft-model x", 2, "--reference a.txt: --drafter model doesn't use"),
        ("generate x --memory a.bin -d ngram", 2, "--memory a.bin: --drafter ngram remembers nothing; add suffix"),
        ("generate x -d ngramm", 2, "drafter='ngramm': must be one of auto, "),
        ("generate x -d ngram+ngram", 2, "drafter='ngram+ngram': names a drafter twice"),
        ("generate x -d model", 2, "drafter='model': needs a draft model"),
        ("generate x -d ngram --draft-model y", 2, "--draft-model y: --drafter ngram goes without; add +model to it"),
        ("generate x -k -1", 2, "--num-speculative-tokens -1: must be a number (0: plain decoding), or auto"),
        ("generate x -k many", 2, "--num-speculative-tokens many: must be a number"),
        ("generate x -k 2.5", 2, "--num-speculative-tokens 2.5: must be a number"),
        ("generate x -k 99999999999", 2, "--num-speculative-tokens 99999999999: must be a number"),
        ("generate x -k ''", 2, "--num-speculative-tokens : must be a number"),
        ("bench --top-p 0", 2, "top_p=0.0: must be above 0"),
        ("bench -k 0", 2, "num_speculative_tokens=0: must be at least 1"),
        ("bench -k 3 -k many", 2, "--num-speculative-tokens many: must be a number"),
        ("bench -d ngramm", 2, "drafter='ngramm': must be one of auto, "),
        ("bench -d auto -d model", 2, "drafter='model': needs a draft model"),
        ("bench -d none", 2, "drafter='none': must name a drafter; plain decoding is always measured"),
        ("bench -d ngram --draft-model y", 2, "--draft-model y: --drafter ngram goes without; add +model to it"),
        ("bench --workload no-such-file.jsonl", 2, "workload no-such-file.jsonl: can't be read"),
        ("bench --category nonsense", 2, "category 'nonsense': not in this workload; there are chat"),
        ("bench --per-category 0", 2, "per_category=0: must be at least 1"),
        ("bench --weights int4", 2, "--weights int4: must be one of auto, bf16, fp32, int8, or the path of a model"),
        ("bench --weights bf16,int4", 2, "--weights int4: must be one of auto, bf16, fp32, int8, or the path"),
        ("bench --weights bf16 --weights bf16", 2, "--weights bf16,bf16: names bf16 twice"),
        ("bench --weights no/such.gguf,bf16", 2, "--weights no/such.gguf: must be one of auto, bf16"),
        ("bench --weights bf16,fp32 --dtype fp32", 2, "--dtype fp32: contradicts --weights bf16; leave one of them"),
        ("bench --weights bf16 --quality-text a.txt", 2, "--quality-text a.txt: only smaller weights are measured"),
        ("bench --weights auto,int8 --kernels torch", 2, "weights='int8': needs the compiled core"),
        ("bench --draft-weights int8", 2, "--draft-weights int8: needs a draft model; name one with --draft-model"),
        (
            "bench --draft-model y --draft-weights int4",
            2,
            "--draft-weights int4: must be one of auto, bf16, fp32, int8",
        ),
        ("bench --draft-model y --draft-weights auto,auto", 2, "--draft-weights auto,auto: names auto twice"),
        ("bench --draft-model y --draft-weights int8 --kernels torch", 2, "draft_weights='int8': needs the compiled"),
        ("bench --kernels avx3", 2, "kernels='avx3': must be one of auto, "),
        ("bench --weights int8 --kernels torch", 2, "weights='int8': needs the compiled core"),
        ("check x y --threads 0", 2, "--threads 0: must be at least 1"),
        ("check x y --kernels avx3", 2, "kernels='avx3': must be one of auto, "),
        ("check x y --weights int4", 2, "weights='int4': must be one of auto, int8"),
        ("bench --quality-text a.txt", 2, "--quality-text a.txt: only smaller weights are measured on it; add --w"),
    ],
)
def test_a_value_that_cannot_work_is_one_line(monkeypatch, capsys, line, status, message):
    found, out, err = main(monkeypatch, capsys, *shlex.split(line))
    assert found == status
    assert err.startswith("sakiyomi: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("generate x --dtype fp8", 2, "dtype='fp8': must be one of auto, bf16, fp32"),
        ("generate x --weights int4", 2, "weights='int4': must be one of auto, int8"),
        ("generate x --kernels avx3", 2, "kernels='avx3': must be one of auto, "),
        ("generate x --weights int8 --kernels torch", 2, "weights='int8': needs the compiled core"),
        ("generate x -m no-such-file.gguf", 1, "'no-such-file.gguf'"),
        ("generate x -m no-such-folder", 1, "'no-such-folder'"),
        ("bench -m no-such-file.gguf", 1, "'no-such-file.gguf'"),
        ("check no-such-file.gguf smollm2-135m", 1, "'no-such-file.gguf'"),
    ],
)
def test_what_loading_refuses_is_one_line(monkeypatch, capsys, line, status, message):
    found, out, err = main(monkeypatch, capsys, *shlex.split(line))
    assert found == status
    assert err.startswith("sakiyomi: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench --repeats 0", "repeats=0: must be at least 1"),
        (f"generate {'x' * 1100}", "leave no room in the context of 1024"),
    ],
)
def test_what_the_model_refuses_is_one_line(monkeypatch, capsys, line, message):
    status, out, err = main(monkeypatch, capsys, *line.split())
    assert (status, out) == (2, "")
    assert err.strip().startswith("sakiyomi: ")
    assert message in err
    assert err.strip().count("\n") == 0


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("generate x --top-q 1", "--top-q"),
        ("generate x -k", "-k"),
        ("generate x -n many", "--max-new-tokens"),
        ("generate", "prompt"),
        ("check x", "draft_model"),
        ("generate x y", "y"),
        ("benhc", "benhc"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_names_its_mistake(monkeypatch, capsys, line, named):
    status, out, err = main(monkeypatch, capsys, *shlex.split(line))
    assert status == 2
    assert named in ANSI.sub("", err)
    assert "Traceback" not in err
    assert out == ""


def test_a_mistake_costs_no_traceback_in_a_process_of_its_own():
    command = [sys.executable, "-m", "sakiyomi.cli", "generate", "x", "--top-p", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("sakiyomi: top_p=0.0: must be")
    assert done.stderr.count("\n") == 1


def test_generate_prints_what_the_library_gives(loaded):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    params = sakiyomi.SamplingParams(max_new_tokens=40)
    result = run(cli.app, ["generate", PROMPT, "--system", "Be brief.", "-n", "40"])
    assert result.exit_code == 0
    assert result.stdout == loaded.generate(messages, params).text + "\n"
    assert result.stderr == ""
    raw = run(cli.app, ["generate", PROMPT, "--raw", "-n", "40"])
    assert raw.stdout == loaded.generate(PROMPT, params).text + "\n"
    assert raw.stdout != result.stdout


@pytest.mark.usefixtures("loaded")
def test_generate_prints_the_same_with_any_drafter():
    plain = run(cli.app, ["generate", PROMPT, "-n", "60", "-d", "none"])
    assert len(plain.stdout) > 30
    for more in (
        [],
        ["-k", "1"],
        ["-k", "9"],
        ["-k", "0"],
        ["--show-drafts", "-k", "0"],
        ["-d", "ngram", "-k", "auto"],
    ):
        assert run(cli.app, ["generate", PROMPT, "-n", "60", *more]).stdout == plain.stdout


@pytest.mark.usefixtures("loaded")
def test_options_reach_the_parameters(monkeypatch):
    seen = []
    monkeypatch.setattr(LLM, "generate", lambda self, prompt, params, **_: seen.append(params) or pytest.skip.Exception)
    given = {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "min_new_tokens": 3,
        "seed": 5,
    }
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    run(cli.app, ["generate", "x", *options, "--stop", "a", "--stop", "b", "--ignore-eos", "--json"])
    assert seen == [sakiyomi.SamplingParams(**given, stop=("a", "b"), ignore_eos=True)]


def test_json_is_one_object(loaded):
    result = run(cli.app, ["generate", PROMPT, "--raw", "-n", "30", "--json"])
    found = json.loads(result.stdout)
    generation = loaded.generate(PROMPT, sakiyomi.SamplingParams(max_new_tokens=30))
    assert found["text"] == generation.text
    assert found["token_ids"] == list(generation.token_ids)
    assert found["finish_reason"] == "length"
    assert found["prompt_tokens"] == len(PROMPT)
    assert found["exactness"] == loaded.exactness
    assert found["stats"]["tokens"] == 30
    assert result.stdout.isascii()  # so that it is valid whatever the encoding of the terminal or pipe
    assert result.stderr == ""


@pytest.mark.usefixtures("loaded")
def test_stats_go_to_standard_error():
    plain = run(cli.app, ["generate", PROMPT, "-n", "30"])
    result = run(cli.app, ["generate", PROMPT, "-n", "30", "--stats"])
    assert result.stdout == plain.stdout
    for name in ("tokens per target call", "acceptance rate", "draft tokens per round", "time to first", "exactness"):
        assert name in result.stderr
    assert "FAILED" not in result.stderr
    assert "drafted accepted" not in result.stderr, "one drafter's share is all"


class Failing:
    """A drafter that is sure of its nonsense, and fails after some rounds."""

    name = "failing"
    costs = None
    samples = False
    unread = 0

    def __init__(self):
        self.rounds = 0

    def session(self, prompt, params, sampled=False):
        return Failing()

    def observe(self, tokens):
        self.rounds += 1
        if self.rounds == 3:
            raise RuntimeError("out of\n ideas")

    def propose(self, budget, go_on=None):
        return Draft((1,) * budget)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("loaded")
def test_a_drafter_that_fails_is_one_line_and_in_the_stats(monkeypatch, tmp_path):
    monkeypatch.setattr(drafters, "DRAFTERS", {**drafters.DRAFTERS, "failing": Failing})
    file = tmp_path / "reference.txt"
    plain = run(cli.app, ["generate", PROMPT, "--raw", "-n", "60", "-d", "none"]).stdout
    file.write_text(PROMPT + plain, encoding="utf-8")
    arguments = ["generate", PROMPT, "--raw", "-n", "60", "-d", "failing+ngram", "-k", "3", "--reference", str(file)]
    result = run(cli.app, [*arguments, "--stats"])
    assert result.exit_code == 0
    assert result.stdout == plain
    warned = "sakiyomi: a drafter failed, the answer goes on without it: failing: RuntimeError: out of ideas"
    assert result.stderr.splitlines()[0] == warned
    flat = " ".join(result.stderr.split())
    assert re.search(
        r"failing 0 of \d+ drafted accepted, in \d+ rounds ngram \d+ of \d+ drafted accepted, in \d+", flat
    )
    assert "FAILED failing: RuntimeError: out of ideas" in flat
    found = json.loads(run(cli.app, [*arguments, "--json"]).stdout)["stats"]
    assert found["errors"] == ["failing: RuntimeError: out of\n ideas"]
    assert set(found["by_drafter"]) == {"failing", "ngram"}


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("loaded")
def test_a_drafter_that_fails_in_a_benchmark_is_one_line_and_a_note(monkeypatch, workload):
    monkeypatch.setattr(drafters, "DRAFTERS", {**drafters.DRAFTERS, "failing": Failing})
    arguments = ["bench", "--workload", workload, "-n", "12", "-d", "failing", "-d", "ngram", "-k", "2"]
    result = run(cli.app, arguments)
    assert result.exit_code == 0, "the output is the same"
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert lines
    assert all(line.startswith("sakiyomi: a drafter failed") for line in lines)
    assert "FAILED: failing k=2, in 2 answers, which went on without it: failing: Runtime" in " ".join(
        result.stdout.split()
    )
    assert "FAILED: ngram" not in result.stdout


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("line", ["generate x --stats -n 1", "generate x --stats -n 5 -d none"])
def test_stats_of_what_was_not_drafted(line):
    result = run(cli.app, shlex.split(line))
    assert result.exit_code == 0
    assert "– of 0 drafted" in result.stderr


@pytest.fixture
def drafted(loaded: LLM, tmp_path: Path) -> tuple[list[str], str, str]:
    """A command whose drafts are often right, its text, and the same with «» around accepted draft tokens."""
    params = sakiyomi.SamplingParams(max_new_tokens=60)
    text = loaded.generate(PROMPT, params).text
    reference = tmp_path / "answer.txt"
    reference.write_text(PROMPT + text, encoding="utf-8")
    drafter = sakiyomi.NgramDrafter(reference=loaded.encode(PROMPT + text))
    chunks = loaded.stream(PROMPT, params, drafter=drafter, num_speculative_tokens=7)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert sum(bool(token.drafter and token.text) for token in tokens) > 5
    assert sum(not token.drafter for token in tokens) > 5
    marked = "".join(f"«{token.text}»" if token.drafter and token.text else token.text for token in tokens)
    command = ["generate", PROMPT, "--raw", "-n", "60", "-d", "ngram", "-k", "7", "--reference", str(reference)]
    return command, text, marked


def terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    """Let rich believe that standard output is a terminal with colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(name, value)


def test_drafts_are_marked_in_a_pipe(drafted):
    command, text, marked = drafted
    assert run(cli.app, [*command, "--show-drafts"]).stdout == marked + "\n"
    assert run(cli.app, command).stdout == text + "\n"


def test_drafts_are_coloured_on_a_terminal(monkeypatch, drafted):
    terminal(monkeypatch)
    command, text, marked = drafted
    shown = run(cli.app, [*command, "--show-drafts"], color=True).stdout
    assert shown == marked.replace("«", "\x1b[32m").replace("»", "\x1b[0m") + "\n"
    assert run(cli.app, command, color=True).stdout == text + "\n"


def test_drafts_are_marked_where_colour_is_not_wanted(monkeypatch, drafted):
    terminal(monkeypatch, NO_COLOR="1")
    command, _, marked = drafted
    assert run(cli.app, [*command, "--show-drafts"], color=True).stdout == marked + "\n"


@pytest.mark.parametrize("colour", [False, True])
def test_text_is_printed_as_it_is(monkeypatch, loaded, colour):
    """No markup, no emoji names, no tabs made spaces, no lines broken: neither plain nor with drafts shown."""
    if colour:
        terminal(monkeypatch)
    text = "[bold]x[/bold] :smile:\ta\r\n\x1b[1m\x07 <b> " + "long " * 100
    chunks = list(loaded.stream("x", sakiyomi.SamplingParams(max_new_tokens=1)))
    token = sakiyomi.Token(1, text, None)
    chunk = sakiyomi.Chunk((token, token), "length", chunks[0].record)
    monkeypatch.setattr(LLM, "stream", lambda *_, **__: iter([chunk]))
    for more in ([], ["--show-drafts"]):
        result = run(cli.app, ["generate", "x", *more], color=colour)
        assert result.stdout_bytes.decode() == text * 2 + "\n"
    drafted = sakiyomi.Chunk((sakiyomi.Token(1, text, "ngram"),), "length", chunks[0].record)
    monkeypatch.setattr(LLM, "stream", lambda *_, **__: iter([drafted]))
    assert text in run(cli.app, ["generate", "x", "--show-drafts"], color=colour).stdout_bytes.decode()


@pytest.mark.usefixtures("loaded")
def test_a_dash_reads_standard_input():
    given = run(cli.app, ["generate", "日本 🎉", "-n", "20"])
    read = run(cli.app, ["generate", "-", "-n", "20"], input="日本 🎉")
    assert read.exit_code == 0
    assert read.stdout == given.stdout


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(("given", "message"), [(b"", "is empty"), (b"a\xff", "standard input can't be read as text")])
def test_standard_input_that_is_no_prompt(given, message):
    result = run(cli.app, ["generate", "-"], input=given)
    assert isinstance(result.exception, sakiyomi.PromptError)
    assert message in str(result.exception)


def test_an_argument_that_is_not_utf8_is_one_line(monkeypatch, capsys, loaded):
    """Python hands such bytes over as halves of surrogate pairs."""
    status, out, err = main(monkeypatch, capsys, "generate", "a\udcffb")
    assert (status, out) == (2, "")
    assert "prompt: isn't valid Unicode text" in err


def test_what_the_terminal_cannot_show_is_replaced(monkeypatch, loaded):
    token = sakiyomi.Token(1, "a日b", None)
    record = next(loaded.stream("x")).record
    monkeypatch.setattr(LLM, "stream", lambda *_, **__: iter([sakiyomi.Chunk((token,), "length", record)]))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["sakiyomi", "generate", "x"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert raw.getvalue() == b"a?b\n"


@pytest.mark.parametrize("drafter", ["ngram", "auto", "suffix+ngram"])
@pytest.mark.parametrize("k", ["5", "auto"])
def test_reference_text_is_looked_up(loaded, tmp_path, drafter, k):
    """A reference that holds the answer gives accepted drafts, and the same text."""
    if "suffix" in drafter and not core.available():
        pytest.skip("the suffix drafter needs the compiled core")
    arguments = ["generate", "x", "--raw", "-n", "40", "--json", "-k", k]
    plain = json.loads(run(cli.app, [*arguments, "-d", "none"]).stdout)
    arguments = [*arguments, "-d", drafter]
    file = tmp_path / "reference.txt"
    file.write_text("x" + plain["text"], encoding="utf-8")
    found = json.loads(run(cli.app, [*arguments, "--reference", str(file)]).stdout)
    without = json.loads(run(cli.app, arguments).stdout)
    assert found["token_ids"] == without["token_ids"] == plain["token_ids"]
    assert found["stats"]["target_calls"] < without["stats"]["target_calls"]


@needs_suffix
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("drafter", ["auto", "suffix+ngram"])
def test_memory_keeps_answers(tmp_path, drafter):
    """What one process wrote the next drafts from; with a reference too, and with the same text."""
    file, reference = tmp_path / "memory", tmp_path / "reference.txt"
    arguments = ["generate", "x", "--raw", "-n", "40", "-d", drafter, "-k", "5", "--memory", str(file)]
    first = run(cli.app, [*arguments, "--stats"])
    assert first.exit_code == 0, first
    assert file.is_file()
    again = json.loads(run(cli.app, [*arguments, "--json"]).stdout)
    assert again["text"] + "\n" == first.stdout
    assert f"in {again['stats']['target_calls']} target calls" not in first.stderr
    assert again["stats"]["target_calls"] < 12, "40 tokens, and nearly each draft of 5 stands"
    reference.write_text("something else", encoding="utf-8")
    third = run(cli.app, [*arguments, "--reference", str(reference), "--json"])
    assert json.loads(third.stdout)["stats"]["target_calls"] < 12
    assert json.loads(third.stdout)["token_ids"] == again["token_ids"]


@needs_suffix
def test_memory_is_kept_where_the_answer_is_interrupted(monkeypatch, capsys, loaded, tmp_path):
    stream = LLM.stream

    def interrupted(*arguments, **options):
        for i, chunk in enumerate(stream(*arguments, **options)):
            if i == 20:
                raise KeyboardInterrupt
            yield chunk

    file = tmp_path / "memory"
    arguments = ["generate", "x", "--raw", "-n", "40", "-d", "suffix", "-k", "5", "--memory", str(file)]
    stdout, stderr = sys.stdout, sys.stderr
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "stream", interrupted)
        status, _, err = main(monkeypatch, capsys, *arguments)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert (status, err) == (130, "")
    with_memory = json.loads(run(cli.app, [*arguments, "--json"]).stdout)["stats"]
    file.unlink()
    without = json.loads(run(cli.app, [*arguments, "--json"]).stdout)["stats"]
    assert with_memory["target_calls"] < without["target_calls"]


@needs_suffix
@pytest.mark.usefixtures("never_loaded")
def test_a_memory_that_cannot_be_used_costs_no_loading(monkeypatch, capsys, tmp_path):
    wrong, nowhere = tmp_path / "memory", tmp_path / "no-folder" / "memory"
    wrong.write_text("notes", encoding="utf-8")
    for path, message in ((wrong, "can't be read"), (nowhere, "isn't there; make it first"), (tmp_path, "not a file")):
        status, out, err = main(monkeypatch, capsys, "generate", "x", "-d", "suffix", "--memory", str(path))
        assert (status, out) == (2, "")
        assert err.startswith(f"sakiyomi: --memory {path}: ")
        assert message in err
        assert err.count("\n") == 1
    assert wrong.read_text(encoding="utf-8") == "notes"


@needs_suffix
def test_a_memory_that_cannot_be_saved_is_told_after_the_answer(monkeypatch, capsys, loaded, tmp_path):
    def save(self, path, tokenizer=None):
        raise sakiyomi.OptionError(f"{path}: can't be written (No space left on device)")

    monkeypatch.setattr(SuffixDrafter, "save", save)
    command = ["generate", "x", "-n", "5", "-d", "suffix", "--memory", str(tmp_path / "memory")]
    status, out, err = main(monkeypatch, capsys, *command)
    assert status == 2
    assert out.strip()
    assert err == f"sakiyomi: --memory {tmp_path / 'memory'}: can't be written (No space left on device)\n"


@needs_suffix
@pytest.mark.usefixtures("loaded")
def test_a_memory_of_another_tokenizer_is_refused(tmp_path):
    file = tmp_path / "memory"
    assert run(cli.app, ["generate", "x", "-n", "5", "--memory", str(file)]).exit_code == 0
    assert run(cli.app, ["generate", "x", "-n", "5", "--memory", str(file)]).exit_code == 0
    drafter = SuffixDrafter.load(file)
    drafter.save(file, "another")
    result = run(cli.app, ["generate", "x", "-n", "5", "--memory", str(file)])
    assert "holds what another tokenizer's model wrote; use another file" in str(result.exception)


@needs_suffix
@pytest.mark.usefixtures("loaded")
def test_plain_decoding_has_no_use_for_a_memory(tmp_path):
    file = tmp_path / "memory"
    for option in ("--memory", "--reference"):
        result = run(cli.app, ["generate", "x", "-n", "5", "-k", "0", option, str(file)])
        assert "plain decoding uses neither" in str(result.exception)
    assert not file.exists()


@pytest.mark.usefixtures("loaded")
def test_a_draft_model_drafts_in_both_commands(workload, tmp_path):
    plain = run(cli.app, ["generate", PROMPT, "-n", "30", "-d", "none"]).stdout
    reference = tmp_path / "reference.txt"
    reference.write_text("abc", encoding="utf-8")
    command = ["generate", PROMPT, "-n", "30", "--draft-model", "y", "-k", "4", "--json"]
    for more in (["-d", "model"], [], ["-d", "ngram+model", "--reference", str(reference)]):
        found = json.loads(run(cli.app, [*command, *more]).stdout)
        assert found["text"] + "\n" == plain
        assert found["stats"]["by_drafter"]["model"]["accepted"] > 5
    command = ["bench", "--workload", workload, "-n", "12", "-d", "model", "-k", "3", "--draft-model", "y"]
    result = run(cli.app, [*command, "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["machine"]["draft model"] == "y"
    assert found["summaries"][-1]["case"] == "model k=3"
    assert found["summaries"][-1]["tokens_per_target_call"] > 2
    assert "draft model: y" in " ".join(run(cli.app, command).stdout.split())


def test_reference_that_is_not_text_is_named(monkeypatch, capsys, tmp_path):
    file = tmp_path / "picture.txt"
    file.write_bytes(b"\xff\xd8\xff")
    status, _, err = main(monkeypatch, capsys, "generate", "x", "--reference", str(file))
    assert status == 2
    assert f"--reference {file}: can't be read as UTF-8 text" in err


def test_system_message_that_would_be_ignored_is_an_error(monkeypatch, capsys, loaded, llama):
    status, out, err = main(monkeypatch, capsys, "generate", "x", "--system", "Be brief.", "--raw")
    assert (status, out) == (2, "")
    assert "--system 'Be brief.': needs the chat template" in err
    loads(monkeypatch, LLM(llama, byte_tokenizer()))
    status, out, err = main(monkeypatch, capsys, "generate", "x", "--system", "Be brief.")
    assert (status, out) == (2, "")
    assert "needs the chat template" in err


def test_a_model_without_a_chat_template_continues_the_text(monkeypatch, loaded, llama):
    raw = run(cli.app, ["generate", "x", "--raw", "-n", "20"]).stdout
    loads(monkeypatch, LLM(llama, byte_tokenizer()))
    assert run(cli.app, ["generate", "x", "-n", "20"]).stdout == raw


def test_an_error_on_the_way_leaves_the_text_on_lines_of_its_own(monkeypatch, capsys, loaded):
    record = next(loaded.stream("x")).record

    def stream(*_, **__):
        yield sakiyomi.Chunk((sakiyomi.Token(1, "begun", None),), None, record)
        raise sakiyomi.OptionError("processors leave no token possible")

    monkeypatch.setattr(LLM, "stream", stream)
    assert main(monkeypatch, capsys, "generate", "x") == (
        2,
        "begun\n",
        "sakiyomi: processors leave no token possible\n",
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (BrokenPipeError(32, "Broken pipe"), 1)],
    ids=["interrupted", "the reader of the pipe went away"],
)
def test_an_end_that_the_user_wanted_is_quiet(monkeypatch, capsys, loaded, error, status):
    def stream(*_, **__):
        raise error
        yield

    monkeypatch.setattr(LLM, "stream", stream)
    stdout, stderr = sys.stdout, sys.stderr
    found, _, err = main(monkeypatch, capsys, "generate", "x")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert (found, err) == (status, "")


@pytest.fixture
def workload(tmp_path):
    lines = [{"prompt": "abcabcabcabc", "id": "a", "category": "x"}, {"prompt": "the cat sat", "id": "b"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


@pytest.mark.usefixtures("loaded")
def test_bench_compares_every_candidate_with_plain(workload):
    result = run(
        cli.app,
        [
            "bench",
            "--workload",
            workload,
            *["-n", "12", "-d", "ngram", "-k", "2", "-k", "auto", "--repeats", "2", "--json"],
        ],
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["differences"] == found["skipped"] == []
    assert [each["num_speculative_tokens"] for each in found["candidates"]] == [2, None]
    assert found["params"]["max_new_tokens"] == 12
    assert len(found["measurements"]) == 2 * 2 * 3
    assert found["machine"]["model"] == "smollm2-135m"
    expected = ["float32", "fp32", core.resolve() or "torch"]
    assert [found["machine"][name] for name in ("dtype", "weights", "kernels")] == expected
    assert found["quality"] is None


@pytest.mark.usefixtures("loaded")
def test_bench_has_candidates_by_default(workload):
    found = json.loads(run(cli.app, ["bench", "--workload", workload, "-n", "4", "--json"]).stdout)
    settings = [(each["drafter"], each["num_speculative_tokens"]) for each in found["candidates"]]
    assert settings == [("auto", k) for k in (3, 7, None)]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("form", [[], ["--markdown"]], ids=["table", "markdown"])
def test_bench_prints_a_table(workload, form):
    result = run(
        cli.app, ["bench", "--workload", workload, "-n", "6", "-d", "ngram", "-k", "2", "--category", "x", *form]
    )
    assert result.exit_code == 0
    for part in ("plain", "ngram k=2", "Same output", "1 prompts"):
        assert part in " ".join(result.stdout.split())
    assert ("| x | plain |" in result.stdout or "| all prompts | plain |" in result.stdout) == bool(form)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("what", "status"), [("partial", 130), ("differences", 1)])
def test_bench_that_failed_says_so_in_its_exit_status(monkeypatch, workload, what, status):
    """A script must notice output that differs, and a run that was interrupted."""
    from dataclasses import replace

    from sakiyomi.bench import runner

    original = runner.run_benchmark
    value = {"partial": True, "differences": (runner.Difference("a", "ngram k=2", 0, 3, 5, 6),)}[what]
    monkeypatch.setattr(
        runner, "run_benchmark", lambda *args, **options: replace(original(*args, **options), **{what: value})
    )
    result = run(cli.app, ["bench", "--workload", workload, "-n", "4", "-k", "2", "--json"])
    assert result.exit_code == status
    assert json.loads(result.stdout)[what]


@pytest.mark.usefixtures("loaded")
def test_bench_compares_what_keeps_its_tokens(workload):
    """Sampled by block, a draft model's tokens are others than plain decoding's: no difference to complain of."""
    arguments = ["bench", "--workload", workload, "-n", "12", "-k", "2", "-t", "1", "--draft-model", "x", "-d", "model"]
    arguments += ["-d", "ngram+model", "--verification", "coupled", "--verification", "block"]
    result = run(cli.app, [*arguments, "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["differences"] == []
    compared = {each["case"]: (each["identical"], each["compared"]) for each in found["summaries"]}
    assert compared["model k=2"] == compared["ngram+model k=2"] == compared["plain"] == (2, 2)
    assert compared["model k=2 block"] == compared["ngram+model k=2 block"] == (0, 0)
    shown = " ".join(run(cli.app, arguments).stdout.split())
    assert "Same output: every candidate's tokens are identical to plain (4 of 4)" in shown
    assert "Sampled with rejection or block, texts differ and have the same distribution: not compared" in shown
    greedy = json.loads(run(cli.app, [*arguments, "-t", "0", "--json"]).stdout)
    assert all(each["identical"] == each["compared"] == 2 for each in greedy["summaries"] if not each["category"])


VERIFY = ["verify", "-n", "8", "-t", "0.8", "--top-k", "5", "-d", "ngram", "-k", "3"]


@pytest.mark.usefixtures("loaded")
def test_verify_says_what_it_tested(workload):
    result = run(cli.app, [*VERIFY, "--workload", workload, "--seeds", "100"])
    assert result.exit_code == 0, result
    shown = " ".join(result.stdout.split())
    for part in (
        "Kernels: ",
        "16 of 16 outputs",
        "each of 100 seeds",
        "itself k=3 block",
        "PASSED: ",
        "smollm2-135m",
    ):
        assert part in shown
    found = json.loads(run(cli.app, [*VERIFY, "--workload", workload, "--seeds", "0", "--json"]).stdout)
    assert (found["verdict"], found["distribution"]["tests"], found["machine"]["threads"] > 0) == ("passed", [], True)
    drafted = run(
        cli.app, [*VERIFY, "--workload", workload, "--seeds", "0", "-d", "model", "--draft-model", "x", "--json"]
    )
    names = {each["case"].split()[0] for each in json.loads(drafted.stdout)["acceptance"]}
    assert names == {"ngram", "model"}, "with a draft model the target needn't draft for itself"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("what", "status"), [("errors", 1), ("partial", 130)])
def test_verify_says_in_its_exit_status_what_it_found(monkeypatch, workload, what, status):
    from dataclasses import replace

    from sakiyomi import audit

    original = audit.run_audit
    value = {"errors": ["it fell"], "partial": True}[what]
    monkeypatch.setattr(audit, "run_audit", lambda *args, **more: replace(original(*args, **more), **{what: value}))
    result = run(cli.app, [*VERIFY, "--workload", workload, "--seeds", "0"])
    assert result.exit_code == status
    assert {"errors": "FAILED: a drafter failed: it fell", "partial": "INTERRUPTED"}[what] in result.stdout


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "-t", "0"], "--temperature 0: must be above 0; greedy outputs are always compared too"),
        (["verify", "--seeds", "7"], "--seeds 7: must be at least 100, or 0 (no test of distributions)"),
        (["verify", "-d", "oracle"], "drafter='oracle': must be one of"),
        (["verify", "-k", "0"], "--num-speculative-tokens 0: must be at least 1, or auto"),
        (["verify", "-k", "2", "-k", "2"], "--drafter, --num-speculative-tokens: name a setting twice"),
        (["verify", "-k", "many"], "--num-speculative-tokens many: must be a number"),
        (["verify", "--draft-model", "x", "-d", "ngram"], "--draft-model x: --drafter ngram goes without"),
        (["bench", "--verification", "none"], "verification='none': must be one of coupled, rejection, block"),
    ],
)
def test_what_is_wrong_with_an_audit_costs_no_loading(monkeypatch, capsys, arguments, message):
    status, out, err = main(monkeypatch, capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"sakiyomi: {message}")


def test_an_unknown_verification_costs_no_loading(monkeypatch, capsys):
    status, _, err = main(monkeypatch, capsys, "generate", "x", "--verification", "hope", "-m", "no such model")
    assert (status, err) == (2, "sakiyomi: verification='hope': must be one of coupled, rejection, block\n")


@pytest.fixture
def both_weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Let bench load a tiny model, with another head where int8 is asked for; the list is what it asked for."""
    reference = make_reference("llama", num_hidden_layers=1)
    asked: list[tuple[str, str]] = []
    targets: list[weakref.ref[object]] = []
    changed = make_reference("llama", num_hidden_layers=1)
    changed.lm_head.weight.data.mul_(0.9)

    def load(
        model, dtype, weights, kernels, context_length, threads, drafter, k, draft_model, device=None, trained=None
    ):
        assert not any(target() for target in targets), "the one before takes no memory any more"
        asked.append((weights, kernels))
        target = make_target(changed if weights == "int8" else reference, kernels="torch")
        if weights == "int8":
            target.weight_format, target.kernels = "int8", "avx2"
        targets.append(weakref.ref(target))
        return LLM(target, byte_tokenizer(), drafter=drafter, num_speculative_tokens=k, costs=costs)

    monkeypatch.setattr(cli, "load_llm", load)
    monkeypatch.setattr("sakiyomi.targets.resolve", lambda kernels, weights: None)
    return asked


BRIEF = ["-n", "4", "-k", "2"]


def test_bench_measures_the_quality_of_int8_weights_first(both_weights, workload, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the wörst of times.", encoding="utf-8")
    command = ["bench", "--workload", workload, *BRIEF, "--weights", "int8", "--kernels", "avx2"]
    result = run(cli.app, [*command, "--quality-text", str(file), "--json"])
    assert result.exit_code == 0, result
    assert both_weights == [("auto", "avx2"), ("int8", "avx2")]
    found = json.loads(result.stdout)
    assert (found["machine"]["weights"], found["machine"]["kernels"]) == ("int8", "avx2")
    quality = found["quality"]
    assert quality["text"] == str(file)
    assert quality["tokens"] == len(file.read_bytes()) - 1, "a token is a byte here"
    assert quality["ratio"] == pytest.approx(quality["perplexity"] / quality["reference_perplexity"])
    assert quality["ratio"] != 1
    assert quality["agreement"] == 1, "a head that is smaller throughout changes no ranks"


@pytest.mark.usefixtures("both_weights")
@pytest.mark.parametrize("form", [[], ["--markdown"]], ids=["table", "markdown"])
def test_bench_shows_quality_and_on_which_text(monkeypatch, workload, form):
    monkeypatch.setattr("sakiyomi.bench.quality.plain_text", lambda: "one and two")
    result = run(cli.app, ["bench", "--workload", workload, *BRIEF, "--weights", "int8", *form])
    assert result.exit_code == 0, result
    shown = " ".join(result.stdout.split())
    assert re.search(r"Quality: perplexity [\d.]+, with weights=auto [\d.]+ \(ratio [\d.]+\)", shown)
    assert re.search(r"at [\d.]+% of 10 tokens\. Text: the first 50 KB of Python 3[\d.]*'s language reference\.", shown)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read as UTF-8 text"),
        (b"\xff\xd8", "can't be read as UTF-8 text"),
        (b"", "is empty; give some pages of text"),
    ],
    ids=["missing", "a picture", "empty"],
)
def test_a_quality_text_that_is_no_text_costs_no_loading(monkeypatch, capsys, both_weights, tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    status, out, err = main(monkeypatch, capsys, "bench", "--weights", "int8", "--quality-text", str(file))
    assert (status, out) == (2, "")
    assert err.startswith(f"sakiyomi: --quality-text {file}: {message}")
    assert err.count("\n") == 1
    assert both_weights == []


def test_a_quality_text_of_one_token_is_one_line(monkeypatch, capsys, both_weights, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a", encoding="utf-8")
    status, out, err = main(monkeypatch, capsys, "bench", "--weights", "int8", "--quality-text", str(file))
    assert (status, out) == (2, "")
    assert "sakiyomi: text: is 1 tokens long; must be at least 2" in err
    assert both_weights == [("auto", "auto")]


@pytest.fixture
def several_weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str, int | None]]:
    """Let bench load tiny models; the list is what it asked for.

    int8 has another head. The draft model y is another model in int8, else the target itself.
    """
    targets = {}
    for name, options in {"": {}, "int8": {}, "draft": {"hidden_size": 32}}.items():
        reference = make_reference("llama", num_hidden_layers=1, **options)
        if name == "int8":
            torch.manual_seed(7)
            reference.lm_head.weight.data.add_(0.05 * torch.randn_like(reference.lm_head.weight))
        targets[name] = make_target(reference, kernels="torch")
    targets["int8"].weight_format = "int8"
    asked = []

    def load(
        model, dtype, weights, kernels, context_length, threads, drafter, k, draft_model, device=None, trained=None
    ):
        assert draft_model is None, "a draft model is loaded once, whatever it drafts for"
        asked.append((model, dtype, weights, context_length))
        tokenizer = byte_tokenizer(eos=None if "other" in model else "<eos>")
        if "other" in model:
            tokenizer.fast.add_tokens(["one more"])
        target = targets[("draft" if model == "y" else "int8") if weights in ("int8", None) else ""]
        return LLM(target, tokenizer, drafter=drafter, num_speculative_tokens=k, costs=costs)

    monkeypatch.setattr(cli, "load_llm", load)
    monkeypatch.setattr("sakiyomi.targets.resolve", lambda *_: None)
    monkeypatch.setattr("sakiyomi.bench.quality.plain_text", lambda: "one and two and three")
    return asked


def test_bench_measures_several_weights_in_one_run(several_weights, workload, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    command = ["bench", "--workload", workload, "-n", "8", "-d", "ngram", "-k", "2", "--weights", f"bf16,int8,{copy}"]
    result = run(cli.app, [*command, "--context-length", "64", "--json"])
    assert result.exit_code == 0, result
    assert several_weights == [
        ("smollm2-135m", "bf16", "auto", 64),
        ("smollm2-135m", "auto", "int8", 64),
        (str(copy), "auto", "auto", 64),
    ]
    found = json.loads(result.stdout)
    assert found["differences"] == [], "each wrote what its own plain decoding did"
    assert found["machine"]["weights"] == "fp32/int8"
    assert found["quality"] is None
    reference, int8, same = found["weights"]
    assert [each["name"] for each in found["weights"]] == ["bf16", "int8", "copy"]
    assert reference["bytes_per_token"] == 4 * int8["bytes_per_token"] == same["bytes_per_token"]
    assert reference["quality"] is None
    assert (same["quality"]["ratio"], same["quality"]["agreement"]) == (1, 1)
    assert int8["quality"]["ratio"] != 1
    assert int8["quality"]["tokens"] == len("one and two and three") - 1
    whole = {each["case"]: each for each in found["summaries"] if not each["category"]}
    assert list(whole) == [f"{name} {case}" for name in ("bf16", "int8", "copy") for case in ("plain", "ngram k=2")]
    assert all(each["identical"] == each["compared"] == 2 for each in whole.values())
    assert whole["copy plain"]["reference_identical"] == 2
    assert whole["int8 plain"]["reference_identical"] < 2
    for form in ([], ["--markdown"]):
        shown = " ".join(run(cli.app, [*command, *form]).stdout.split())
        assert "Same output: every candidate's tokens are identical to plain with the same weights (6 of 6)" in shown
        assert "speed = TPOT of bf16 plain / TPOT" in shown
        assert ("| copy | 0 | 1.0000 | 100.0% | 2/2 | plain |" in shown) == bool(form)


def test_bench_measures_draft_weights_with_each_of_several_weights(several_weights, workload):
    command = ["bench", "--workload", workload, *BRIEF, "--draft-model", "y", "--json"]
    command += ["-d", "model", "-d", "ngram+model", "-d", "ngram"]
    result = run(
        cli.app, [*command, "--weights", "bf16,int8", "--draft-weights", "int8,bf16", "--context-length", "64"]
    )
    assert result.exit_code == 0, result
    assert several_weights == [
        ("smollm2-135m", "bf16", "auto", 64),
        ("smollm2-135m", "auto", "int8", 64),
        ("y", "auto", "int8", None),
        ("y", "bf16", "auto", None),
    ]
    found = json.loads(result.stdout)
    assert found["differences"] == []
    assert (found["machine"]["draft model"], found["machine"]["draft weights"]) == ("y", "int8/bf16")
    cases = [each["case"] for each in found["summaries"] if not each["category"]]
    drafted = [f"{d} k=2, draft {w}" for d in ("model", "ngram+model") for w in ("int8", "bf16")]
    drafted += ["ngram k=2"]  # which asks no draft model, once
    assert cases == [f"{name} {case}" for name in ("bf16", "int8") for case in ("plain", *drafted)]
    right = {each["case"]: each["acceptance_rate"] for each in found["summaries"] if not each["category"]}
    assert right["bf16 model k=2, draft bf16"] == 1, "it is the target itself"
    assert right["bf16 model k=2, draft int8"] < 0.5


@pytest.mark.parametrize(
    ("options", "asked", "cases"),
    [
        (["--weights", "auto,int8"], 3, ["auto plain", "auto model k=2", "int8 plain", "int8 model k=2"]),
        (["--draft-weights", "auto"], 2, ["plain", "model k=2, draft auto"]),
        (["--draft-weights", "auto", "--weights", "int8"], 3, ["plain", "model k=2, draft auto"]),
    ],
)
def test_what_is_alone_has_no_name(several_weights, workload, options, asked, cases):
    command = ["bench", "--workload", workload, *BRIEF, "-d", "model", "--draft-model", "y", "--json", *options]
    result = run(cli.app, command)
    assert result.exit_code == 0, result
    found = json.loads(result.stdout)
    assert [each["case"] for each in found["summaries"] if not each["category"]] == cases
    assert len(several_weights) == asked
    assert ("weights" in found) == (cases[0] != "plain")
    assert (found["quality"] is not None) == (len(options) == 4)


@pytest.mark.usefixtures("several_weights")
@pytest.mark.parametrize("several", [True, False])
def test_weights_with_another_tokenizer_are_refused(monkeypatch, capsys, tmp_path, several):
    other = tmp_path / "other"
    other.mkdir()
    weights = f"bf16,{other}" if several else str(other)
    status, out, err = main(monkeypatch, capsys, "bench", *BRIEF, "--weights", weights)
    assert (status, out) == (2, "")
    assert "sakiyomi: --weights other: their tokenizer is another, so that they can't be compared" in err


@pytest.mark.parametrize("command", [["generate", "x"], ["bench"]])
def test_weights_and_kernels_reach_load(monkeypatch, command):
    seen = {}

    def load(model, **options):
        seen.update(options)
        raise sakiyomi.OptionError("enough")

    monkeypatch.setattr("sakiyomi.llm.load", load)
    run(cli.app, [*command, "--kernels", "torch", "--device", "cpu"])
    assert (seen["weights"], seen["kernels"], seen["device"]) == ("auto", "torch", "cpu")
    if core.available() and command[0] == "generate":
        run(cli.app, [*command, "--weights", "int8", "--kernels", core.available()[-1]])
        assert (seen["weights"], seen["kernels"]) == ("int8", core.available()[-1])


@pytest.fixture
def three_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let check load models called big, small, and tiny: its context is too short. The list is what was done."""
    reference = make_reference("llama", num_hidden_layers=1)
    done: list[str] = []

    def load(
        model, dtype, weights, kernels, context_length, threads, drafter, k, draft_model, device=None, trained=None
    ):
        own = "auto" if model == "big" or not done else None  # of a draft model, whatever suits
        assert (weights, kernels, threads, drafter, k, draft_model) == (own, "torch", 1, "none", 0, None)
        done.append(f"load {model}")
        target = make_target(reference, context_length={"big": 512, "small": 256, "tiny": 16}[model])
        return LLM(target, byte_tokenizer(), drafter=drafter)

    def measure(target):
        done.append("measure")
        return CostTable((1, 8), {512: (0.04, 0.05), 256: (0.01, 0.02), 16: (0.05, 0.06)}[target.context_length])

    monkeypatch.setattr(cli, "load_llm", load)
    monkeypatch.setattr("sakiyomi.costs.measure", measure)
    return done


PAIR_OPTIONS = ["--kernels", "torch", "--threads", "1"]


def test_check_says_how_a_model_drafts_and_what_it_costs(three_models):
    result = run(cli.app, ["check", "big", "small", *PAIR_OPTIONS])
    assert result.exit_code == 0, result
    assert three_models == ["load big", "measure", "load small", "measure"]
    shown = " ".join(result.stdout.split())
    for part in (
        "tokenizer the same",
        "token by token",
        "target 512, draft model 256",
        "0.25 of the target's",
        "note: ",
    ):
        assert part in shown
    assert "can't work" not in shown
    found = json.loads(run(cli.app, ["check", "big", "small", *PAIR_OPTIONS, "--json"]).stdout)
    assert (found["target"], found["draft_model"], found["way"]) == ("big", "small", "same")
    assert found["cost_ratio"] == pytest.approx(0.25)
    assert found["problems"] == []
    assert len(found["warnings"]) == 1


@pytest.mark.usefixtures("three_models")
def test_check_of_what_cannot_work_has_an_exit_status():
    result = run(cli.app, ["check", "big", "tiny", *PAIR_OPTIONS])
    assert result.exit_code == 1
    assert "can't work: the draft model's context of 16 tokens is too short" in " ".join(result.stdout.split())
    result = run(cli.app, ["check", "big", "tiny", *PAIR_OPTIONS, "--json"])
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["problems"]) == 1


def test_drafters_reach_load(monkeypatch):
    seen = {}

    def load(model, **options):
        seen.update(options)
        raise sakiyomi.OptionError("enough")

    monkeypatch.setattr("sakiyomi.llm.load", load)

    def loaded(line):
        seen.clear()
        run(cli.app, shlex.split(line))
        return tuple(seen[name] for name in ("drafter", "num_speculative_tokens", "draft_model"))

    assert loaded("generate x --verification block") == ("auto", None, None)
    assert seen["verification"] == "block"

    assert loaded("generate x") == ("auto", None, None)
    assert loaded("generate x -d ngram -k 4") == ("ngram", 4, None)
    assert loaded("generate x -k 0 --draft-model y") == ("auto", 0, "y")
    assert loaded("generate x -d model+ngram -k auto --draft-model y") == ("model+ngram", None, "y")
    # A benchmark names its drafters itself, and has costs measured where a candidate needs them.
    assert loaded("bench") == ("none", None, None)
    assert loaded("bench -d auto -k auto --draft-model y") == ("none", None, "y")
    assert loaded("verify -d auto -k auto --draft-model y") == ("none", None, "y")


@pytest.mark.filterwarnings("default")
def test_a_warning_of_load_is_one_line(monkeypatch, capsys, llm):
    def load(model, **options):
        warnings.warn("slow,\n but sound", RuntimeWarning, stacklevel=2)
        return llm

    monkeypatch.setattr("sakiyomi.llm.load", load)
    status, out, err = main(monkeypatch, capsys, "generate", "x", "-n", "2")
    assert (status, err) == (0, "sakiyomi: slow, but sound\n")
    assert out
    assert warnings.showwarning.__module__ == "warnings", "as it was before"


@pytest.mark.filterwarnings("default")
def test_other_warnings_of_load_keep_their_form(monkeypatch, llm):
    def load(model, **options):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return llm

    monkeypatch.setattr("sakiyomi.llm.load", load)
    with pytest.warns(DeprecationWarning, match="old"):
        run(cli.app, ["generate", "x", "-n", "2"])


@pytest.fixture(scope="module")
def default_model() -> LLM:
    return sakiyomi.load("smollm2-135m", kernels=KERNELS, progress=False)


@pytest.mark.model
def test_default_model_writes_the_same_with_drafts(monkeypatch, default_model):
    loads(monkeypatch, default_model)
    arguments = ["generate", PROMPT, "-n", "40"]
    plain = run(cli.app, [*arguments, "-d", "none"])
    assert run(cli.app, arguments).stdout == plain.stdout
    assert len(plain.stdout.split()) > 5
    shown = run(cli.app, [*arguments, "--show-drafts", "--stats"])
    assert "«" in shown.stdout
    assert re.sub("[«»]", "", shown.stdout) == plain.stdout
    assert "acceptance rate" in shown.stderr
    found = json.loads(run(cli.app, [*arguments, "--json"]).stdout)
    assert found["text"] + "\n" == plain.stdout
    assert default_model.tokenizer.decode(found["token_ids"]) == found["text"]
    assert found["stats"]["accepted"] > 0


@pytest.mark.model
def test_default_model_on_the_built_in_workload(monkeypatch, default_model):
    loads(monkeypatch, default_model)
    arguments = ["bench", "--per-category", "1", "--category", "chat", "-n", "8", "-k", "2", "--json"]
    result = run(cli.app, arguments)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["differences"] == []
    assert all(each["identical"] == each["compared"] == 1 for each in found["summaries"])


@pytest.mark.model
@pytest.mark.skipif(not core.available(), reason="int8 needs the compiled core")
def test_the_default_model_with_several_weights(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris, and the capital of Italy is Rome. " * 4, encoding="utf-8")
    command = ["bench", "--per-category", "1", "--category", "code-edit", "-n", "8", "-d", "model", "-k", "2"]
    command += ["--weights", "bf16,int8", "--draft-model", "smollm2-135m", "--draft-weights", "int8,bf16"]
    result = run(cli.app, [*command, "--quality-text", str(text), "--json"])
    assert result.exit_code == 0, result
    found = json.loads(result.stdout)
    assert found["differences"] == []
    assert all(each["identical"] == each["compared"] == 1 for each in found["summaries"])
    bf16, int8 = found["weights"]
    assert bf16["bytes_per_token"] == 2 * int8["bytes_per_token"]
    assert 250e6 < bf16["bytes_per_token"] < 280e6
    assert 0.9 < int8["quality"]["ratio"] < 1.1
    assert int8["quality"]["ratio"] != 1
    assert 0.8 < int8["quality"]["agreement"] <= 1
    # A model that drafts for itself is always right: only the same weights show that they are.
    right = {each["case"]: each["acceptance_rate"] for each in found["summaries"]}
    assert right["bf16 model k=2, draft bf16"] == right["int8 model k=2, draft int8"] == 1


@pytest.mark.model
def test_the_default_model_passes_an_audit(monkeypatch, default_model):
    """The short form: two prompts, and as many seeds as show errors of about a tenth."""
    loads(monkeypatch, default_model)
    arguments = [
        "verify",
        "--per-category",
        "1",
        "--category",
        "chat",
        "--category",
        "code-edit",
        "-n",
        "16",
        "-k",
        "4",
    ]
    result = run(cli.app, [*arguments, "--top-p", "0.9", "--seeds", "100", "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"], found["failures"]) == (0, "passed", [])
    assert (found["identity"]["outputs"], found["identity"]["differences"]) == (16, [])
    assert not any(each["different"] for each in found["rows"])
    for test in found["distribution"]["tests"]:
        assert test["p_value"] > found["distribution"]["threshold"]
        assert test["visible_total_variation"] < 0.2
        assert 0.1 * test["drafted"] < test["accepted"] < 0.9 * test["drafted"]


@pytest.mark.model
def test_the_command_answers_in_a_process_of_its_own():
    command = [sys.executable, "-m", "sakiyomi.cli", "generate", "-", "-n", "8", "--kernels", KERNELS]
    question = "What is the capital of France?"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads wait for each other where the machine is busy
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=True, env=environment)
    assert "Paris" in done.stdout
    assert done.stderr == ""


@pytest.mark.model
def test_a_missing_core_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("SAKIYOMI_CORE_LIBRARY", str(tmp_path / "none"))
    monkeypatch.delenv("SAKIYOMI_KERNELS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "sakiyomi.cli", "generate", "x", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("sakiyomi: the compiled core isn't there")
    assert done.stderr.count("\n") == 1
    monkeypatch.setenv("SAKIYOMI_KERNELS", "torch")  # chosen, so there is nothing to tell
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["generate x", "bench", "verify"])
@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_a_trained_drafter_that_no_option_uses_is_told(monkeypatch, capsys, tmp_path, command, drafter):
    (tmp_path / "config.json").write_text('{"model_type": "sakiyomi-table"}')
    arguments = [*command.split(), "-d", drafter, "--trained", str(tmp_path)]
    status, out, err = main(monkeypatch, capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    expected = f"--trained {tmp_path}: --drafter {drafter} goes without; add +table to it"
    if drafter == "none" and command != "generate x":
        expected = "drafter='none': must name a drafter"
    assert expected in err
