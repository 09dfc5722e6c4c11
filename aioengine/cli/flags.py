"""The flags of the command line. Those of the engine are made from the table of constructor arguments."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import TYPE_CHECKING, Final, NoReturn, cast

from aioengine.api import foreign_names
from aioengine.api.args import ARGUMENTS, engine_config
from aioengine.api.params import ALIASES, PARAMETERS, SamplingParams
from aioengine.cli.benchmark import Workload
from aioengine.frontend.info import __version__
from aioengine.settings.planning import read_size
from aioengine.tokenization.chat_template import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from aioengine.settings.config import EngineConfig

_EXAMPLES: Final = {
    None: """examples:
  aioengine generate "The capital of France is"
  aioengine generate --model ./my-model --temperature 0.8 --seed 7 "Once upon a time"
  aioengine chat --model Qwen/Qwen3-0.6B
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
    "bench": """examples:
  aioengine bench
  aioengine bench --model ./my-model --prompt-tokens 512 --output-tokens 128 --concurrency 32 --json""",
    "info": """examples:
  aioengine info
  aioengine info --model ./my-model --dtype float32 --json
  aioengine info ./my-model
  aioengine info Qwen/Qwen3-8B --device-memory 80GiB --context-length 8192""",
}


class Arguments(argparse.Namespace):
    """The parsed command line; arguments of the engine and sampling parameters are attributes by their names too."""

    command: str
    prompt: str | None = None
    system: str | None = None
    lora_path: str | None = None
    image: list[str] | None = None
    n: int = 1
    json: bool = False
    model: str | None = None
    device_memory: str | None = None
    model_path: str | None
    known_flags: frozenset[str]

    def check(self) -> None:
        """Raise TypeError or ValueError where a value is wrong, whatever the model and the machine."""
        template = self.engine().get("chat_template")
        if isinstance(template, str) and is_text(template):  # else it is a path, which may be any bytes
            _check_encoding("--chat-template", template)
        self.config()
        if self.command == "bench":
            self.workload()
        elif self.command == "info":
            if self.device_memory is not None:
                read_size(self.device_memory)
                if self.model is None:
                    raise ValueError("--device-memory needs a model: aioengine info MODEL --device-memory 80GiB")
            if self.model is not None and self.model_path is not None:
                raise ValueError(f"the model is given twice, as {self.model!r} and with --model; leave out one of them")
        else:
            for name, words in _TEXTS.items():
                given = vars(self).get(name)
                for text in given if isinstance(given, list) else [given]:
                    _check_encoding(words, text)
            SamplingParams.parse({**self.sampling(), "n": self.n})

    def config(self) -> EngineConfig:
        """The config of the engine."""
        return engine_config(self.model_path if self.model is None else self.model, self.engine())

    def engine(self) -> dict[str, object]:
        """The constructor's other arguments that were given."""
        return self._given(name for name in ARGUMENTS if name != "model_path")

    def sampling(self) -> dict[str, object]:
        """The sampling parameters that were given; greedy by default."""
        return _GREEDY | self._given(name for name, row in PARAMETERS.items() if row.read is not None)

    def workload(self) -> Workload:
        """What ``bench`` measures."""
        return Workload(**{name: cast("int", vars(self)[name]) for name in Workload.__struct_fields__})

    def _given(self, names: Iterable[str]) -> dict[str, object]:
        return {name: value for name in names if (value := vars(self).get(name)) is not None}


_GREEDY: Final[dict[str, object]] = {"temperature": 0.0}
_POSITIONAL: Final = {"generate": " [PROMPT]", "info": " [MODEL]"}
_TEXTS: Final = {"prompt": "the prompt", "system": "--system", "stop": "--stop", "stop_regex": "--stop-regex"}
"""Arguments that are text for the model or are found in its text, and their names in errors."""

_LONG_WORD: Final = re.compile(r"\S{200,}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the flags that were probably meant."""

    def error(self, message: str) -> NoReturn:
        message = _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} long)", message)
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def read(self, argv: Sequence[str] | None) -> Arguments:
        """Parse the command line; flags that do not exist end the program, with a hint."""
        found, unknown = self.parse_known_args(argv, Arguments())
        if unknown:
            flags = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-"))
            words = [flag + _hint(flag, found.known_flags) for flag in flags or unknown]
            self.error(f"unrecognized arguments: {', '.join(words)}")
        return found


def _hint(flag: str, known: Collection[str]) -> str:
    """The flag that was probably meant by one that a command does not have."""
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
    own = _sampling_flag(name) if name in PARAMETERS else "--" + name.replace("_", "-")
    near = difflib.get_close_matches(plain, sorted(known), n=1, cutoff=0.7)
    likely = (own, *foreign_names.FLAGS.get(plain, "").split(), *near)
    meant = next((candidate for candidate in likely if candidate in known), None)
    return f" (did you mean {meant}?)" if meant else ""


def read(argv: Sequence[str] | None = None) -> Arguments:
    """Parse the command line of the program, or this one. Exits with status 2 where it is wrong."""
    return _main_parser().read(argv)


def _main_parser() -> _Parser:
    main = _Parser(
        prog="aioengine",
        description="An LLM inference engine: text from models on this machine.\n"
        "The status is 0, or 1 where something failed, or 2 where the command line is wrong.",
        epilog=_EXAMPLES[None],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    main.add_argument("--version", action="version", version=f"aioengine {__version__}")
    commands = main.add_subparsers(dest="command", required=True, metavar="generate | chat | bench | info")
    for name, add, about in (
        ("generate", _add_generate, "stream the answer to a prompt"),
        ("chat", _add_chat, "hold a conversation"),
        ("bench", _add_bench, "measure throughput and latency"),
        ("info", _add_info, "print versions, devices, model and settings; or what a model would take"),
    ):
        command = commands.add_parser(
            name,
            usage=f"aioengine {name} [options]{_POSITIONAL.get(name, '')}",
            help=about,
            description=about.capitalize() + ".",
            epilog=_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add(command)
        _add_engine(command)
        known = [flag for action in command._actions for flag in action.option_strings]
        command.set_defaults(known_flags=frozenset(known))
    return main


def _add_generate(to: argparse.ArgumentParser) -> None:
    to.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue (default, and -: standard input)")
    to.add_argument("--n", type=int, default=1, metavar="N", help="answers; several are printed when all are there")
    _add_adapter(to)
    _add_images(to, "the prompt holds the model's placeholder for it")
    _add_sampling(to)


def _add_chat(to: argparse.ArgumentParser) -> None:
    to.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    _add_adapter(to)
    _add_images(to, "it stands before the first line")
    _add_sampling(to)


def _add_adapter(to: argparse.ArgumentParser) -> None:
    to.add_argument("--lora-path", metavar="NAME", help="the adapter that answers, of --lora-paths (default: none)")


def _add_images(to: argparse.ArgumentParser, where: str) -> None:
    to.add_argument("--image", action="append", metavar="PATH", help=f"a picture, or its URL; {where} (repeatable)")


def _add_bench(to: argparse.ArgumentParser) -> None:
    to.add_argument("--num-prompts", type=int, default=32, metavar="N", help="requests in all (default: 32)")
    to.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="of each request (default: 128)")
    to.add_argument("--output-tokens", type=int, default=64, metavar="N", help="of each request (default: 64)")
    to.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at once (default: 8)")
    _add_json(to)


def _add_info(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "model", nargs="?", metavar="MODEL", help="print what an engine of it would take and serve (nothing is loaded)"
    )
    to.add_argument("--device-memory", metavar="SIZE", help="of another machine, such as 80GiB (with MODEL)")
    _add_json(to)


def _add_json(to: argparse.ArgumentParser) -> None:
    to.add_argument("--json", action="store_true", help="print JSON")


def _add_sampling(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("sampling")
    for name, row in PARAMETERS.items():
        if row.read is not None:
            default = _GREEDY.get(name, row.default)
            hint = " (may be given again)" if row.is_list else "" if default is None else f" (default: {default})"
            _add_flag(
                group, _sampling_flag(name), name=name, read=row.read, about=row.summary + hint, repeats=row.is_list
            )


def _add_engine(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("engine")
    for name, argument in ARGUMENTS.items():
        flags = ["--model", "--model-path"] if name == "model_path" else [_flag(name)]
        if name == "progress":
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=argument.description)
        else:
            _add_flag(group, *flags, name=name, read=argument.read, about=argument.description)


def _add_flag(
    to: argparse._ArgumentGroup,
    *flags: str,
    name: str,
    read: Callable[[str], object],
    about: str,
    repeats: bool = False,
) -> None:
    """A flag for a parameter; ``read`` makes its value of a word (bool: a switch)."""
    if read is bool:
        to.add_argument(*flags, dest=name, action="store_const", const=True, help=about)
    else:
        metavar, action = "TEXT" if read is str else "N", "append" if repeats else "store"
        to.add_argument(*flags, dest=name, action=action, type=read, metavar=metavar, help=about)


def _check_encoding(name: str, text: object) -> None:
    """Raise ValueError for bytes that are no text, which Python keeps as lone surrogates."""
    if isinstance(text, str) and (odd := re.search("[\udc80-\udcff]", text)):
        encoding = sys.getfilesystemencoding()
        raise ValueError(f"{name} is not {encoding}: it has the byte 0x{ord(odd[0]) - 0xDC00:02x}")


def _sampling_flag(name: str) -> str:
    return _flag(PARAMETERS[name].flag or name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
