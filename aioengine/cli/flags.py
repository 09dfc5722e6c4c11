"""The flags of the command line. The tables of the constructor's arguments and of the sampling parameters define most.

A command line that is wrong ends the program with one line on stderr and status 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NoReturn

from aioengine.api import checks, foreign_names
from aioengine.api.args import ARGUMENTS, engine_config
from aioengine.api.params import ALIASES, PARAMETERS, SamplingParams
from aioengine.cli.batch import BatchArguments
from aioengine.cli.benchmark import Workload
from aioengine.frontend.info import __version__
from aioengine.settings.config import EngineConfig
from aioengine.settings.planning import read_size
from aioengine.tokenization.chat_template import is_text

_DESCRIPTION: Final = """An LLM inference engine: text from models on this machine.
Exit status: 0; 1 if something failed; 2 if the command line is wrong; 130 after Ctrl-C; 141 if the reader of the output
is gone."""

_EXAMPLES: Final = {
    "": """examples:
  aioengine generate "The capital of France is"
  aioengine generate --model ./my-model --temperature 0.8 --seed 7 "Once upon a time"
  aioengine chat --model Qwen/Qwen3-0.6B
  aioengine serve Qwen/Qwen3-0.6B --port 8000
  aioengine batch prompts.jsonl answers.jsonl
  aioengine bench --num-prompts 64 --concurrency 16
  aioengine info Qwen/Qwen3-8B --device-memory 80GiB""",
    "generate": """examples:
  aioengine generate "The capital of France is"
  aioengine generate --max-new-tokens 20 --stop . "Hello, my name is"
  aioengine generate --n 3 --temperature 1 --top-p 0.9 "Once upon a time"
  echo "Once upon a time" | aioengine generate --temperature 0.8 --seed 7""",
    "chat": """examples:
  aioengine chat
  aioengine chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
  aioengine chat --lora-paths pirate=./adapters/pirate --lora-path pirate
  aioengine chat --model Qwen/Qwen2.5-VL-3B-Instruct --image cat.png""",
    "serve": """examples:
  aioengine serve
  aioengine serve Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8000
  AIOENGINE_API_KEY=secret aioengine serve ./my-model --served-model-name mine""",
    "bench": """examples:
  aioengine bench
  aioengine bench --model ./my-model --prompt-tokens 512 --output-tokens 128 --concurrency 32 --json""",
    "batch": """examples:
  aioengine batch prompts.jsonl answers.jsonl
  aioengine batch --max-new-tokens 200 prompts.jsonl answers.jsonl --resume
  echo '{"prompt": "2 + 3 =", "sampling_params": {"seed": 7}}' | aioengine batch - -""",
    "info": """examples:
  aioengine info
  aioengine info --model ./my-model --dtype float32 --json
  aioengine info ./my-model
  aioengine info Qwen/Qwen3-8B --device-memory 80GiB --context-length 8192""",
}

_COMMANDS: Final = {
    "generate": "stream the answer to a prompt",
    "chat": "have a conversation",
    "serve": "answer clients of OpenAI's HTTP API",
    "batch": "answer the rows of a JSONL file",
    "bench": "measure throughput and latency",
    "info": "print versions, devices, model and settings; or the memory and capacity that a model would have",
}

_GREEDY: Final[dict[str, object]] = {"temperature": 0.0}
_POSITIONAL: Final = {"generate": " [PROMPT]", "serve": " [MODEL]", "batch": " IN OUT", "info": " [MODEL]"}
_TEXTS: Final = {"prompt": "the prompt", "system": "--system", "stop": "--stop", "stop_regex": "--stop-regex"}
"""Arguments that are text for the model or occur in its text, and their names in errors."""

_LONG_WORD: Final = re.compile(r"\S{200,}")


class Arguments(argparse.Namespace):
    """The parsed command line. Arguments of the engine and sampling parameters are attributes by their names too."""

    command: str
    prompt: str | None = None
    system: str | None = None
    lora_path: str | None = None
    image: list[str] | None = None
    n: int = 1
    json: bool = False
    model: str | None = None
    device_memory: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: list[str] | None = None
    served_model_name: list[str] | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    model_path: str | None
    known_flags: Collection[str]

    def check(self) -> None:
        """Check the values that depend neither on the model nor on the machine. Raises TypeError or ValueError."""
        template = self.engine().get("chat_template")
        if isinstance(template, str) and is_text(template):  # otherwise it is a path, which may contain any bytes
            _check_encoding("--chat-template", template)
        self.config()
        if self.model is not None and self.model_path is not None:
            raise ValueError(f"the model is given twice, as {self.model!r} and with --model; leave out one of them")
        if self.command == "bench":
            self.workload()
        elif self.command == "info":
            if self.device_memory is not None:
                read_size(self.device_memory)
                if self.model is None:
                    raise ValueError("--device-memory needs a model: aioengine info MODEL --device-memory 80GiB")
        elif self.command == "serve":
            if not 0 <= self.port < 65536:
                raise ValueError(f"--port must be a number from 0 (any free port) to 65535, got {self.port}")
        else:
            for name, words in _TEXTS.items():
                texts = vars(self).get(name)
                for text in texts if isinstance(texts, list) else [texts]:
                    _check_encoding(words, text)
            SamplingParams.parse({**self.sampling(), "n": self.n})
            if self.command == "batch":
                self.batch().check()

    def config(self) -> EngineConfig:
        """Return the config of the engine."""
        return engine_config(self.model_path if self.model is None else self.model, self.engine())

    def engine(self) -> dict[str, object]:
        """Return the other arguments of the constructor on the command line."""
        return self._existing(name for name in ARGUMENTS if name != "model_path")

    def sampling(self) -> dict[str, object]:
        """Return the sampling parameters on the command line; greedy by default."""
        return _GREEDY | self._existing(name for name, row in PARAMETERS.items() if row.read is not None)

    def workload(self) -> Workload:
        """Return the requests of ``bench``."""
        return Workload(**{name: vars(self)[name] for name in Workload.__struct_fields__})

    def batch(self) -> BatchArguments:
        """Return the arguments of ``batch``."""
        return BatchArguments(**{name: vars(self)[name] for name in BatchArguments.__struct_fields__})

    def _existing(self, names: Iterable[str]) -> dict[str, object]:
        return {name: value for name in names if (value := vars(self).get(name)) is not None}


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations. Its errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        message = _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} long)", message)
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def read(argv: Sequence[str] | None = None) -> Arguments:
    """Parse ``argv``, or the command line of the program. Ends the program with status 2 if it is wrong."""
    parser = _Parser(prog="aioengine", description=_DESCRIPTION, epilog=_EXAMPLES[""])
    parser.add_argument("--version", action="version", version=f"aioengine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(_COMMANDS))
    for name, about in _COMMANDS.items():
        usage = f"aioengine {name} [options]{_POSITIONAL.get(name, '')}"
        command = commands.add_parser(
            name, usage=usage, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=_EXAMPLES[name]
        )
        _add_own_flags(command, name)
        if name in ("generate", "chat", "batch"):
            _add_sampling(command.add_argument_group("sampling"))
        _add_engine(command.add_argument_group("engine"))
        command.set_defaults(known_flags=[flag for action in command._actions for flag in action.option_strings])
    arguments, unknown = parser.parse_known_args(argv, Arguments())
    if unknown:
        flags = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-"))
        words = [flag + _hint(flag, arguments.known_flags) for flag in flags or unknown]
        commands.choices[arguments.command].error(f"unrecognized arguments: {', '.join(words)}")
    return arguments


def _hint(flag: str, known: Collection[str]) -> str:
    """Return a hint for a flag that a command does not have. ``known``: the flags of the command."""
    if flag in ("--prompt", "-p"):
        return " (the prompt is given without a flag)"
    if flag in known:
        return " (a flag of a command comes after the command)"
    plain = flag.replace("_", "-")
    name = plain.removeprefix("--").replace("-", "_")
    if name in foreign_names.MISSING_ARGUMENTS:
        return f" ({foreign_names.MISSING_ARGUMENTS[name][1]}: not available yet)"
    if name in foreign_names.IGNORED:
        return " (it has no effect in aioengine)"
    name = ALIASES.get(name) or foreign_names.ALIASES.get(name, name)
    own = _flag(PARAMETERS[name].flag or name) if name in PARAMETERS else _flag(name)
    likely = (own, *foreign_names.FLAGS.get(plain, "").split(), checks.nearest(plain, sorted(known), cutoff=0.7))
    meant = next((candidate for candidate in likely if candidate in known), None)
    return f" (did you mean {meant}?)" if meant else ""


def _add_own_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the flags that are neither arguments of the engine nor sampling parameters."""
    add = parser.add_argument
    if command == "bench":
        add("--num-prompts", type=int, default=32, metavar="N", help="number of requests (default: 32)")
        add("--prompt-tokens", type=int, default=128, metavar="N", help="of each request (default: 128)")
        add("--output-tokens", type=int, default=64, metavar="N", help="of each request (default: 64)")
        add("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    if command == "info":
        add("model", nargs="?", metavar="MODEL", help="estimate memory and capacity for this model without loading it")
        add("--device-memory", metavar="SIZE", help="plan for another machine with this memory, such as 80GiB")
    if command == "serve":
        add("model", nargs="?", metavar="MODEL", help="hub id or folder of the model (default: the demo model)")
        add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
        add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any (default: 8000)")
        about = "key that clients must send (repeatable; default: $AIOENGINE_API_KEY, otherwise none)"
        add("--api-key", action="append", metavar="KEY", help=about)
        about = "name of the model for clients (repeatable; default: its hub id, or the name of its folder)"
        add("--served-model-name", action="append", metavar="NAME", help=about)
        for flag, texts in (("--tool-parser", "tool calls"), ("--reasoning-parser", "reasoning")):
            about = f"format of {texts} in the model's text; none: they stay text (default: auto, by its chat template)"
            add(flag, default="auto", metavar="NAME", help=about)
        return
    if command in ("bench", "info"):
        add("--json", action="store_true", help="print JSON")
        return
    if command == "batch":
        about = "JSONL file of texts, token ids, or arguments of generate or chat; -: standard input"
        add("source", metavar="IN", help=about)
        about = "JSONL file for the answers, in the order in which they end; -: standard output"
        add("target", metavar="OUT", help=about)
        add("--resume", action="store_true", help="continue the job that wrote OUT and its journal OUT.journal")
        add("--window", type=int, metavar="N", help="rows in flight (default: twice --max-running-requests)")
        add("--lora-path", metavar="NAME", help="adapter of --lora-paths for rows without one (default: none)")
        about = "name of the model in rows in OpenAI's form (repeatable; default: hub id, or name of the folder)"
        add("--served-model-name", action="append", metavar="NAME", help=about)
        return
    place = "the conversation; images come before its first line"
    if command == "generate":
        place = "the prompt, which must contain the model's placeholder for it"
        add("prompt", nargs="?", metavar="PROMPT", help="text to continue; left out, or -: standard input")
        add("--n", type=int, default=1, metavar="N", help="number of answers; several are printed at the end")
    else:
        add("--system", metavar="TEXT", help="system message of the conversation")
    add("--lora-path", metavar="NAME", help="adapter of --lora-paths to use (default: none)")
    add("--image", action="append", metavar="PATH", help=f"file or URL of an image in {place} (repeatable)")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    for name, row in PARAMETERS.items():
        if row.read is not None:
            default = _GREEDY.get(name, row.default)
            hint = " (repeatable)" if row.is_list else "" if default is None else f" (default: {default})"
            action = "append" if row.is_list else "store"
            _add(group, _flag(row.flag or name), name=name, read=row.read, about=row.summary + hint, action=action)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    for name, argument in ARGUMENTS.items():
        flags = ["--model", "--model-path"] if name == "model_path" else [_flag(name)]
        if name == "progress":
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=argument.description)
        else:
            _add(group, *flags, name=name, read=argument.read, about=argument.description)


def _add(group: argparse._ArgumentGroup, *flags: str, name: str, read: Any, about: str, action: str = "store") -> None:
    """Add a flag. ``read`` converts its text to the value; bool: a switch."""
    if read is bool:
        group.add_argument(*flags, dest=name, action="store_const", const=True, help=about)
    else:
        metavar = "TEXT" if read is str else "N"
        group.add_argument(*flags, dest=name, action=action, type=read, metavar=metavar, help=about)


def _check_encoding(name: str, text: object) -> None:
    """Raise ValueError for bytes that are not text; Python represents them as lone surrogates."""
    if isinstance(text, str) and (odd := re.search("[\udc80-\udcff]", text)):
        encoding = sys.getfilesystemencoding()
        raise ValueError(f"{name} is not {encoding}: it has the byte 0x{ord(odd[0]) - 0xDC00:02x}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
