"""A conversation with tools, as the endpoints of all APIs ask it: its call, and the parser of its answers."""

from __future__ import annotations

from hashlib import blake2s
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from aioengine.openai.replies import CallError
from aioengine.parsing import Content, Reasoning, ToolArguments, ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioengine.api.stream import Generation, Stream
    from aioengine.openai.served_model import ServedModel
    from aioengine.parsing import Event, OutputParser

_CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")


class ChatCall(Struct, kw_only=True):
    """A conversation, and how to answer it.

    Attributes:
        messages: as chat templates read them (``template_messages``).
        sampling: the sampling parameters.
        options: other keyword arguments of ``async_chat``.
        template, variables: its arguments ``chat_template`` and ``chat_template_kwargs``.
        tools, tool_choice: in the form of /v1/chat/completions.
        prompt: the formatted prompt, if a parser must know it.
    """

    messages: list[dict[str, Any]]
    sampling: dict[str, Any]
    options: dict[str, Any]
    template: str | None = None
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    prompt: str = ""

    def prepare(self, model: ServedModel) -> None:
        """Add the constraints of tool calls and reasoning to the sampling parameters.

        Raises:
            CallError: the template does not exist, or the answer has two constraints.
            ValueError: a tool or the choice is wrong, or the template refuses the messages.
        """
        tokenizer, output = model.engine.tokenizer, model.output_format
        if self.template is not None and self.template not in tokenizer.template_names:
            names = ", ".join(tokenizer.template_names) or "none"
            raise CallError(f"chat_template must be the name of a template of the model; there are: {names}")
        for place, tool in enumerate(self.tools or ()):
            if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
                raise CallError(
                    f"tools[{place}] must have a function with a name, got {str(tool)[:200]}", param="tools"
                )
        if isinstance(self.tool_choice, dict) and not isinstance(self.tool_choice.get("function"), dict):
            raise CallError(f"tool_choice must have a function, got {str(self.tool_choice)[:200]}", param="tool_choice")
        if self.tool_choice == "none" or not self.tools:
            self.tools = None
        if output.reasoning_parser or (self.tools and output.tool_parser):
            self.prompt = tokenizer.apply_chat_template(
                _without_images(self.messages),
                tools=self.tools,
                chat_template=self.template,
                chat_template_kwargs=self.variables,
            )
        has_constraint = not self.sampling.keys().isdisjoint(_CONSTRAINTS)
        choice = "none" if self.tools is None and self.tool_choice == "auto" else self.tool_choice
        params = output.sampling_params(
            self.tools, tool_choice=choice, parallel_tool_calls=self.parallel_tool_calls, prompt=self.prompt
        )
        if has_constraint:
            if "structural_tag" in params:
                raise CallError("tools and a format of the answer cannot be combined; set tool_choice to none")
            if (end := output.reasoning_end(self.prompt)) is not None:
                params["reasoning_end"] = end
        self.sampling = params | self.sampling

    def _arguments(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "sampling_params": self.sampling,
            "chat_template": self.template,
            "chat_template_kwargs": self.variables,
            "tools": self.tools,
            **self.options,
        }

    def generation(self, model: ServedModel) -> Generation[Any]:
        """Start the call."""
        return model.engine.async_chat(**self._arguments())

    def stream(self, model: ServedModel) -> Stream:
        """Start the call as a stream."""
        return model.engine.async_chat(**self._arguments(), stream=True)

    def parser(self, model: ServedModel) -> OutputParser:
        """Return the parser of one answer."""
        return model.output_format.parser(tools=self.tools, prompt=self.prompt)


def _without_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose images are marked, but not named, as the engine passes them to templates."""
    return [
        message | {"content": [{"type": "image"} if part["type"] == "image_url" else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def tool_call_id(model: ServedModel, rid: str, row: int, index: int) -> str:
    """Return the id of a tool call. It is the same when a stream is read again."""
    digest = blake2s(f"{rid}:{row}:{index}".encode()).hexdigest()
    # The templates of Mistral accept only ids of nine letters and digits.
    return digest[:9] if model.output_format.tool_parser == "mistral" else f"call_{digest[:24]}"


class Part(Struct):
    """A part of an answer: a text, a piece of reasoning, or a tool call.

    Attributes:
        text: the text, or the arguments of the call. call: the index of the call; -1: it is no call.
    """

    kind: type[Content | Reasoning | ToolCallBegin]
    text: str = ""
    call: int = -1
    name: str = ""


class PartReader:
    """Joins events to parts.

    Attributes:
        parts: all parts; the last one may be open.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []

    @property
    def has_calls(self) -> bool:
        return any(part.kind is ToolCallBegin for part in self.parts)

    def read(self, events: Iterable[Event]) -> list[tuple[Part, str]]:
        """Add events. Return pieces of text and their parts; a new part may have an empty piece first."""
        pieces: list[tuple[Part, str]] = []
        for event in events:
            match event:
                case ToolCallBegin(index=index, name=name):
                    self.parts.append(Part(ToolCallBegin, call=index, name=name))
                    pieces.append((self.parts[-1], ""))
                case ToolArguments(text=text):
                    self.parts[-1].text += text
                    pieces.append((self.parts[-1], text))
                case Content(text=text) | Reasoning(text=text):
                    if not self.parts or self.parts[-1].kind is not type(event):
                        self.parts.append(Part(type(event)))
                    self.parts[-1].text += text
                    pieces.append((self.parts[-1], text))
                case _:
                    pass
        return pieces


def read_answer(parser: OutputParser, text: str) -> list[Part]:
    """Return the parts of a whole answer."""
    reader = PartReader()
    reader.read([*parser.push(text), *parser.flush()])
    return reader.parts


def function_name(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice of one function in the form of /v1/chat/completions."""
    return {"type": "function", "function": {"name": choice.get("name")}}
