"""The command line prints answers to stdout, errors as one line to stderr, and ends without a traceback."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from aioengine.api.args import ARGUMENTS
from aioengine.api.engine import AsyncEngine
from aioengine.api.params import SamplingParams
from aioengine.api.sync import Engine
from aioengine.cli import benchmark, commands, flags, main
from aioengine.cli.benchmark import Workload, percentile
from aioengine.settings import machine
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.fake_adapters import write_adapter
from tests.kit.source import PACKAGE, ROOT

COMMANDS = ("generate", "chat", "serve", "batch", "bench", "info")
FILES = {"batch": ("in", "out")}
"""The arguments that a command needs."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def run(*argv: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program in its own process, as a shell does."""
    command = [sys.executable, "-m", "aioengine", *argv]
    return subprocess.run(command, cwd=ROOT, input=given or "", capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def run_here(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process with a shared engine. Its arguments must not configure the engine."""
    shared = type("", (), {"from_config": staticmethod(lambda _: contextlib.nullcontext(engine))})
    monkeypatch.setattr(commands, "Engine", shared)

    def run_here(*argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        status = main(argv)
        return subprocess.CompletedProcess(argv, status, *capsys.readouterr())

    return run_here


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``aioengine bench`` in this process measure the fake model."""
    faked = type("", (), {"from_config": staticmethod(lambda _: fake_async_engine())})
    monkeypatch.setattr(benchmark, "AsyncEngine", faked)


# ---------------------------------------------------------------- flags


def parsed(*argv: str) -> flags.Arguments:
    return flags.read(argv)


def test_help_of_every_command_has_all_arguments_with_their_defaults() -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
            flags.read([command, "--help"])
        words = "".join(printed.getvalue().split())  # lines are broken between words and after hyphens
        assert [name for name, of in ARGUMENTS.items() if "".join(of.description.split()) not in words] == []


def test_the_help_has_the_defaults_of_the_sampling_flags() -> None:
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        flags.read(["chat", "--help"])
    words = " ".join(printed.getvalue().split())
    assert "0 (always the most likely token) to 2 (default: 0.0)" in words  # not 1 as in other calls
    assert "maximum output tokens (default: 128)" in words


def test_every_constructor_argument_is_a_flag_of_every_command() -> None:
    for command in COMMANDS:
        given: list[str] = []
        for name, argument in ARGUMENTS.items():
            flag = "--model" if name == "model_path" else "--" + name.replace("_", "-")
            given += [flag] if argument.read is bool else [flag, "1"]
        files = FILES.get(command, ())
        assert parsed(command, *files, *given).model_path == "1"
        arguments = parsed(command, *files, *given).engine()
        assert {*arguments, "model_path"} == set(ARGUMENTS)
        assert arguments["page_size"] == 1
        assert arguments["mem_fraction_static"] == 1.0
        assert arguments["disable_radix_cache"] is arguments["progress"] is True
        assert (parsed(command, *files).model_path, parsed(command, *files).engine()) == (None, {})
    assert parsed("info", "--no-progress").engine() == {"progress": False}


def test_flags_set_sampling_parameters() -> None:
    arguments = parsed(
        "generate", "Hi", "--temperature", "0.5", "--max-new-tokens", "7", "--seed", "3", "--stop", "a", "--stop", "b"
    )
    assert arguments.prompt == "Hi"
    assert arguments.sampling() == {"temperature": 0.5, "max_new_tokens": 7, "sampling_seed": 3, "stop": ["a", "b"]}
    assert parsed("chat").sampling() == {"temperature": 0.0}


def test_every_other_sampling_flag() -> None:
    numbers = {"min_new_tokens": 2, "top_k": 3, "frequency_penalty": 0.5, "presence_penalty": 0.25, "min_p": 0.1}
    given = [word for name, value in numbers.items() for word in ("--" + name.replace("_", "-"), str(value))]
    lists = ["--stop-regex", "a+", "--stop-token-ids", "5", "--stop-token-ids", "6"]
    for command in ("generate", "chat"):
        actual = parsed(command, *given, *lists, "--ignore-eos", "--no-stop-trim").sampling()
        switches = {"ignore_eos": True, "no_stop_trim": True}
        expected = {"temperature": 0.0, **numbers, "stop_regex": ["a+"], "stop_token_ids": [5, 6], **switches}
        assert actual == expected
        assert SamplingParams.parse(actual).ignore_eos


@pytest.mark.parametrize("argv", [["--vers"], ["generate", "x", "--temp", "1"], ["info", "--js"]])
def test_flags_are_not_abbreviated(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], *([command] for command in COMMANDS)])
def test_help_has_examples_that_can_be_parsed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    examples = capsys.readouterr().out.partition("examples:")[2].strip().splitlines()
    assert len(examples) >= 2
    for example in examples:
        words = re.findall(r'"[^"]*"|\S+', example.partition("aioengine ")[2])
        parsed(*(word.strip('"') for word in words))


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"aioengine \d+\.\d+\S*\n", capsys.readouterr().out)


def test_bench_creates_the_requested_workload() -> None:
    workload = parsed("bench", "--num-prompts", "3", "--concurrency", "2").workload()
    assert workload == Workload(num_prompts=3, prompt_tokens=128, output_tokens=64, concurrency=2)
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (1, 50, 90, 100)] == [1.0, 2.0, 3.0, 3.0]
    assert percentile([], 50) == 0


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x", "--page-size", "none"], "argument --page-size: invalid int value: 'none'"),
        (["generate", "x", "--nonsense"], "unrecognized arguments: --nonsense (see aioengine generate --help)"),
        (["generate", "x", "--pipeline-parallel-size", "2"], "(pipeline parallelism: not available yet)"),
        (["generate", "x", "--host", "::"], "--host (it has no effect in aioengine)"),
        (["generate", "x", "--max-tokens", "5"], "arguments: --max-tokens (did you mean --max-new-tokens?) (see"),
        (["generate", "--max-tokens", "5", "x"], "arguments: --max-tokens (did you mean --max-new-tokens?) (see"),
        (["generate", "x", "--max_new_tokens=5"], "--max_new_tokens (did you mean --max-new-tokens?)"),
        (["generate", "x", "--temprature", "1"], "--temprature (did you mean --temperature?)"),
        (["chat", "--system-prompt", "x"], "--system-prompt (did you mean --system?)"),
        (["generate", "--prompt", "x"], "--prompt (the prompt is given without a flag)"),
        (["bench", "-m", "x", "--ctx-size", "5"], "-m (did you mean --model?), --ctx-size (did you mean --context-l"),
        (["chat", "--block-size", "8"], "--block-size (did you mean --page-size?)"),
        (["info", "--max-model-len", "8"], "--max-model-len (did you mean --context-length?)"),
        (["bench", "--max-tokens", "5"], "--max-tokens (did you mean --output-tokens?)"),
        (["--json", "info"], "unrecognized arguments: --json (a flag of a command comes after the command)"),
        (["generate", "x", "--seed", "9" * 5000], "9999... (50"),
        (["generate", "x", f"--{'a' * 5000}"], "aaaa... (50"),
        (["explain"], "invalid choice: 'explain'"),
        ([], "the following arguments are required"),
    ],
)
def test_wrong_flag_has_an_error_of_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", "--model", "./no/such/folder"], "there is no such folder"),
        (["info", "--context-length", "100000000"], "context_length must be at most"),
        (["generate", "x", "--model", "./no/such/folder"], "there is no such folder"),
        pytest.param(
            ["chat", "--device", "cuda"],
            "device='cuda' is not available: this machine has no NVIDIA GPU",
            marks=pytest.mark.skipif(machine.device_facts().num_gpus > 0, reason="this machine has a GPU"),
        ),
    ],
)
def test_failures_have_an_error_of_one_line_and_status_1(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_fails(argv, 1, message, capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", "--page-size", "0"], "page_size must be an integer from 1 to 1024, got 0"),
        (["info", "--dtype", "int3"], "dtype must be one of"),
        (["bench", "--output-tokens", "1"], "--output-tokens must be an integer of at least 2, got 1"),
        (["bench", "--concurrency", "0"], "--concurrency must be an integer of at least 1, got 0"),
        (["bench", "--concurrency", "-1"], "--concurrency must be an integer of at least 1, got -1"),
        (["bench", "--concurrency", "9" * 30], "--concurrency must be an integer from 1 to 2147483647, got 999"),
        (["bench", "--num-prompts", "2147483647"], "--num-prompts times --prompt-tokens is 274877906816; at most"),
        (["generate", "x", "--temperature", "3"], "temperature must be a number from 0 to 2, got 3.0"),
        (["generate", "x", "--n", "0"], "n must be an integer from 1 to 1024, got 0"),
        (["generate", ""], "give a prompt"),
        (["chat", "--stop-regex", "("], "stop_regex '(' is not a valid pattern"),
    ],
)
def test_wrong_value_has_an_error_of_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_fails(argv, 2, message, capsys)


def assert_fails(argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("aioengine: ")
    assert captured.err.count("\n") == 1


# ---------------------------------------------------------------- info


def test_info_prints_versions_machine_model_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--page-size", "8"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "machine", "model", "settings"}
    assert facts["settings"].keys() == ARGUMENTS.keys()
    assert facts["settings"]["page_size"] == 8
    assert facts["settings"]["context_length"] == facts["model"]["context_length"]
    assert isinstance(facts["settings"]["max_running_requests"], int)
    assert facts["settings"]["max_total_tokens"] is None
    assert facts["model"]["architecture"].endswith("ForCausalLM")
    assert facts["versions"]["torch"][0].isdigit()
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{title}\n" in f"\n{text}" for title in facts)
    assert re.search(r"page_size +16\n", text)
    assert re.search(r"max_total_tokens +as much as fits into memory\n", text)


def test_info_prints_the_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(4)}
    folder = write_adapter(tmp_path / "a", rank=4, layers=layers)
    assert main(["info", "--json", "--lora-paths", f"math={folder}"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert [
        settings[name] for name in ("enable_lora", "max_loras_per_batch", "max_lora_rank", "lora_target_modules")
    ] == [
        True,
        8,
        4,
        ["q_proj"],
    ]
    assert settings["lora_paths"][0]["name"] == "math"
    assert main(["info", "--lora-paths", f"math={tmp_path}"]) == 1
    assert "has no adapter_config.json" in capsys.readouterr().err


# ---------------------------------------------------------------- with an engine


@pytest.mark.process
def test_generate_prints_only_the_answer(engine: Engine) -> None:
    expected = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 12})["text"]
    done = run("generate", "The capital of France is", "--max-new-tokens", "12")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")
    assert "Paris" in done.stdout


@pytest.mark.process
def test_several_answers_are_printed_one_below_the_other(run_here: Run) -> None:
    done = run_here("generate", "The capital of France is", "--max-new-tokens", "3", "--n", "2", "--ignore-eos")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.removesuffix("\n").split("\n\n")
    assert first == second
    assert first.startswith(" Paris.")


@pytest.mark.process
@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_a_prompt_may_come_from_standard_input(prompt: list[str], run_here: Run) -> None:
    done = run_here("generate", *prompt, "--max-new-tokens", "12", given="The capital of France is")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


@pytest.mark.process
def test_request_errors_have_one_line(run_here: Run) -> None:
    done = run_here("generate", "x", "--max-new-tokens", "999999")
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_new_tokens=999999" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.process
def test_a_damaged_model_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(PACKAGE / "demo", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert_fails(["generate", "x", "--model", str(tmp_path)], 1, f"cannot read {tmp_path}/model.safetensors: ", capsys)


@pytest.mark.process
@pytest.mark.slow
def test_an_error_of_a_process_is_shown_without_its_traceback() -> None:
    done = run("generate", "x", "--mem-fraction-static", "1e-9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "ValueError: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_chat_answers_each_line_of_its_input(run_here: Run) -> None:
    done = run_here("chat", "--max-new-tokens", "16", "--system", "Be brief.", given="Hello!\n\nWhat is your name?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") >= 2
    assert done.stdout.strip()


@pytest.mark.process
@pytest.mark.slow
def test_generate_uses_an_adapter(run_here: Run, tmp_path: Path) -> None:
    layers = {f"model.layers.{i}.mlp.down_proj": (256, 896) for i in range(4)}
    write_adapter(tmp_path, rank=8, layers=layers, config={"lora_alpha": 400})
    asked = {"given": "What is the capital of Norway?\n"}
    done = run("chat", "--max-new-tokens", "8", "--lora-paths", f"a={tmp_path}", "--lora-path", "a", **asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() not in ("", run_here("chat", "--max-new-tokens", "8", **asked).stdout.strip())
    for command in (("generate", "x"), ("generate", "x", "--n", "2")):
        done = run_here(*command, "--lora-path", "a")
        assert (done.returncode, done.stdout) == (1, "")
        assert "serves no LoRA adapters" in done.stderr


def test_chat_starts_again_if_the_conversation_is_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faked = type("", (), {"from_config": staticmethod(lambda _: fake_engine(context_length=64))})
    monkeypatch.setattr(commands, "Engine", faked)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word " * 200 + b"\nHello!\n")))
    assert main(["chat", "--max-new-tokens", "8"]) == 0
    done = capsys.readouterr()
    assert "the conversation starts again" in done.err
    assert done.err.count("\n") == 1
    assert done.out.strip()


SMALL_BENCH = ("--num-prompts", "3", "--prompt-tokens", "8", "--output-tokens", "4", "--concurrency", "2")


@pytest.mark.usefixtures("fake_model")
def test_bench_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", *SMALL_BENCH]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    figures = json.loads(printed.out)
    assert (figures["num_requests"], figures["prompt_tokens"], figures["output_tokens"]) == (3, 24, 12)
    assert 0 < figures["first_token_ms_p50"] <= figures["request_ms_p50"] <= figures["request_ms_p99"]


@pytest.mark.usefixtures("fake_model")
def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL_BENCH]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r"^output_tokens +12$", printed.out, re.MULTILINE)
    assert re.search(r"^milliseconds +p50 +p90 +p99$", printed.out, re.MULTILINE)


@pytest.mark.usefixtures("fake_model")
def test_a_bench_has_no_more_tasks_than_prompts() -> None:
    assert main(["bench", "--concurrency", "2147483647", "--num-prompts", "2", "--output-tokens", "2"]) == 0


@pytest.mark.usefixtures("fake_model")
def test_bench_refuses_long_prompts_before_creating_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aioengine.cli.benchmark._prompt", pytest.fail)
    assert_fails(["bench", "--prompt-tokens", "5000", "--num-prompts", "3"], 1, "the prompt has 5000 tokens", capsys)


ENDLESS = ("--max-new-tokens", "1500", "--temperature", "1", "--seed", "1")


ODD = "caf\u00e9 \u6771\u4eac \U0001f956"
FAKED = """
import sys
from aioengine import cli
from aioengine.cli import commands
from aioengine.testing.fake_engine import fake_engine
commands.Engine = type("", (), {"from_config": staticmethod(lambda config: fake_engine(ARGUMENTS))})
sys.exit(cli.main(sys.argv[1:]))
"""
"""The program with a fake model, which starts faster."""
REPEATING = FAKED.replace("ARGUMENTS", f"{{'': {ODD!a}}}")
SLOW = FAKED.replace("ARGUMENTS", "processes=True, step_time_s=0.002")


def start(command: Sequence[str], **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, start_new_session=True, **streams)


@pytest.mark.process
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_answers_with_letters_outside_the_output_encoding_are_printed(encoding: str) -> None:
    command = [sys.executable, "-c", REPEATING, "generate", "x", "--max-new-tokens", "90"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).strip() == ODD.encode(encoding, "backslashreplace").decode(encoding)


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("generate", {"PYTHONIOENCODING": "utf-8"}),
        ("generate", {"LC_ALL": "C"}),
        ("generate", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("chat", {"LC_ALL": "C.UTF-8"}),
    ],
)
def test_input_that_is_not_utf_8_is_refused(command: str, settings: dict[str, str]) -> None:
    line = [sys.executable, "-c", REPEATING, command, "--no-progress"]
    environment = {**os.environ, **settings}
    done = subprocess.run(
        line,
        cwd=ROOT,
        env=environment,
        input="caf\u00e9\n".encode("latin-1"),
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    message = (
        "aioengine: standard input is not utf-8: it has the byte 0xe9; convert it first (iconv -f latin1 -t utf-8)"
    )
    assert done.stderr.decode() == message + "\n"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["generate", "caf\udce9"], "the prompt"),
        (["chat", "--system", "caf\udce9"], "--system"),
        (["generate", "x", "--stop", "a", "--stop", "caf\udce9"], "--stop"),
        (["chat", "--stop-regex", "caf\udce9"], "--stop-regex"),
        (["generate", "x", "--chat-template", "{{ caf\udce9 }}"], "--chat-template"),
    ],
)
def test_arguments_that_are_not_utf_8_are_refused(
    argv: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_fails(argv, 2, f"{name} is not utf-8: it has the byte 0xe9", capsys)


INTERRUPTED_IMPORT = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
sys.argv = ["aioengine", "info"]
{start}
"""
STARTS = {
    "module": "import runpy; runpy.run_module('aioengine', run_name='__main__', alter_sys=True)",
    "script": "from aioengine.cli import main; sys.exit(main())",
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "module"),
    [
        ("module", "argparse"),
        ("script", "asyncio"),
        ("module", "msgspec"),
        ("script", "uvloop"),
        ("module", "aioengine.cli.flags"),
        ("script", "aioengine.cli.flags"),
    ],
)
def test_ctrl_c_during_the_imports_prints_nothing(how: str, module: str) -> None:
    program = INTERRUPTED_IMPORT.format(module=module, start=STARTS[how])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=90, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.process
def test_ctrl_c_prints_nothing() -> None:
    process = start(["-c", SLOW, "generate", "Once", *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(8)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


@pytest.mark.process
def test_closed_pipe_is_not_an_error() -> None:
    process = start(["-c", SLOW, "generate", "Once", *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(8)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
    process.stderr.close()


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        """command: the arguments of Python."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = start(command, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, timeout_s: float = 30) -> None:
        """Read until the text appears after the last text that was waited for."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.wait_for_more()
        self.seen = self.seen.partition(text)[2]

    def wait_for_more(self) -> None:
        self.seen += os.read(self._master, 1024).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> int:
        """Read to the end, and return the exit status."""
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                self.wait_for_more()
        os.close(self._master)
        return self.process.wait(timeout=60)


@pytest.mark.process
def test_ctrl_c_ends_the_answer_of_a_chat_and_ctrl_d_the_chat() -> None:
    terminal = Terminal("-c", SLOW, "chat", *ENDLESS, "--no-progress")
    terminal.wait_for("Ctrl-C ends an answer; at the prompt, Ctrl-C and Ctrl-D end the conversation.")
    terminal.wait_for("> ")
    terminal.type("Tell me a long story.\n")
    terminal.wait_for("story.\r\n")
    terminal.wait_for_more()  # the answer has started
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("> ")
    terminal.type("Hello!\n")
    terminal.wait_for("Hello!\r\n")
    terminal.wait_for("\r\n> ")
    terminal.type("\x04")
    assert terminal.close() == 0


@pytest.mark.process
def test_ctrl_c_at_the_prompt_ends_the_chat() -> None:
    terminal = Terminal("-c", SLOW, "chat", *ENDLESS, "--no-progress")
    terminal.wait_for("> ")
    time.sleep(0.3)
    for _ in range(5):  # Python's input() misses a signal that comes between its prompt and its read
        os.kill(terminal.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(5)
            break
    terminal.wait_for("\r\n")
    assert terminal.close() == 130
    assert "Traceback" not in terminal.seen


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "Once upon a time"],
        pytest.param(["chat"], marks=pytest.mark.slow),
        pytest.param(["bench", "--num-prompts", "9000"], marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_current_line(command: list[str]) -> None:
    terminal = Terminal("-m", "aioengine", *command, *(ENDLESS if command[0] == "generate" else ()), "--progress")
    terminal.wait_for("loading weights")
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.close() == 130
    assert terminal.seen.endswith("\r\n")


def test_engines_refuse_unknown_arguments() -> None:
    for face in (Engine, AsyncEngine):
        with pytest.raises(TypeError, match="unknown argument"):
            face(no_such_argument=1)
