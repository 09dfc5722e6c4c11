"""A new sampling parameter needs only a row in the table to reach the runner."""

from __future__ import annotations

import contextlib
import io
import json
import pickle

import msgspec
import pytest
from msgspec import UnsetType

from aioengine.api import checks
from aioengine.api.parameter_table import PARTS, Parameter, other_name, parameter
from aioengine.api.params import PARAMETERS, SamplingParams
from aioengine.cli import flags
from aioengine.errors import UnknownParameterError
from aioengine.protocol.messages import Limits, Sampling, TextRules
from aioengine.scheduler.plan import StepPlan
from aioengine.testing.fake_engine import fake_engine
from aioengine.testing.fake_runner import FakeRunner, FakeTicket


class MoreParams(SamplingParams, frozen=True, kw_only=True):
    """Has another parameter, which the runner receives."""

    share: float | None = parameter(
        0.0, checks.number_from(0, 1), "0 to 1: a share. More words", wire="sampling.min_p", read=float
    )
    part: float | UnsetType | None = other_name("share")


def test_a_parameter_needs_only_a_row_to_reach_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Sampling] = []
    launch = FakeRunner.launch

    def recorded(self: FakeRunner, plan: StepPlan) -> FakeTicket:
        received.extend(opened.sampling for opened in plan.new_rows)
        return launch(self, plan)

    monkeypatch.setattr(FakeRunner, "launch", recorded)
    with fake_engine() as engine:
        for given in (MoreParams(share=0.25), MoreParams(part=0.5), MoreParams()):
            engine.generate("x", msgspec.structs.replace(given, max_new_tokens=1))
    assert [sampling.min_p for sampling in received] == [0.25, 0.5, 0.0]


def test_new_parameter_is_checked_encoded_and_documented() -> None:
    with pytest.raises(ValueError, match=r"share must be a number from 0 to 1, got 2\.0"):
        MoreParams(share=2.0)
    with pytest.raises(ValueError, match="'share' is given twice, as 'part' and 'share'"):
        MoreParams(part=0.5, share=0.5)
    with pytest.raises(UnknownParameterError, match=r"did you mean 'share'\?"):
        MoreParams(shares=0.5)  # type: ignore[call-arg]
    with pytest.raises(UnknownParameterError):
        SamplingParams(share=0.5)  # type: ignore[call-arg]
    assert MoreParams.parse({"part": 0.5}) == MoreParams(share=0.5)
    assert MoreParams.parse(None) == MoreParams()
    params = MoreParams(share=0.5, stop=["a"])
    assert msgspec.json.decode(msgspec.json.encode(params), type=MoreParams) == params
    assert msgspec.json.decode('{"part": 0.5, "stop": ["a"]}', type=MoreParams) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert "share (default 0.0): 0 to 1: a share. More words" in (MoreParams.__doc__ or "")
    assert "``part`` for ``share``" in (MoreParams.__doc__ or "")


def test_a_parameter_of_a_subclass_has_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flags, "PARAMETERS", MoreParams.__table__.rows)
    monkeypatch.setattr(flags, "ALIASES", MoreParams.__table__.aliases)
    assert flags.read(["generate", "--share", "0.5", "x"]).sampling()["share"] == 0.5
    with pytest.raises(SystemExit):
        flags.read(["generate", "--part", "0.5", "x"])
    assert "--part (did you mean --share?)" in capsys.readouterr().err
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        flags.read(["generate", "--help"])
    assert "--share N" in printed.getvalue()
    assert "0 to 1: a share (default: 0.0)\n" in printed.getvalue()


@pytest.mark.parametrize("name", PARAMETERS)
def test_null_is_the_default(name: str) -> None:
    decoded = msgspec.json.decode(json.dumps({name: None}), type=SamplingParams)
    expected = None if name == "max_new_tokens" else PARAMETERS[name].default
    assert getattr(decoded, name) == getattr(SamplingParams.parse({name: None}), name) == expected


@pytest.mark.parametrize(("name", "row"), PARAMETERS.items(), ids=PARAMETERS)
def test_every_row_names_fields_of_the_messages_that_have_the_same_default(name: str, row: Parameter) -> None:
    parts = dict(zip(PARTS, (Sampling(0), Limits(0), TextRules()), strict=True))
    for place in row.wire.split():
        part, _, field = place.partition(".")
        default = getattr(parts[part], field or name)
        assert default == row.default or row.default is None
