"""The error for a name of another engine has the name to use here."""

from __future__ import annotations

import inspect

import pytest

import aioengine
from aioengine import AsyncEngine, Engine, SamplingParams, UnknownParameterError
from aioengine.api.args import engine_config
from aioengine.api.foreign_names import ALIASES, OUR_WAY
from aioengine.api.parameter_table import ARGUMENTS_OF_CALLS
from aioengine.frontend.intake.request_options import ChatOptions, GenerateOptions
from aioengine.frontend.intake.requests import generate_request
from aioengine.testing.fake_engine import fake_async_engine, fake_engine


def say(name: str) -> str:
    return f"{name}.*{OUR_WAY[name].partition(' (')[0]}"


@pytest.mark.parametrize("name", sorted(OUR_WAY.keys() - {"text"}))  # aioengine.text is a package
def test_error_for_package_names_of_other_engines_has_our_name(name: str) -> None:
    with pytest.raises(AttributeError, match=say(name)):
        getattr(aioengine, name)
    assert not hasattr(aioengine, name)
    with pytest.raises(ImportError, match=say(name)):
        exec(f"from aioengine import {name}")


def test_unknown_names_of_the_package_are_plain_errors() -> None:
    with pytest.raises(AttributeError, match="^module 'aioengine' has no attribute 'zzz'$"):
        aioengine.zzz  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'zzz'"):
        exec("from aioengine import zzz")


@pytest.mark.parametrize("name", OUR_WAY)
def test_error_for_methods_of_other_engines_has_our_name(name: str) -> None:
    with fake_engine() as engine:
        for either in (engine, fake_async_engine()):
            with pytest.raises(AttributeError, match=say(name)):
                getattr(either, name)
            assert not hasattr(either, name)


@pytest.mark.parametrize("name", ["open_session", "load_lora_adapter", "attach", "admit"])
def test_error_for_removed_async_names_has_the_plain_name(name: str) -> None:
    with fake_engine() as engine:
        for owner in (engine, fake_async_engine()):
            with pytest.raises(AttributeError, match=f"has no attribute 'async_{name}'; its name is {name}$"):
                getattr(owner, f"async_{name}")


def test_error_for_short_names_of_async_methods_has_our_name() -> None:
    for name in ("generate", "chat"):
        with pytest.raises(AttributeError, match=rf"await engine\.async_{name}\("):
            getattr(fake_async_engine(), name)
    with pytest.raises(AttributeError, match="^AsyncEngine has no attribute 'zzz'$"):
        fake_async_engine().zzz  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", sorted(OUR_WAY.keys() - ALIASES.keys()))
def test_error_for_constructor_arguments_of_other_engines_has_our_name(name: str) -> None:
    for make in (Engine, AsyncEngine):
        with pytest.raises(TypeError, match=say(name)):
            make(**{name: True})  # type: ignore[arg-type]


def test_names_that_the_constructor_knows_still_work() -> None:
    assert engine_config(None, {"max_model_len": 64}).model.context_length == 64
    assert engine_config(None, {"gpu_memory_utilization": 0.5}).memory.mem_fraction_static == 0.5


@pytest.mark.parametrize("name", OUR_WAY)
def test_error_for_call_options_of_other_engines_has_our_name(name: str) -> None:
    with pytest.raises(TypeError, match=say(name)):
        generate_request("a", None, None, stream=False, options={name: 1})


def test_constructor_arguments_in_a_call_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="the constructor of the engine takes it"):
        generate_request("a", None, None, stream=False, options={"page_size": 1})


@pytest.mark.parametrize("name", OUR_WAY)
def test_error_for_sampling_parameters_of_other_engines_has_our_name(name: str) -> None:
    for make in (lambda: SamplingParams(**{name: 1}), lambda: SamplingParams.parse({name: 1})):  # type: ignore[arg-type]
        with pytest.raises(UnknownParameterError, match=say(name)):
            make()


def test_arguments_of_calls_are_no_sampling_parameters() -> None:
    known = {*GenerateOptions.__annotations__, *ChatOptions.__annotations__, "input_ids", "stream"}
    assert known == ARGUMENTS_OF_CALLS
    for name in known:
        with pytest.raises(UnknownParameterError, match=f"{name!r}: it is an argument of the call, beside sampling_p"):
            SamplingParams.parse({name: None})


def test_messages_given_as_a_prompt_are_for_chat() -> None:
    with pytest.raises(TypeError, match=r"prompt\[0\] must be a string \(messages with a role are given to chat\)"):
        generate_request([{"role": "user", "content": "a"}], None, None, stream=False, options={})


def test_unknown_arguments_of_other_methods_name_the_nearest() -> None:
    with fake_engine() as engine:
        with pytest.raises(
            TypeError, match=r"unexpected argument 'softmax' \(did you mean 'apply_softmax'\?\); allowed: "
        ):
            engine.score("a", ["b"], [1], softmax=True)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"unexpected argument 'timout' \(did you mean 'timeout'\?\)"):
            engine.open_session(timout=1)  # type: ignore[call-arg]


async def test_unknown_arguments_of_methods_that_are_awaited_name_the_nearest() -> None:
    engine = fake_async_engine()
    assert inspect.iscoroutinefunction(engine.drain)
    with pytest.raises(TypeError, match=r"unexpected argument 'timout' \(did you mean 'timeout'\?\)"):
        await engine.drain(timout=1)  # type: ignore[call-arg]
    async with engine:
        with pytest.raises(TypeError, match=r"unexpected argument 'softmax' \(did you mean 'apply_softmax'\?\)"):
            await engine.async_score("a", ["b"], [1], softmax=True)  # type: ignore[call-arg]


def test_with_on_an_async_engine_raises_an_error_with_the_correct_form() -> None:
    message = "needs `async with`; for `with`, use Engine"
    with pytest.raises(TypeError, match=message), fake_async_engine():  # type: ignore[attr-defined]
        pass
