"""A conversation with tools, as the endpoints of all APIs ask it: its call, and the parts of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2s
from typing import Any, Final, Literal

from msgspec import Struct

from aioengine.openai.bodies import Body
from aioengine.openai.conversations import template_messages
from aioengine.openai.http_call import HttpCall
from aioengine.openai.replies import CallError
from aioengine.openai.served_model import ServedModel
from aioengine.parsing import Content, OutputParser, Reasoning, ToolArguments, ToolCallBegin

_CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")


async def chat_call(
    call: HttpCall,
    body: Body,
    messages: list[dict[str, Any]],
    sampling: dict[str, Any],
    options: Mapping[str, object],
    **fields: Any,
) -> ChatCall:
    """Return the call of a body.

    messages: in the form of /v1/chat/completions. sampling, options, fields: of ``ChatCall``.

    Raises:
        CallError: the model or the template does not exist, or the answer has two constraints.
        ValueError: a message, a tool or the choice is wrong, or the template refuses the messages.
    """
    name, adapter = await call.model.find(body.model)
    chat = ChatCall(
        model=call.model,
        name=name,
        messages=template_messages(messages),
        sampling=sampling,
        options=call.options(adapter, **options),
        **fields,
    )
    chat.prepare()
    return chat


class ChatCall(Struct, kw_only=True):
    """A conversation, and how to answer it.

    Attributes:
        name: of the model, for the client.
        messages: as chat templates read them (``template_messages``).
        sampling: the sampling parameters.
        options: other keyword arguments of ``async_chat``.
        template, variables: its arguments ``chat_template`` and ``chat_template_kwargs``.
        tools, tool_choice: in the form of /v1/chat/completions.
        prompt: the formatted prompt, if a parser must know it.
    """

    model: ServedModel
    name: str
    messages: list[dict[str, Any]]
    sampling: dict[str, Any]
    options: dict[str, Any]
    template: str | None = None
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    prompt: str = ""

    def prepare(self) -> None:
        """Add the constraints of tool calls and reasoning to the sampling parameters. Raises as ``chat_call``."""
        tokenizer, output = self.model.engine.tokenizer, self.model.output_format
        if self.template is not None and self.template not in tokenizer.template_names:
            names = ", ".join(tokenizer.template_names) or "none"
            raise CallError(f"chat_template must be the name of a template of the model; allowed: {names}")
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

    def start(self) -> Callable[..., Any]:
        """Return the function that makes the call. With ``stream=True``, its result is a stream."""
        return partial(
            self.model.engine.async_chat,
            messages=self.messages,
            sampling_params=self.sampling,
            chat_template=self.template,
            chat_template_kwargs=self.variables,
            tools=self.tools,
            **self.options,
        )

    def reader(self) -> AnswerReader:
        """Return the reader of one answer."""
        return AnswerReader(self.model.output_format.parser(tools=self.tools, prompt=self.prompt))

    def tool_call_id(self, rid: str, row: int, index: int) -> str:
        """Return the id of a tool call. It is the same when a stream is read again."""
        digest = blake2s(f"{rid}:{row}:{index}".encode()).hexdigest()
        # The templates of Mistral accept only ids of nine letters and digits.
        return digest[:9] if self.model.output_format.tool_parser == "mistral" else f"call_{digest[:24]}"


def _without_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose images are marked, but not named, as the engine passes them to templates."""
    return [
        message | {"content": [{"type": "image"} if part["type"] == "image_url" else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


class Part(Struct):
    """A part of an answer: a text, a piece of reasoning, or a tool call.

    Attributes:
        index: its place in the answer. text: the text, or the arguments of the call. call: the number of the call.
    """

    kind: type[Content | Reasoning | ToolCallBegin]
    index: int
    text: str = ""
    call: int = 0
    name: str = ""


class AnswerReader:
    """Reads the parts of one answer, one after the other.

    Attributes:
        parts: all parts; the last one may grow.
    """

    def __init__(self, parser: OutputParser) -> None:
        self.parts: list[Part] = []
        self._parser = parser

    @property
    def has_calls(self) -> bool:
        return any(part.kind is ToolCallBegin for part in self.parts)

    def read(self, text: str, *, is_last: bool = True) -> Iterator[tuple[Literal["begin", "text", "end"], Part, str]]:
        """Read text of the answer. Yield each part when it begins (still empty), gets a piece of text, and ends."""
        for event in self._parser.push(text) + (self._parser.flush() if is_last else []):
            new: Part | None = None
            piece = ""
            match event:
                case ToolCallBegin(index=call, name=name):
                    new = Part(ToolCallBegin, len(self.parts), call=call, name=name)
                case ToolArguments(text=piece):
                    pass
                case Content(text=piece) | Reasoning(text=piece):
                    if not self.parts or self.parts[-1].kind is not type(event):
                        new = Part(type(event), len(self.parts))
                case _:  # the next part, or the end of the answer, ends a call
                    continue
            if new is not None:
                if self.parts:
                    yield "end", self.parts[-1], ""
                self.parts.append(new)
                yield "begin", new, ""
            if piece:
                self.parts[-1].text += piece
                yield "text", self.parts[-1], piece
        if is_last and self.parts:
            yield "end", self.parts[-1], ""

    def read_all(self, text: str) -> list[Part]:
        """Read a whole answer, and return its parts."""
        for _ in self.read(text):
            pass
        return self.parts


def function_name(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice of one function in the form of /v1/chat/completions. Raises CallError if it has no name."""
    if not isinstance(choice.get("name"), str):
        raise CallError(f"tool_choice must have the name of a tool, got {str(choice)[:200]}", param="tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}
