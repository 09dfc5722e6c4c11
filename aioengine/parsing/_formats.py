"""The output format of a model: how it marks reasoning and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

from aioengine import plugins
from aioengine.api import checks
from aioengine.constraints.structural_tag import lark_of
from aioengine.parsing._events import Content, Event
from aioengine.parsing._reader import TextReader
from aioengine.parsing._tools import ANY_OBJECT, Format, Tool, ToolCallFormat, function_of, tools_of
from aioengine.parsing.think import ThinkTags

ToolDict: TypeAlias = Mapping[str, Any]
"""A tool in the form of chat templates: ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""
ToolChoice: TypeAlias = str | Mapping[str, Any]
"""``"auto"``, ``"required"``, ``"none"``, or ``{"type": "function", "function": {"name": ...}}``."""

_TOOL_MARKS: Final = {
    "gpt_oss": (r"<\|channel\|>",),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "hermes": ("<tool_call>", r'\\?"arguments\\?"'),
    "mistral": (r"\[TOOL_CALLS\]",),
    "deepseek_v3": ("<｜tool▁call▁begin｜>",),
    "llama3": (r"<\|start_header_id\|>", r'\\?"parameters\\?":'),
}
"""Tool parser -> patterns that all occur in the chat templates of its models. The first match counts."""
_REASONING_MARKS: Final = {
    "gpt_oss": _TOOL_MARKS["gpt_oss"],
    "think": ("</think>",),
    "mistral_think": (r"\[THINK\]",),
}
"""Reasoning parser -> patterns, as in ``_TOOL_MARKS``."""


def output_format(
    chat_template: str = "", *, tool_parser: str | None = "auto", reasoning_parser: str | None = "auto"
) -> OutputFormat:
    """Return the output format of a model.

    chat_template: the text of its chat template, which ``"auto"`` searches for the marks of a format. tool_parser,
    reasoning_parser: the name of a format; None: such text stays content.

    Raises:
        ValueError: there is no parser of this name.
    """
    tool_name = _chosen("tool_parser", tool_parser, _TOOL_MARKS, chat_template)
    reasoning_name = _chosen("reasoning_parser", reasoning_parser, _REASONING_MARKS, chat_template)
    if "gpt_oss" in (tool_name, reasoning_name):
        tool_name = reasoning_name = "gpt_oss"  # one parser for both
    return OutputFormat(tool_name, reasoning_name)


def _chosen(parameter: str, name: str | None, marks: Mapping[str, tuple[str, ...]], template: str) -> str | None:
    if name == "auto":
        return next((known for known, texts in marks.items() if all(re.search(text, template) for text in texts)), None)
    if name is not None and name not in marks:
        hint = checks.did_you_mean(name, marks)
        raise ValueError(f"{parameter}={name!r} is not known{hint}; allowed: auto, {', '.join(marks)}, None")
    return name


class OutputFormat:
    """How a model marks reasoning and tool calls in its text.

    Attributes:
        tool_parser, reasoning_parser: the names of the formats; None: such text stays content.
    """

    def __init__(self, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._calls: ToolCallFormat | None = plugins.load("parsing", tool_parser)() if tool_parser else None
        self._reads_always = self._calls is not None and self._calls.answer_begin is not None
        self._reasoning: ThinkTags | None = None
        if reasoning_parser and reasoning_parser != tool_parser:
            self._reasoning = plugins.load("parsing", reasoning_parser)()

    def reasoning_end(self, prompt: str) -> str | None:
        """Return the text that ends the reasoning, if the answer to this prompt begins with reasoning; else None.

        It is the sampling parameter ``reasoning_end`` for other constraints, such as ``json_schema``.
        """
        if self._calls and self._calls.answer_begin:
            return self._calls.answer_begin
        return self._reasoning.end if self._reasoning and self._reasoning.is_open(prompt) else None

    def parser(self, *, tools: Sequence[ToolDict] | None = None, prompt: str = "") -> OutputParser:
        """Return a parser for one answer.

        tools: the tools of the prompt; without tools, all text of calls stays content. prompt: the formatted prompt or
        its end, which shows whether the answer begins with reasoning.
        """
        readers: list[TextReader] = []
        if self._reasoning:
            readers.append(TextReader(partial(self._reasoning.read, is_open=self._reasoning.is_open(prompt))))
        if self._calls and (tools or self._reads_always):
            readers.append(TextReader(partial(self._calls.read, tools=tools_of(tools or ()))))
        return OutputParser(readers)

    def sampling_params(
        self,
        tools: Sequence[ToolDict] | None = None,
        *,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        prompt: str = "",
    ) -> dict[str, Any]:
        """Return sampling parameters with which an answer has valid tool calls (``structural_tag``, ``reasoning_end``)
        and contains the special tokens that the parser reads (``skip_special_tokens``). Use them also without tools.

        ``"auto"``: the model writes text or calls tools. ``"required"``: it only calls tools, at least one. A named
        function is called once. With ``"none"``, or with ``"auto"`` and no tools, there is no constraint. Arguments fit
        the schemas of their tools. A schema that cannot be enforced is replaced by any object, unless the tool has
        ``"strict": True``.

        Raises:
            ValueError: a tool or the choice is wrong, or this format has no tool calls and the choice needs them.
            UnsupportedSchemaError: the schema of a strict tool cannot be enforced.
        """
        params: dict[str, Any] = {}
        for part in (self._reasoning, self._calls if tools or self._reads_always else None):
            if part and part.special_tokens:
                params["skip_special_tokens"] = False
        available, name = tools_of(tools or ()), _name_of(tool_choice)
        if tool_choice == "none" or (tool_choice == "auto" and (not available or self._calls is None)):
            return params
        if self._calls is None:
            raise ValueError(
                f"tool_choice={checks.shown(tool_choice)} needs a tool parser, and the chat template of this model has "
                "none; name one with tool_parser (--tool-parser of the server)"
            )
        chosen = [tool for tool in available if name in {None, tool.name}]
        if not chosen:
            names = ", ".join(tool.name for tool in available) or "none"
            raise ValueError(
                f"tool_choice={checks.shown(tool_choice)} needs a tool of the request; the tools are: {names}"
            )
        calls, is_required, is_parallel = self._calls, tool_choice != "auto", parallel_tool_calls and not name

        def answer_with(callable_tools: Sequence[Tool]) -> Format:
            """Return the format of an answer, with the reasoning that it may begin with."""
            answer = calls.format_of(callable_tools, is_required=is_required, is_parallel=is_parallel)
            reasoning = self._reasoning
            if reasoning is None or prompt.rstrip().endswith((reasoning.begin, reasoning.end)):
                return answer
            return reasoning.format_of(answer)

        answer = answer_with(chosen)
        error = _refusal(json.dumps(answer))
        if error is not None:
            if any(tool.is_strict for tool in chosen):
                raise ValueError(f"the tools cannot be enforced together: {error}") from error
            answer = answer_with([tool._replace(schema=ANY_OBJECT) for tool in chosen])
        if self._reasoning and self._reasoning.is_open(prompt):
            params["reasoning_end"] = self._reasoning.end
        return {**params, "structural_tag": {"format": answer}}


@lru_cache(maxsize=128)  # requests repeat their tools
def _refusal(answer: str) -> ValueError | None:
    """Return the reason why a format, as JSON text, cannot be enforced, or None."""
    try:
        lark_of(f'{{"format": {answer}}}', whitespace={})
    except ValueError as error:
        return error
    return None


def _name_of(choice: ToolChoice) -> str | None:
    """Return the name of the function that the model must call, or None. Raises ValueError for a wrong choice."""
    if isinstance(choice, Mapping):
        name = function_of(choice).get("name")
        if isinstance(name, str):
            return name
    elif choice in ("auto", "none", "required"):
        return None
    raise ValueError(
        "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}, got "
        f"{checks.shown(choice)}"
    )


class OutputParser:
    """Finds reasoning and tool calls in one answer.

    Text comes out as soon as it cannot begin a tag. The events do not depend on the pieces in which the text arrives,
    if neighboring pieces of one kind are joined. Whitespace beside tags is removed, everything else comes out. No text
    raises an exception: a call without a name, or with arguments that do not begin as an object, comes out as content.
    The arguments of a call come out as the model writes them. They are valid JSON if the request is constrained
    (``OutputFormat.sampling_params``) and the call is complete.
    """

    def __init__(self, readers: Sequence[TextReader]) -> None:
        """readers: each one reads the content of the one before."""
        self._readers = readers

    def push(self, text: str) -> list[Event]:
        """Add the next piece of text, and return the events that are certain now."""
        return self._read(text, 0, is_over=False)

    def flush(self) -> list[Event]:
        """Return the events of the text that was held back. Call this after the last piece."""
        return self._read("", 0, is_over=True)

    def _read(self, text: str, index: int, *, is_over: bool) -> list[Event]:
        if index == len(self._readers):
            return [Content(text)] if text else []
        events: list[Event] = []
        for event in self._readers[index].read(text, is_over=is_over):
            events += self._read(event.text, index + 1, is_over=False) if isinstance(event, Content) else [event]
        if is_over:
            events += self._read("", index + 1, is_over=True)
        return events
