"""Shared by the unit tests: what holds for every server of a job."""

import threading

import grpc
import pytest
from tests.waiting import LIMIT_S

from holdfast.control.token import TOKEN_KEY


@pytest.fixture
def has_four_calls():
    """One more call comes through only when another is over: not even its wrong token is looked at."""

    def check(channel, method, headers):
        never = threading.Event()
        call = channel.stream_stream(method)
        grpc.channel_ready_future(channel).result(LIMIT_S)  # it knows what the server grants

        def stranger(timeout_s):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter(()), metadata=((TOKEN_KEY, "wrong"),), timeout=timeout_s))
            return caught.value.code()

        def silent():
            return call(iter(never.wait, True), metadata=headers)

        calls = [silent() for _ in range(3)]
        assert stranger(LIMIT_S) is grpc.StatusCode.UNAUTHENTICATED
        calls.append(silent())
        assert stranger(0.5) is grpc.StatusCode.DEADLINE_EXCEEDED
        calls[0].cancel()
        assert stranger(LIMIT_S) is grpc.StatusCode.UNAUTHENTICATED
        never.set()

    return check
