"""Parsers that find reasoning and tool calls in the text of an answer, while it streams or at once.

``output_format`` chooses the format of a model. Its ``parser`` reads one answer, and its ``sampling_params`` constrain
an answer so that the arguments of tool calls are valid. A new format is one file in this folder (``plugins``), with a
row in ``_formats.py``.
"""

from aioengine.parsing._events import Content, Event, Reasoning, ToolArguments, ToolCallBegin, ToolCallEnd
from aioengine.parsing._formats import OutputFormat, OutputParser, output_format

ALIASES = {"mistral_think": "think:MistralThinkTags"}

__all__ = [
    "Content",
    "Event",
    "OutputFormat",
    "OutputParser",
    "Reasoning",
    "ToolArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "output_format",
]
