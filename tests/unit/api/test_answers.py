from __future__ import annotations

import json

import pytest

from aioengine.api.answers import Answer, BatchOutput, FinishReason, error, finish_reason
from aioengine.errors import RequestError, RequestTooLargeError
from aioengine.frontend.calls.call import CallRow
from aioengine.protocol.columns import WEIGHT_VERSION, Extra
from aioengine.protocol.messages import End, FinishCode
from tests.kit.calls import add_row, make_call


def answer_of(text: str, token_ids: list[int], end: End, delivered_at: float, index: int = 0) -> Answer:
    """Return the answer of a row whose call was made at 10 s."""
    row = a_row(index)
    row.put(text, token_ids)
    row.call.end_row(row, end, delivered_at)
    answer = row.call.results[index]
    assert isinstance(answer, dict)
    return answer


def a_row(index: int = 0, *, num_rows: int = 3, **fields: bool) -> CallRow:
    """``fields``: of the call's request."""
    call = make_call(num_rows, called_at=10.0, **fields)
    return add_row(call, index, seed=5, tokenize_s=1.0, prompt_token_ids=[1, 2, 3])


def finished(code: FinishCode, **fields: object) -> End:
    return End(uid=1, code=code, ended_at=20.0, **fields)  # type: ignore[arg-type]


class TestWeightVersions:
    def test_rows_have_a_span_of_tokens_for_each_version(self) -> None:
        row = a_row()
        row.put_extra(Extra(1, 3, WEIGHT_VERSION, b"v2"))
        row.put_extra(Extra(1, 5, WEIGHT_VERSION, b"v2"))
        row.put_extra(Extra(1, 6, WEIGHT_VERSION, b"v3"))
        row.put("text", [10] * 6)
        row.call.end_row(row, finished(FinishCode.LENGTH), 21.0)
        answer = row.call.results[0]
        assert isinstance(answer, dict)
        assert answer["meta_info"]["weight_versions"] == [("default", 0, 3), ("v2", 3, 6)]
        assert answer["meta_info"]["weight_version"] == "v2"

    def test_tokens_that_are_computed_again_have_the_new_version(self) -> None:
        """The first process was lost after it had reported a version of tokens that were not delivered."""
        row = a_row()
        row.put_extra(Extra(1, 5, WEIGHT_VERSION, b"v2"))
        row.put_extra(Extra(1, 2, WEIGHT_VERSION, b"v3"))
        row.put("text", [10] * 8)
        row.call.end_row(row, finished(FinishCode.LENGTH), 21.0)
        answer = row.call.results[0]
        assert isinstance(answer, dict)
        assert answer["meta_info"]["weight_versions"] == [("default", 0, 2), ("v3", 2, 8)]


class TestFinishReason:
    def test_finish_reason_is_a_dict_that_equals_its_type(self) -> None:
        reason = FinishReason(type="stop", matched=7)
        assert reason == "stop"
        assert reason != "length"
        assert reason == {"type": "stop", "matched": 7}
        assert reason != {"type": "stop", "matched": 8}
        assert str(reason) == f"{reason}" == "stop"
        assert reason in ("length", "stop")
        assert {"stop": 1}[reason] == 1  # type: ignore[index]
        assert json.loads(json.dumps(reason)) == {"type": "stop", "matched": 7}

    def test_matched_is_none_without_a_match(self) -> None:
        reason = FinishReason(type="length", length=3)
        assert reason["matched"] is None
        with pytest.raises(KeyError):
            reason["other"]

    @pytest.mark.parametrize(
        ("end", "expected"),
        [
            (finished(FinishCode.STOP, matched="###"), {"type": "stop", "matched": "###"}),
            (finished(FinishCode.STOP, matched=0), {"type": "stop", "matched": 0}),
            (finished(FinishCode.LENGTH), {"type": "length", "length": 12}),
            (finished(FinishCode.DEADLINE, matched="queue"), {"type": "deadline", "which": "queue"}),
            (finished(FinishCode.ABORT), {"type": "abort", "message": "aborted by the caller"}),
            (finished(FinishCode.SHUTDOWN, message="bye"), {"type": "shutdown", "message": "bye"}),
            (
                finished(FinishCode.TOO_LARGE, message="9 pages"),
                {"type": "abort", "message": "9 pages", "err_type": "RequestTooLargeError"},
            ),
        ],
    )
    def test_finish_reasons_of_every_end(self, end: End, expected: dict[str, object]) -> None:
        assert finish_reason(end, 12) == expected

    def test_some_ends_are_errors(self) -> None:
        assert isinstance(error(finished(FinishCode.TOO_LARGE)), RequestTooLargeError)
        failed = error(finished(FinishCode.FAILED, stage="sample", message="nan"))
        assert isinstance(failed, RequestError)
        assert (failed.stage, failed.cause) == ("sample", "nan")
        for code in (FinishCode.STOP, FinishCode.LENGTH, FinishCode.ABORT, FinishCode.DEADLINE, FinishCode.SHUTDOWN):
            assert error(finished(code)) is None


class TestDicts:
    def test_the_keys_of_a_chunk_before_the_last(self) -> None:
        row = a_row(is_stream=True, num_rows=1)
        row.put("four", [4, 5, 6])
        row.take()
        row.put("new", [7, 8])
        assert row.take() == {
            "text": "new",
            "output_ids": [7, 8],
            "text_offset": 4,
            "token_offset": 3,
            "meta_info": {
                "id": "x",
                "finish_reason": None,
                "prompt_tokens": 3,
                "completion_tokens": 5,
                "reasoning_tokens": 0,
                "weight_version": "default",
                "dp_rank": None,
                "seed": 5,
                "cached_tokens": 0,
                "num_preemptions": 0,
                "num_retractions": 0,
            },
        }

    def test_keys_of_an_answer(self) -> None:
        end = finished(
            FinishCode.STOP, matched=0, num_cached=2, num_preemptions=1, admitted_at=12.0, first_token_at=15.0
        )
        answer = answer_of("all", [7], end, 20.5)
        assert "index" not in answer
        assert "prompt_token_ids" not in answer
        info = answer["meta_info"]
        assert info["finish_reason"] == "stop"
        assert (info["cached_tokens"], info["cached_tokens_details"]) == (2, {"device": 2, "host": 0})
        assert info["num_preemptions"] == info["num_retractions"] == 1
        assert info["e2e_latency"] == 10.5
        assert info["timings"] == {
            "tokenize_s": 1.0,
            "queue_s": 1.0,
            "prefill_s": 3.0,
            "decode_s": 5.0,
            "deliver_s": 0.5,
            "first_token_s": 5.0,
            "total_s": 10.5,
        }

    def test_index_and_prompt_are_returned_on_request(self) -> None:
        row = a_row(2, is_stream=True, shows_prompt=True)
        row.put("", [])
        chunk = row.take()
        assert chunk["index"] == 2
        assert chunk["prompt_token_ids"] == [1, 2, 3]

    @pytest.mark.parametrize("reached", ["nothing", "admitted", "odd clocks"])
    def test_timings_add_up_at_every_stage(self, reached: str) -> None:
        times: dict[str, object] = {
            "nothing": {},
            "admitted": {"admitted_at": 13.0},
            "odd clocks": {"admitted_at": 9.0, "first_token_at": 25.0},
        }[reached]  # type: ignore[assignment]
        answer = answer_of("", [], finished(FinishCode.ABORT, **times), 20.5)
        timings = answer["meta_info"]["timings"]
        stages = [timings[name] for name in ("tokenize_s", "queue_s", "prefill_s", "decode_s", "deliver_s")]  # type: ignore[literal-required]
        assert min(stages) >= 0
        assert sum(stages) == pytest.approx(timings["total_s"]) == pytest.approx(10.5)


class TestBatchOutput:
    OUTS = BatchOutput(
        answer_of(f"text {number}", [number] * number, finished(FinishCode.LENGTH), 21.0, number) for number in range(3)
    )

    def test_batch_output_is_a_list_of_dicts(self) -> None:
        assert isinstance(self.OUTS, list)
        assert self.OUTS[1]["text"] == "text 1"
        assert [out["text"] for out in self.OUTS] == ["text 0", "text 1", "text 2"]
        json.dumps(self.OUTS)

    def test_a_key_returns_the_column(self) -> None:
        assert self.OUTS["text"] == ["text 0", "text 1", "text 2"]
        assert self.OUTS["output_ids"] == [[], [1], [2, 2]]
        assert self.OUTS["meta_info"]["completion_tokens"] == [0, 1, 2]
        assert self.OUTS["meta_info"]["finish_reason"] == ["length"] * 3
        assert self.OUTS["meta_info"][2]["id"] == "x_2"
        assert self.OUTS["meta_info"][1:]["id"] == ["x_1", "x_2"]

    def test_slices_have_columns(self) -> None:
        assert self.OUTS[1:]["text"] == ["text 1", "text 2"]

    def test_an_unknown_column_is_a_key_error_with_a_suggestion(self) -> None:
        with pytest.raises(
            KeyError, match=r"no column 'txt' \(did you mean 'text'\?\); the columns are text, output_ids, meta"
        ):
            self.OUTS["txt"]
        with pytest.raises(KeyError, match="no column 'tokens'.*the columns are .*completion_tokens"):
            self.OUTS["meta_info"]["tokens"]

    def test_an_exception_is_an_entry_of_every_column(self) -> None:
        failure = RequestError("sample", "nan")
        outs = BatchOutput([self.OUTS[0], failure])  # type: ignore[list-item]
        assert outs["text"] == ["text 0", failure]
        assert outs["meta_info"]["id"] == ["x_0", failure]

    def test_an_empty_batch_has_empty_columns(self) -> None:
        assert BatchOutput()["text"] == []
